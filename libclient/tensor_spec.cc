#include "libclient/tensor_spec.h"

#include <algorithm>
#include <array>

#include "common/checked.h"
#include "libclient/options.h"

namespace slice::client {
namespace {

constexpr uint64_t kTensorAlignment = 64;
constexpr std::array<uint32_t, SLICE_DTYPE_FLOAT8_E5M2 + 1> kElementBytes = {
    0, 4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16, 1, 1};

// Length of the valid UTF-8 sequence at `text`, 0 if there is none. Stops at the terminating zero
// by itself.
size_t Utf8SequenceBytes(const unsigned char* text) {
  const unsigned char lead = text[0];
  if (lead < 0x80) return 1;
  const size_t bytes = lead >= 0xc2 && lead <= 0xdf   ? 2
                       : (lead & 0xf0) == 0xe0        ? 3
                       : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                      : 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((text[i] & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xe0 && text[1] < 0xa0) || (lead == 0xf0 && text[1] < 0x90);
  const bool surrogate = lead == 0xed && text[1] >= 0xa0;
  const bool too_large = lead == 0xf4 && text[1] >= 0x90;
  return overlong || surrogate || too_large ? 0 : bytes;
}

Result<TensorSpec> ReadOne(const slice_tensor_spec_t& in, size_t index) {
  TensorSpec out;
  out.name = ToUtf8(in.name);
  const auto fail = [&](StatusCode code, const std::string& text) {
    return Status(code, "tensor " + std::to_string(index) + " '" + out.name + "': " + text);
  };
  const uint32_t element_bytes = ElementBytes(in.dtype);
  if (element_bytes == 0) {
    return fail(StatusCode::kInvalid, "dtype " + std::to_string(in.dtype) +
                                          " is none of SLICE_DTYPE_* (1.." +
                                          std::to_string(kElementBytes.size() - 1) + ")");
  }
  if (in.dim_count > SLICE_DIMS_MAX) {
    return fail(StatusCode::kInvalid, std::to_string(in.dim_count) + " dimensions, at most " +
                                          std::to_string(SLICE_DIMS_MAX) + " are possible");
  }
  out.dtype = in.dtype;
  out.offset = in.offset;
  out.sizes.assign(in.sizes, in.sizes + in.dim_count);
  const bool dense = std::all_of(in.strides, in.strides + in.dim_count,
                                 [](int64_t stride) { return stride == 0; });
  if (!dense) out.strides.assign(in.strides, in.strides + in.dim_count);
  int64_t elements = 1;
  int64_t last_element = 0;  // only meaningful when there are elements
  bool fits = true;
  for (uint32_t d = 0; d < in.dim_count; ++d) {
    if (in.sizes[d] < 0 || in.strides[d] < 0) {
      return fail(StatusCode::kInvalid,
                  "dimension " + std::to_string(d) + " has size " + std::to_string(in.sizes[d]) +
                      " and stride " + std::to_string(in.strides[d]) + ": neither may be negative");
    }
    int64_t span = 0;
    fits = fits && CheckedMul(elements, in.sizes[d], &elements);
    fits = fits && (in.sizes[d] == 0 || CheckedMul(in.sizes[d] - 1, in.strides[d], &span));
    fits = fits && CheckedAdd(last_element, span, &last_element);
  }
  int64_t dense_bytes = 0;
  int64_t extent_bytes = 0;
  fits = fits && CheckedMul(elements, element_bytes, &dense_bytes);
  fits = fits && CheckedAdd(last_element, 1, &extent_bytes) &&
         CheckedMul(extent_bytes, element_bytes, &extent_bytes);
  if (!fits)
    return fail(StatusCode::kOverflow, "its bytes do not fit in 63 bits: check sizes and strides");
  out.dense_bytes = static_cast<uint64_t>(dense_bytes);
  out.extent_bytes = elements == 0 ? 0
                     : dense       ? out.dense_bytes
                                   : static_cast<uint64_t>(extent_bytes);
  return out;
}

}  // namespace

uint32_t ElementBytes(uint32_t dtype) {
  return dtype < kElementBytes.size() ? kElementBytes[dtype] : 0;
}

std::string ToUtf8(const char* text) {
  std::string out;
  if (text == nullptr) return out;
  for (const auto* at = reinterpret_cast<const unsigned char*>(text); *at != 0;) {
    const size_t bytes = Utf8SequenceBytes(at);
    if (bytes == 0) {
      out.push_back('?');
      ++at;
    } else {
      out.append(reinterpret_cast<const char*>(at), bytes);
      at += bytes;
    }
  }
  return out;
}

Result<std::vector<TensorSpec>> ReadTensorSpecs(const slice_tensor_spec_t* specs, size_t count) {
  if (specs == nullptr || count == 0)
    return Error(StatusCode::kInvalid, "no tensors: specs is NULL or count is 0");
  const size_t step = specs->size;
  std::vector<TensorSpec> out;
  out.reserve(std::min<size_t>(count, 4096));
  for (size_t i = 0; i < count; ++i) {
    const auto* at = reinterpret_cast<const std::byte*>(specs) + i * step;
    slice_tensor_spec_t spec{};
    SLICE_RETURN_IF_ERROR(ReadOptions("slice_tensor_spec_t", at, &spec));
    if (spec.size != step) {
      return Error(StatusCode::kInvalid,
                   "tensor %zu: size is %zu, that of tensor 0 is %zu: all must be equal", i,
                   spec.size, step);
    }
    SLICE_ASSIGN_OR_RETURN(TensorSpec one, ReadOne(spec, i));
    out.push_back(std::move(one));
  }
  return out;
}

Status CheckTensorsInSegment(const std::vector<TensorSpec>& specs, uint64_t segment_bytes) {
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& spec = specs[i];
    if (spec.offset % kTensorAlignment != 0) {
      return Error(StatusCode::kInvalid, "tensor %zu '%s': offset %llu is not a multiple of %llu",
                   i, spec.name.c_str(), static_cast<unsigned long long>(spec.offset),
                   static_cast<unsigned long long>(kTensorAlignment));
    }
    if (!RangeFits(spec.offset, spec.extent_bytes, segment_bytes)) {
      return Error(StatusCode::kBounds,
                   "tensor %zu '%s': %llu bytes at offset %llu end beyond the memfd's %llu bytes",
                   i, spec.name.c_str(), static_cast<unsigned long long>(spec.extent_bytes),
                   static_cast<unsigned long long>(spec.offset),
                   static_cast<unsigned long long>(segment_bytes));
    }
  }
  return Status::Ok();
}

}  // namespace slice::client
