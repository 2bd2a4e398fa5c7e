#include "daemon/executor/backend_loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>

namespace slice::executor {
namespace {

std::string ExecutableDirectory() {
  char path[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  const std::string text(path, length > 0 ? static_cast<size_t>(length) : 0);
  const size_t slash = text.rfind('/');
  return slash == std::string::npos ? std::string(".") : text.substr(0, slash);
}

}  // namespace

Result<std::unique_ptr<DeviceBackend>> LoadBackend(const std::string& kind) {
  if (kind != "cuda") {
    return Error(StatusCode::kInvalid, "device kind '%s' is not known; known: cpu, cuda",
                 kind.c_str());
  }
  if (::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    return Error(StatusCode::kInternal,
                 "device kind 'cuda' needs the NVIDIA driver, but libcuda.so.1 is not there");
  }
  const std::string path = ExecutableDirectory() + "/libslice_backend_" + kind + ".so";
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Error(StatusCode::kInternal, "cannot load the backend of '%s': %s", kind.c_str(),
                 why ? why : path.c_str());
  }
  auto* create = reinterpret_cast<SliceBackendCreate*>(::dlsym(library, "slice_backend_create"));
  if (create == nullptr) {
    return Error(StatusCode::kInternal, "%s does not export slice_backend_create", path.c_str());
  }
  DeviceBackend* backend = nullptr;
  char error[256] = "";
  if (create(kBackendAbi, &backend, error, sizeof error) != 0 || backend == nullptr) {
    error[sizeof error - 1] = 0;
    return Error(StatusCode::kInternal, "the backend of '%s' does not start: %s", kind.c_str(),
                 error);
  }
  return std::unique_ptr<DeviceBackend>(backend);
}

}  // namespace slice::executor
