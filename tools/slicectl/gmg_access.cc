#include "tools/slicectl/gmg_access.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace slice::slicectl {

Result<GmgAccess> GmgAccess::Open(const std::string& socket_path) {
  const std::string note_path = socket_path + ".gmg";
  const char* note_text = note_path.c_str();
  std::ifstream note(note_path);
  long pid = 0, number = -1;
  if (!note.is_open()) {
    return Error(StatusCode::kDaemonLost,
                 "no sliced on '%s' ('%s' is not there): start it with `sliced --config FILE`, or "
                 "say --socket",
                 socket_path.c_str(), note_text);
  }
  if (!(note >> pid >> number) || pid <= 0 || number < 0) {
    return Error(StatusCode::kInvalid,
                 "'%s' does not say \"PID FD\": was it written by another release?", note_text);
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  const Fd segment(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!segment.valid()) {
    if (errno == EACCES || errno == EPERM) {
      return Error(StatusCode::kInvalid,
                   "user %u may not read the GMG of sliced (pid %ld): it shows all tenants, only "
                   "root and the daemon's own "
                   "user may",
                   ::geteuid(), pid);
    }
    return Error(StatusCode::kDaemonLost,
                 "sliced (pid %ld by '%s') is gone: start it with `sliced --config FILE`", pid,
                 note_text);
  }
  // Another process may have the number by now: only a sealed memfd with the right header counts.
  struct stat info {};
  if (::fcntl(segment.get(), F_GET_SEALS) < 0 || ::fstat(segment.get(), &info) != 0 ||
      info.st_size <= 0) {
    return Error(StatusCode::kDaemonLost,
                 "sliced (pid %ld by '%s') is gone: start it with `sliced --config FILE`", pid,
                 note_text);
  }
  SLICE_ASSIGN_OR_RETURN(Mapping mapping,
                         Mapping::Map(segment, static_cast<size_t>(info.st_size), false));
  SLICE_ASSIGN_OR_RETURN(gmg::Reader reader, gmg::Reader::Open({mapping.data(), mapping.bytes()}));
  return GmgAccess(std::move(mapping), std::move(reader));
}

}  // namespace slice::slicectl
