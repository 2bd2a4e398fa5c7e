// Identity of a tensor's meta data (dtype, sizes, strides), so that a registered tensor can be
// compared with the static input of a template it is bound to. Strides that address nothing
// (dimensions of size 1, empty tensors) do not count. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace slice {

// Row-major strides in elements. The caller has checked that the product of the sizes fits.
inline std::vector<int64_t> DenseStrides(std::span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d > 1; --d)
    strides[d - 2] = strides[d - 1] * std::max<int64_t>(sizes[d - 1], 1);
  return strides;
}

// `strides` has the length of `sizes`. `dtype` is a proto.DType.
inline uint64_t TensorMetaHash(uint32_t dtype, std::span<const int64_t> sizes,
                               std::span<const int64_t> strides) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a over 64-bit words
  const auto mix = [&hash](uint64_t word) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ ((word >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  };
  mix(dtype);
  mix(sizes.size());
  bool empty = false;
  for (const int64_t size : sizes) {
    mix(static_cast<uint64_t>(size));
    empty = empty || size == 0;
  }
  for (size_t d = 0; d < sizes.size() && !empty; ++d)
    mix(sizes[d] == 1 ? 0 : static_cast<uint64_t>(strides[d]));
  return hash;
}

}  // namespace slice
