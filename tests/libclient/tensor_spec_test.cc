#include "libclient/tensor_spec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "libclient/options.h"

namespace slice::client {
namespace {

slice_tensor_spec_t Spec(std::initializer_list<int64_t> sizes,
                         std::initializer_list<int64_t> strides = {}) {
  slice_tensor_spec_t spec{};
  spec.size = sizeof spec;
  spec.name = "w";
  spec.dtype = SLICE_DTYPE_FLOAT32;
  spec.dim_count = static_cast<uint32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), spec.sizes);
  std::copy(strides.begin(), strides.end(), spec.strides);
  return spec;
}
StatusCode CodeOf(const slice_tensor_spec_t& spec) {
  return ReadTensorSpecs(&spec, 1).status().code();
}

TEST(TensorSpecTest, Happy_DenseBytesAndExtent) {
  const slice_tensor_spec_t specs[] = {Spec({4, 3}), Spec({4, 3}, {5, 1}), Spec({}), Spec({4, 0})};
  const auto read = ReadTensorSpecs(specs, 4).value();
  EXPECT_EQ(read[0].dense_bytes, 48u);
  EXPECT_EQ(read[0].extent_bytes, 48u);
  EXPECT_TRUE(read[0].strides.empty());
  EXPECT_EQ(read[1].dense_bytes, 48u);
  EXPECT_EQ(read[1].extent_bytes, (3 * 5 + 2 + 1) * 4u);
  EXPECT_EQ(read[2].dense_bytes, 4u);
  EXPECT_EQ(read[3].extent_bytes, 0u);
}

TEST(TensorSpecTest, Edge_WrongNumbersAreInvalid) {
  slice_tensor_spec_t spec = Spec({2});
  spec.dtype = 0;
  EXPECT_EQ(CodeOf(spec), StatusCode::kInvalid);
  spec.dtype = 15;
  EXPECT_EQ(CodeOf(spec), StatusCode::kInvalid);
  spec = Spec({2});
  spec.dim_count = SLICE_DIMS_MAX + 1;
  EXPECT_EQ(CodeOf(spec), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Spec({-1})), StatusCode::kInvalid);
  EXPECT_EQ(CodeOf(Spec({2}, {-1})), StatusCode::kInvalid);
  EXPECT_EQ(ReadTensorSpecs(nullptr, 1).status().code(), StatusCode::kInvalid);
  EXPECT_EQ(ReadTensorSpecs(&spec, 0).status().code(), StatusCode::kInvalid);
}

TEST(TensorSpecTest, Edge_SizesThatOverflowAreOverflow) {
  const int64_t large = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_EQ(CodeOf(Spec({large, 3})), StatusCode::kOverflow);
  EXPECT_EQ(CodeOf(Spec({large})), StatusCode::kOverflow);  // elements fit, bytes do not
  EXPECT_EQ(CodeOf(Spec({3, 3}, {large, 1})), StatusCode::kOverflow);
}

TEST(TensorSpecTest, Edge_ErrorNamesTheTensor) {
  const slice_tensor_spec_t specs[] = {Spec({2}), Spec({-7})};
  const Status status = ReadTensorSpecs(specs, 2).status();
  EXPECT_NE(status.text().find("tensor 1 'w'"), std::string::npos) << status.text();
  EXPECT_NE(status.text().find("-7"), std::string::npos) << status.text();
}

TEST(TensorSpecTest, Edge_SizesOfTheStructAreChecked) {
  slice_tensor_spec_t specs[] = {Spec({2}), Spec({2})};
  specs[0].size = 0;
  EXPECT_EQ(ReadTensorSpecs(specs, 1).status().code(), StatusCode::kInvalid);
  specs[0].size = 1 << 20;
  EXPECT_EQ(ReadTensorSpecs(specs, 1).status().code(), StatusCode::kInvalid);
  specs[0] = Spec({2});
  specs[1].size = sizeof(slice_tensor_spec_t) - 8;
  EXPECT_EQ(ReadTensorSpecs(specs, 2).status().code(), StatusCode::kInvalid);
}

