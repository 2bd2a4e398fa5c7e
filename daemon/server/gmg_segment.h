// The GMG's shared memory: a memfd that only sliced can write, and the note beside the socket that
// says where it is.
//
// `<socket>.gmg` holds "PID FD": slicectl opens /proc/PID/fd/FD read-only, which works while sliced
// is stopped, and which the kernel allows only to root and to the daemon's own user. The segment
// shows all tenants, so nobody else gets it. Owner: the server.
#pragma once

#include <span>
#include <string>

#include "common/fd.h"
#include "common/status.h"

namespace slice::server {

class GmgSegment {
 public:
  static Result<GmgSegment> Create(size_t bytes);
  GmgSegment(GmgSegment&&) = default;
  GmgSegment& operator=(GmgSegment&&) = delete;
  ~GmgSegment();

  std::span<std::byte> memory() const { return {mapping_.data(), mapping_.bytes()}; }
  // Writes the note; removed with the segment.
  Status Publish(const std::string& socket_path);
  static std::string NotePath(const std::string& socket_path) { return socket_path + ".gmg"; }

 private:
  GmgSegment(Fd memfd, Mapping mapping) : memfd_(std::move(memfd)), mapping_(std::move(mapping)) {}
  Fd memfd_;
  Mapping mapping_;
  std::string note_path_;
};

}  // namespace slice::server
