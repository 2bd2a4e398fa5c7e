// Extensible structs of the C ABI: they begin with `size`, grow at the end, and zero means
// "default". An older caller's shorter struct is zero-extended; a newer caller's longer one is
// accepted while what we do not know in it is zero. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "common/status.h"

namespace slice::client {

// A larger `size` is a caller that forgot to set it. Far above any struct of ours.
inline constexpr size_t kStructBytesMax = 4096;

inline Status CheckStructSize(const char* type, size_t size, size_t known) {
  if (size < sizeof(size_t) || size > kStructBytesMax) {
    return Error(StatusCode::kInvalid,
                 "%s.size is %zu: set it to sizeof(%s), which is %zu in this library", type, size,
                 type, known);
  }
  return Status::Ok();
}

// Copies the caller's struct at `from` into *to.
template <typename T>
Status ReadOptions(const char* type, const void* from, T* to) {
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  SLICE_RETURN_IF_ERROR(CheckStructSize(type, size, sizeof(T)));
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return Error(StatusCode::kInvalid,
                   "%s of %zu bytes uses a field at byte %zu that this library (%zu bytes) does "
                   "not know: use a newer "
                   "libslice",
                   type, size, i, sizeof(T));
    }
  }
  *to = T{};
  std::memcpy(to, from, std::min(size, sizeof(T)));
  return Status::Ok();
}

// Copies `from` into the caller's struct, as much as the caller knows of it; `size` stays the
// caller's, fields that we do not know become zero. The size was checked before.
template <typename T>
void WriteOutput(const T& from, void* to) {
  size_t size = 0;
  std::memcpy(&size, to, sizeof size);
  auto* bytes = static_cast<unsigned char*>(to);
  const size_t common = std::min(size, sizeof(T));
  std::memcpy(bytes + sizeof size, reinterpret_cast<const unsigned char*>(&from) + sizeof size,
              common - sizeof size);
  if (size > sizeof(T)) std::memset(bytes + sizeof(T), 0, size - sizeof(T));
}

}  // namespace slice::client
