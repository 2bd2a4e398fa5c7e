#include "common/fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace slice {

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Fd::~Fd() { Close(); }

void Fd::Close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<Fd> Fd::Duplicate() const {
  Fd copy(::fcntl(fd_, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid())
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot duplicate descriptor %d", fd_);
  return copy;
}

Result<Fd> CreateMemfd(const char* name, size_t bytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd.valid() && errno == EINVAL) {  // kernels before 6.3 do not know MFD_NOEXEC_SEAL
    fd = Fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  }
  if (!fd.valid()) return ErrnoError(StatusCode::kNoMemory, errno, "memfd_create('%s')", name);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoError(StatusCode::kNoMemory, errno, "memfd '%s': cannot set size to %zu bytes",
                      name, bytes);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "memfd '%s': cannot seal", name);
  }
  return fd;
}

Status SealFutureWrite(const Fd& memfd) {
  if (::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return ErrnoError(StatusCode::kInternal, errno, "cannot add F_SEAL_FUTURE_WRITE");
  }
  return Status::Ok();
}

Result<size_t> CheckForeignMemfd(const Fd& memfd, size_t bytes_min) {
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0) {
    return Error(StatusCode::kInvalid,
                 "descriptor is not a memfd: create it with memfd_create(MFD_ALLOW_SEALING)");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return Error(StatusCode::kInvalid, "memfd lacks F_SEAL_SHRINK: seal it before registering it");
  }
  struct stat info {};
  if (::fstat(memfd.get(), &info) != 0)
    return ErrnoError(StatusCode::kInvalid, errno, "fstat of memfd");
  const auto bytes = static_cast<size_t>(info.st_size);
  if (bytes < bytes_min) {
    return Error(StatusCode::kBounds, "memfd has %zu bytes, %zu are needed", bytes, bytes_min);
  }
  return bytes;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Result<Mapping> Mapping::Map(const Fd& fd, size_t bytes, bool writable) {
  if (bytes == 0) return Error(StatusCode::kInvalid, "cannot map 0 bytes");
  void* address = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                         fd.get(), 0);
  if (address == MAP_FAILED) {
    return ErrnoError(StatusCode::kNoMemory, errno, "cannot map %zu bytes of descriptor %d %s",
                      bytes, fd.get(), writable ? "read-write" : "read-only");
  }
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(address);
  mapping.bytes_ = bytes;
  return mapping;
}

Result<Fd> CreateEventFd() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) return ErrnoError(StatusCode::kNoMemory, errno, "eventfd");
  return fd;
}

void SignalEventFd(const Fd& event_fd) {
  const uint64_t one = 1;
  // EAGAIN means the counter is full: the reader is signalled already.
  [[maybe_unused]] const ssize_t written = ::write(event_fd.get(), &one, sizeof one);
}

void ClearEventFd(const Fd& event_fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_fd.get(), &count, sizeof count);
}

}  // namespace slice
