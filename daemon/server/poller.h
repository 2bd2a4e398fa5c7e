// epoll for the server thread: descriptors with callbacks. A callback may add and remove
// descriptors, its own too.
//
// Owner and thread: the server thread. Blocks: in Wait, at most its timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "common/fd.h"
#include "common/status.h"
#include "common/units.h"

namespace slice::server {

class Poller {
 public:
  using Callback = std::function<void(uint32_t events)>;

  Status Open();
  // Readable when a callback waits: for a poll of several things.
  const Fd& fd() const { return epoll_; }
  // `fd` stays the caller's; Remove it before it is closed. `events` as EPOLLIN (0: hang-ups only).
  Status Add(int fd, uint32_t events, Callback callback);
  void SetEvents(int fd, uint32_t events);
  void Remove(int fd);
  // Runs the callbacks of what is ready. `timeout` < 0: until something is.
  void Wait(DurationNs timeout);

 private:
  struct Entry {
    uint64_t serial =
        0;  // tells a descriptor from a closed one with the same number, within one Wait
    Callback callback;
  };
  Fd epoll_;
  uint64_t next_serial_ = 1;
  std::unordered_map<int, std::shared_ptr<Entry>> entries_;
};

}  // namespace slice::server
