// Reads and checks the tensor descriptions of the C ABI, so that mistakes get a precise text before
// anything is sent. The daemon checks again. Pure. Must not depend on: sessions, sockets, protobuf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "slice/slice.h"

namespace slice::client {

struct TensorSpec {
  std::string name;  // valid UTF-8
  uint32_t dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // elements; empty = dense
  uint64_t offset = 0;
  uint64_t dense_bytes = 0;   // elements times element size
  uint64_t extent_bytes = 0;  // from `offset` to the end of the last element
};

// 0 for a number that is no dtype.
uint32_t ElementBytes(uint32_t dtype);
// Bytes that are not valid UTF-8 become '?': protobuf strings must be UTF-8, C strings need not.
std::string ToUtf8(const char* text);

// `specs` is an array whose elements are specs[0].size bytes apart. All strides zero means dense.
// Errors: kInvalid, kOverflow; the text names the tensor by index and name.
Result<std::vector<TensorSpec>> ReadTensorSpecs(const slice_tensor_spec_t* specs, size_t count);
// Every tensor lies in a segment of `segment_bytes` and begins at a multiple of 64. Errors:
// kInvalid, kBounds.
Status CheckTensorsInSegment(const std::vector<TensorSpec>& specs, uint64_t segment_bytes);

}  // namespace slice::client
