// Closures from one thread to another: the owner waits on fd() and runs them in order.
//
// Owner: the receiving thread. Threads: Post from any thread; Drain only from the owner. Blocks:
// never.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

class Mailbox {
 public:
  using Task = std::function<void()>;

  Status Open() {
    SLICE_ASSIGN_OR_RETURN(event_, CreateEventFd());
    return Status::Ok();
  }
  const Fd& fd() const { return event_; }

  void Post(Task task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    SignalEventFd(event_);
  }

  // Runs what has been posted until now; true if there was something. Tasks may post again.
  // `clear`: fd() is watched level-triggered, so it must be read.
  bool Drain(bool clear = true) {
    if (clear) ClearEventFd(event_);
    std::vector<Task> tasks;
    {
      std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (Task& task : tasks) task();
    return !tasks.empty();
  }

 private:
  Fd event_;
  std::mutex mutex_;
  std::vector<Task> tasks_;
};

}  // namespace slice::server