TEST(TensorSpecTest, Happy_NewerCallersArrayIsReadWithItsOwnStep) {
  struct Newer {
    slice_tensor_spec_t known;
    uint64_t unknown;
  } specs[2] = {{Spec({2}), 0}, {Spec({3}), 0}};
  specs[0].known.size = specs[1].known.size = sizeof(Newer);
  const auto read = ReadTensorSpecs(&specs[0].known, 2).value();
  EXPECT_EQ(read[1].dense_bytes, 12u);
  specs[1].unknown = 1;
  EXPECT_EQ(ReadTensorSpecs(&specs[0].known, 2).status().code(), StatusCode::kInvalid);
}

TEST(TensorSpecTest, Edge_SegmentBoundsAndAlignment) {
  slice_tensor_spec_t spec = Spec({16});
  spec.offset = 64;
  EXPECT_TRUE(CheckTensorsInSegment(ReadTensorSpecs(&spec, 1).value(), 128).ok());
  EXPECT_EQ(CheckTensorsInSegment(ReadTensorSpecs(&spec, 1).value(), 127).code(),
            StatusCode::kBounds);
  spec.offset = 32;
  EXPECT_EQ(CheckTensorsInSegment(ReadTensorSpecs(&spec, 1).value(), 128).code(),
            StatusCode::kInvalid);
  spec.offset = UINT64_MAX - 63;
  EXPECT_EQ(CheckTensorsInSegment(ReadTensorSpecs(&spec, 1).value(), 128).code(),
            StatusCode::kBounds);
}

TEST(TensorSpecTest, Edge_NamesBecomeValidUtf8) {
  EXPECT_EQ(ToUtf8(nullptr), "");
  EXPECT_EQ(ToUtf8("layer.3"), "layer.3");
  EXPECT_EQ(ToUtf8("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(ToUtf8("a\xff"
                   "b"),
            "a?b");
  EXPECT_EQ(ToUtf8("\xc3"), "?");            // cut off
  EXPECT_EQ(ToUtf8("\xed\xa0\x80"), "???");  // surrogate
  EXPECT_EQ(ToUtf8("\xc0\xaf"), "??");       // overlong
}

// The caller's struct of `size` bytes, as bytes: its type is unknown to the library.
std::vector<std::byte> CallersStruct(size_t size) {
  std::vector<std::byte> bytes(size, std::byte{0x77});
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes;
}

TEST(OptionsTest, Happy_ShorterStructIsZeroExtended) {
  std::vector<std::byte> older = CallersStruct(12);
  slice_session_limits_t known{};
  ASSERT_TRUE(ReadOptions("t", older.data(), &known).ok());
  EXPECT_EQ(known.service_class, 0x77777777u);
  EXPECT_EQ(known.queue_slots, 0u);
}

TEST(OptionsTest, Happy_OutputIsCutForAnOlderCallerAndZeroedForANewerOne) {
  slice_session_limits_t known{};
  known.size = sizeof known;
  known.service_class = 1;
  known.session_number = 99;
  std::vector<std::byte> older = CallersStruct(12);
  WriteOutput(known, older.data());
  size_t size = 0;
  std::memcpy(&size, older.data(), sizeof size);
  EXPECT_EQ(size, 12u);
  EXPECT_EQ(older[8], std::byte{1});

  std::vector<std::byte> newer = CallersStruct(sizeof known + 8);
  WriteOutput(known, newer.data());
  EXPECT_EQ(newer[offsetof(slice_session_limits_t, session_number)], std::byte{99});
  EXPECT_EQ(newer.back(), std::byte{0});
  std::memcpy(&size, newer.data(), sizeof size);
  EXPECT_EQ(size, sizeof known + 8);
}

}  // namespace
}  // namespace slice::client
