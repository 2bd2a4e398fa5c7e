// The daemon's GMG segment, mapped read-only: works while sliced is stopped, because nobody is
// asked. The note `<socket>.gmg` says where the segment is (daemon/server/gmg_segment.h); /proc
// lets root and the daemon's own user open it.
#pragma once

#include <string>

#include "common/fd.h"
#include "common/status.h"
#include "daemon/gmg/reader.h"

namespace slice::slicectl {

class GmgAccess {
 public:
  // Errors: DAEMON_LOST (not running), INVALID (no right to it), VERSION (another release).
  static Result<GmgAccess> Open(const std::string& socket_path);
  const gmg::Reader& reader() const { return reader_; }

 private:
  GmgAccess(Mapping mapping, gmg::Reader reader)
      : mapping_(std::move(mapping)), reader_(std::move(reader)) {}
  Mapping mapping_;
  gmg::Reader reader_;
};

}  // namespace slice::slicectl
