#include "daemon/server/poller.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>

namespace slice::server {
namespace {
constexpr int kEventsPerWait = 64;

// Descriptor in the low half, serial (truncated) in the high half.
uint64_t Key(int fd, uint64_t serial) { return (serial << 32) | static_cast<uint32_t>(fd); }
}  // namespace

Status Poller::Open() {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return ErrnoError(StatusCode::kNoMemory, errno, "epoll_create1");
  return Status::Ok();
}

Status Poller::Add(int fd, uint32_t events, Callback callback) {
  auto entry = std::make_shared<Entry>();
  entry->serial = next_serial_++ & 0xffffffffu;
  entry->callback = std::move(callback);
  epoll_event event{};
  event.events = events;
  event.data.u64 = Key(fd, entry->serial);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot watch descriptor %d", fd);
  }
  entries_[fd] = std::move(entry);
  return Status::Ok();
}

void Poller::SetEvents(int fd, uint32_t events) {
  const auto found = entries_.find(fd);
  if (found == entries_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = Key(fd, found->second->serial);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::Remove(int fd) {
  if (entries_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Poller::Wait(DurationNs timeout) {
  std::array<epoll_event, kEventsPerWait> events{};
  // Rounded up: waking a millisecond early would spin until the time has come.
  const int timeout_ms =
      timeout < 0 ? -1 : static_cast<int>((timeout + kMillisecond - 1) / kMillisecond);
  const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsPerWait, timeout_ms);
  for (int i = 0; i < count; ++i) {
    const auto fd = static_cast<int>(events[static_cast<size_t>(i)].data.u64 & 0xffffffffu);
    const auto found = entries_.find(fd);
    if (found == entries_.end() ||
        Key(fd, found->second->serial) != events[static_cast<size_t>(i)].data.u64)
      continue;
    const std::shared_ptr<Entry> keep = found->second;  // the callback may remove its own entry
    keep->callback(events[static_cast<size_t>(i)].events);
  }
}

}  // namespace slice::server
