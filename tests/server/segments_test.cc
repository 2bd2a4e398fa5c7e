#include "daemon/server/segments.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "slice/proto/template.pb.h"

namespace slice::server {
namespace {

using engine::TensorKind;
using Specs = google::protobuf::RepeatedPtrField<proto::TensorSpec>;

proto::TensorSpec Spec(std::initializer_list<int64_t> sizes, uint64_t offset = 0,
                       std::initializer_list<int64_t> strides = {},
                       uint32_t dtype = proto::FLOAT32) {
  proto::TensorSpec spec;
  spec.set_name("t");
  spec.set_dtype(dtype);
  spec.set_offset(offset);
  for (const int64_t size : sizes) spec.add_sizes(size);
  for (const int64_t stride : strides) spec.add_strides(stride);
  return spec;
}
Specs Many(std::initializer_list<proto::TensorSpec> items) {
  Specs specs;
  for (const auto& item : items) *specs.Add() = item;
  return specs;
}
StatusCode CodeOf(const Specs& specs, TensorKind kind, uint64_t bytes = 1 << 20) {
  return LayOut(specs, kind, bytes).status().code();
}

TEST(SegmentsTest, Happy_ManagedTensorsArePacked64Aligned) {
  const SegmentLayout layout =
      LayOut(Many({Spec({3}), Spec({4, 4}), Spec({0}), Spec({1})}), TensorKind::kManaged, 0)
          .value();
  EXPECT_EQ(layout.tensors[0].offset, 0u);
  EXPECT_EQ(layout.tensors[1].offset, 64u);
  EXPECT_EQ(layout.tensors[2].offset, 128u);
  EXPECT_EQ(layout.tensors[3].offset, 128u);
  EXPECT_EQ(layout.bytes, 192u);
  EXPECT_EQ(layout.tensors[1].dense_bytes, 64u);
}

TEST(SegmentsTest, Happy_StridesCountInExtentAndHash) {
  const SegmentLayout layout =
      LayOut(Many({Spec({2, 3}, 0, {10, 1}), Spec({2, 3}, 128, {3, 1}), Spec({2, 3}, 256)}),
             TensorKind::kConstant, 1024)
          .value();
  EXPECT_EQ(layout.tensors[0].extent_bytes, 13u * 4);
  EXPECT_EQ(layout.tensors[0].dense_bytes, 6u * 4);
  EXPECT_NE(layout.tensors[0].meta_hash, layout.tensors[1].meta_hash);
  EXPECT_EQ(layout.tensors[1].meta_hash, layout.tensors[2].meta_hash);  // dense by default
}

TEST(SegmentsTest, Malicious_BadSpecsAreTypedErrors) {
  EXPECT_EQ(CodeOf({}, TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 0, {}, 99)}), TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 0, {}, 0xffffffffu)}), TensorKind::kConstant),
            StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({-1})}), TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 0, {-1})}), TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 0, {1, 1})}), TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({1, 1, 1, 1, 1, 1, 1, 1, 1})}), TensorKind::kConstant),
            StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 32)}), TensorKind::kConstant), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({4}, 1 << 20)}), TensorKind::kConstant), StatusCode::kBounds);
  EXPECT_EQ(CodeOf(Many({Spec({4}, ~uint64_t{63})}), TensorKind::kConstant), StatusCode::kBounds);
  EXPECT_EQ(CodeOf(Many({Spec({INT64_MAX, 2})}), TensorKind::kManaged), StatusCode::kOverflow);
  EXPECT_EQ(CodeOf(Many({Spec({INT64_MAX / 4})}), TensorKind::kManaged, 0), StatusCode::kOverflow);
  EXPECT_EQ(CodeOf(Many({Spec({2, 2}, 0, {INT64_MAX, 1})}), TensorKind::kConstant),
            StatusCode::kOverflow);
  EXPECT_EQ(CodeOf(Many({Spec({0, INT64_MAX, INT64_MAX})}), TensorKind::kConstant),
            StatusCode::kOverflow);
  EXPECT_EQ(CodeOf(Many({Spec({int64_t{1} << 60}), Spec({int64_t{1} << 60}), Spec({1})}),
                   TensorKind::kManaged),
            StatusCode::kOverflow);
}

TEST(SegmentsTest, Malicious_OverlappingMutableTensorsAreRefused) {
  EXPECT_EQ(CodeOf(Many({Spec({32}, 0), Spec({4}, 64)}), TensorKind::kMutable),
            StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Many({Spec({16}, 0), Spec({4}, 64)}), TensorKind::kMutable), StatusCode::kOk);
  EXPECT_EQ(CodeOf(Many({Spec({32}, 0), Spec({4}, 64)}), TensorKind::kConstant),
            StatusCode::kOk);  // tied weights
}

TEST(SegmentsTest, Happy_MemfdsByKind) {
  const SegmentLayout layout = LayOut(Many({Spec({64})}), TensorKind::kConstant, 4096).value();
  const std::vector<DomainIndex> domains = {0, 1, 2};
  SetSegments constant =
      CreateSegments(layout, TensorKind::kConstant, CreateMemfd("home", 4096).value(), 1, domains)
          .value();
  EXPECT_EQ(constant.domains, domains);
  EXPECT_EQ(constant.writable, (std::vector<bool>{true, false, true}));
  SetSegments mutable_set =
      CreateSegments(layout, TensorKind::kMutable, CreateMemfd("home", 4096).value(), 1, domains)
          .value();
  EXPECT_EQ(mutable_set.domains, std::vector<DomainIndex>{1});
  EXPECT_EQ(mutable_set.writable, std::vector<bool>{true});
  SetSegments managed = CreateSegments(layout, TensorKind::kManaged, Fd(), 1, domains).value();
  EXPECT_EQ(managed.writable, (std::vector<bool>{true, true, true}));
  // A restarted executor can map them writable again.
  EXPECT_TRUE(Mapping::Map(managed.memfds[1], layout.bytes, true).ok());
  EXPECT_TRUE(Mapping::Map(managed.memfds[1], layout.bytes, true).ok());
  const engine::TensorSetConfig config =
      ToEngineSet(TensorSetId{7}, TenantId{3}, TensorKind::kManaged, 1, layout, managed);
  EXPECT_EQ(config.segment_domains, 7u);
}

TEST(SegmentsTest, Malicious_ForeignDescriptors) {
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  const Fd read_end(pipe_fds[0]), write_end(pipe_fds[1]);
  EXPECT_EQ(CheckTenantSegment(read_end, 1).code(), StatusCode::kInvalid);
  const Fd unsealed(::memfd_create("unsealed", MFD_ALLOW_SEALING | MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_EQ(CheckTenantSegment(unsealed, 4096).code(), StatusCode::kInvalid);
  const Fd small = CreateMemfd("small", 4096).value();
  EXPECT_EQ(CheckTenantSegment(small, 4097).code(), StatusCode::kBounds);
  EXPECT_TRUE(CheckTenantSegment(small, 4096).ok());
  EXPECT_EQ(CheckTenantSegment(Fd(), 1).code(), StatusCode::kInvalid);
}

}  // namespace
}  // namespace slice::server
