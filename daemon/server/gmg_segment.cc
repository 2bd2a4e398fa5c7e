#include "daemon/server/gmg_segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace slice::server {

Result<GmgSegment> GmgSegment::Create(size_t bytes) {
  SLICE_ASSIGN_OR_RETURN(Fd memfd, CreateMemfd("slice-gmg", bytes));
  SLICE_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(memfd, bytes, true));
  SLICE_RETURN_IF_ERROR(SealFutureWrite(memfd));
  return GmgSegment(std::move(memfd), std::move(mapping));
}

Status GmgSegment::Publish(const std::string& socket_path) {
  const std::string path = NotePath(socket_path);
  const std::string fresh = path + ".new";
  const Fd file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  const std::string note = std::to_string(::getpid()) + " " + std::to_string(memfd_.get()) + "\n";
  if (!file.valid() ||
      ::write(file.get(), note.data(), note.size()) != static_cast<ssize_t>(note.size()) ||
      std::rename(fresh.c_str(), path.c_str()) != 0) {
    return ErrnoError(StatusCode::kInvalid, errno, "cannot write '%s'", path.c_str());
  }
  note_path_ = path;
  return Status::Ok();
}

GmgSegment::~GmgSegment() {
  if (memfd_.valid() && !note_path_.empty()) ::unlink(note_path_.c_str());
}

}  // namespace slice::server
