// Owned file descriptors, sealed memfds, mappings, eventfds. RAII; nothing here trusts a foreign
// descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/status.h"

namespace slice {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void Close();
  Result<Fd> Duplicate() const;

 private:
  int fd_ = -1;
};

// A memfd of fixed size, sealed SHRINK|GROW|SEAL and not executable. Pages are zero and lazily
// made.
Result<Fd> CreateMemfd(const char* name, size_t bytes);
// As above; the caller must map it writable itself *before* calling SealFutureWrite.
// After it no new writable mapping and no write() is possible; existing writable mappings go on.
Status SealFutureWrite(const Fd& memfd);
// A descriptor somebody else sent: a memfd that carries F_SEAL_SHRINK (it cannot be truncated under
// a mapping) and has at least `bytes_min` bytes. Returns its size.
Result<size_t> CheckForeignMemfd(const Fd& memfd, size_t bytes_min);

class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  // MAP_SHARED of the first `bytes` bytes.
  static Result<Mapping> Map(const Fd& fd, size_t bytes, bool writable);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

Result<Fd> CreateEventFd();              // nonblocking, close-on-exec
void SignalEventFd(const Fd& event_fd);  // never blocks
void ClearEventFd(const Fd& event_fd);

}  // namespace slice
