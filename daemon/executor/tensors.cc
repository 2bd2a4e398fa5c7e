#include "daemon/executor/tensors.h"

#include <ATen/ATen.h>

#include <utility>

#include "common/checked.h"

namespace slice::executor {

std::optional<c10::ScalarType> ToScalarType(proto::DType dtype) {
  switch (dtype) {
    case proto::FLOAT32:
      return at::kFloat;
    case proto::FLOAT64:
      return at::kDouble;
    case proto::FLOAT16:
      return at::kHalf;
    case proto::BFLOAT16:
      return at::kBFloat16;
    case proto::INT64:
      return at::kLong;
    case proto::INT32:
      return at::kInt;
    case proto::INT16:
      return at::kShort;
    case proto::INT8:
      return at::kChar;
    case proto::UINT8:
      return at::kByte;
    case proto::BOOL:
      return at::kBool;
    case proto::COMPLEX64:
      return at::kComplexFloat;
    case proto::COMPLEX128:
      return at::kComplexDouble;
    case proto::FLOAT8_E4M3FN:
      return at::kFloat8_e4m3fn;
    case proto::FLOAT8_E5M2:
      return at::kFloat8_e5m2;
    default:
      return std::nullopt;
  }
}

Result<int64_t> ExtentBytes(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                            int64_t item_bytes) {
  if (sizes.size() != strides.size()) {
    return Error(StatusCode::kInvalid, "%zu sizes but %zu strides", sizes.size(), strides.size());
  }
  int64_t extent = 1;
  bool empty = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    int64_t span = 0;
    if (sizes[d] < 0 || strides[d] < 0) {
      return Error(StatusCode::kOverflow, "dimension %zu: size %lld, stride %lld: below 0", d,
                   static_cast<long long>(sizes[d]), static_cast<long long>(strides[d]));
    }
    if (sizes[d] == 0) {
      empty = true;
      continue;
    }
    if (!CheckedMul(sizes[d] - 1, strides[d], &span) || !CheckedAdd(extent, span, &extent)) {
      return Error(StatusCode::kOverflow,
                   "dimension %zu: size %lld times stride %lld does not fit in 63 bits", d,
                   static_cast<long long>(sizes[d]), static_cast<long long>(strides[d]));
    }
  }
  if (empty) return int64_t{0};
  int64_t bytes = 0;
  if (!CheckedMul(extent, item_bytes, &bytes)) {
    return Error(StatusCode::kOverflow, "%lld elements of %lld bytes do not fit in 63 bits",
                 static_cast<long long>(extent), static_cast<long long>(item_bytes));
  }
  return bytes;
}

int64_t ExtentBytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t extent = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  return extent * static_cast<int64_t>(tensor.element_size());
}

at::Tensor WrapMemory(void* address, std::span<const int64_t> sizes,
                      std::span<const int64_t> strides, c10::ScalarType dtype,
                      std::shared_ptr<void> owner) {
  at::TensorMaker maker = at::for_blob(address, at::IntArrayRef(sizes.data(), sizes.size()));
  maker.strides(at::IntArrayRef(strides.data(), strides.size())).options(at::TensorOptions(dtype));
  if (owner != nullptr) maker.deleter([kept = std::move(owner)](void*) {});
  return maker.make_tensor();
}

void CopyInto(const at::Tensor& destination, const at::Tensor& source) {
  at::Tensor to = destination;
  at::Tensor from = source;
  for (int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) == 0 && to.size(d) > 1) {
      to = to.narrow(d, 0, 1);
      from = from.narrow(d, 0, 1);
    }
  }
  to.copy_(from);
}

}  // namespace slice::executor
