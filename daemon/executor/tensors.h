// Small bridges between the wire's tensor descriptions and torch's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "common/status.h"
#include "slice/proto/template.pb.h"

namespace slice::executor {

std::optional<c10::ScalarType> ToScalarType(proto::DType dtype);

// Bytes from a tensor's first element to the end of its last: item * (1 + sum (size-1)*stride); 0
// if empty. Errors: OVERFLOW.
Result<int64_t> ExtentBytes(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                            int64_t item_bytes);
int64_t ExtentBytes(const at::Tensor& tensor);

// A view of memory that somebody else owns; the tensor keeps `owner`. The caller has checked that
// sizes and strides stay inside it.
at::Tensor WrapMemory(void* address, std::span<const int64_t> sizes,
                      std::span<const int64_t> strides, c10::ScalarType dtype,
                      std::shared_ptr<void> owner = nullptr);

// destination.copy_(source), also where dimensions of the destination repeat one element (stride
// 0).
void CopyInto(const at::Tensor& destination, const at::Tensor& source);

}  // namespace slice::executor
