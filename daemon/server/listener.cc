#include "daemon/server/listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace slice::server {
namespace {
constexpr int kBacklog = 128;
}

Result<Listener> Listener::Listen(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error(StatusCode::kInvalid, "socket path '%s' has %zu bytes, 1 to %zu are possible",
                 path.c_str(), path.size(), sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);

  // The folder of a socket under /run is gone after every boot.
  const std::string folder =
      path.substr(0, path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  if (!folder.empty()) ::mkdir(folder.c_str(), 0755);  // what is wrong with it, open() says
  const std::string lock_path = path + ".lock";
  Fd lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) {
    return ErrnoError(StatusCode::kInvalid, errno,
                      "cannot open '%s': does the socket's folder exist, and is it writable? "
                      "--socket names another place",
                      lock_path.c_str());
  }
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Error(
        StatusCode::kInvalid,
        "another sliced uses '%s' (it holds '%s'): stop it, or give this one another --socket",
        path.c_str(), lock_path.c_str());
  }
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoError(StatusCode::kNoMemory, errno, "socket");
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode))
      return Error(StatusCode::kInvalid, "'%s' exists and is not a socket", path.c_str());
    const Fd probe(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::connect(probe.get(), raw, sizeof address) == 0 || errno == EAGAIN) {
      return Error(StatusCode::kInvalid,
                   "a daemon answers on '%s' already: stop it, or give this one another --socket",
                   path.c_str());
    }
    ::unlink(path.c_str());  // left by a daemon that is gone
  }
  if (::bind(socket.get(), raw, sizeof address) != 0) {
    return ErrnoError(StatusCode::kInvalid, errno, "cannot bind '%s'", path.c_str());
  }
  // Everybody may connect: what a user may have is the config's business.
  if (::chmod(path.c_str(), 0666) != 0 || ::listen(socket.get(), kBacklog) != 0 ||
      ::lstat(path.c_str(), &info) != 0) {
    return ErrnoError(StatusCode::kInvalid, errno, "cannot listen on '%s'", path.c_str());
  }
  return Listener(std::move(socket), std::move(lock), path, info.st_ino);
}

Listener::~Listener() {
  if (!fd_.valid()) return;
  struct stat info {};
  if (::lstat(path_.c_str(), &info) == 0 && info.st_ino == inode_) ::unlink(path_.c_str());
  // The lock's file stays: removing it would let two daemons hold locks on two files of one name.
}

Listener::Accepted Listener::Accept() {
  const auto accept = [this] {
    return Fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  Accepted accepted{accept(), false};
  if (accepted.socket.valid() || (errno != EMFILE && errno != ENFILE)) return accepted;
  spare_.Close();
  return {accept(), true};
}

void Listener::KeepSpare() { spare_ = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace slice::server
