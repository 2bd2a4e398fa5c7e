// Readers of the segment: damaged ones are refused, a busy writer never shows half a change.
#include "daemon/gmg/reader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "daemon/gmg/gmg.h"
#include "tests/testing/graph_builder.h"

namespace slice::gmg {
namespace {

struct Segment {
  Segment() {
    const Capacity capacity = Capacity::For(2, 2, 512);
    memory.resize(Gmg::Bytes(capacity) + 64);
    const size_t shift = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    span = std::span(memory).subspan(shift, Gmg::Bytes(capacity));
    gmg = std::make_unique<Gmg>(span, capacity, 42, 4711);
  }
  std::vector<std::byte> memory;
  std::span<std::byte> span;
  std::unique_ptr<Gmg> gmg;
};

TEST(GmgReader, Happy_empty_segment_opens) {
  Segment segment;
  const Result<Reader> reader = Reader::Open(segment.span);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  EXPECT_EQ(reader->epoch(), 42u);
  EXPECT_EQ(reader->daemon_pid(), 4711u);
  EXPECT_EQ(reader->Devices().size(), 2u);
  EXPECT_TRUE(reader->Instances().empty());
}

TEST(GmgReader, Malicious_damaged_segments_are_refused) {
  Segment segment;
  auto* const header = reinterpret_cast<SegmentHeader*>(segment.span.data());
  const SegmentHeader good = *header;
  const auto code = [&](size_t bytes) {
    return Reader::Open(segment.span.first(bytes)).status().code();
  };
  EXPECT_EQ(code(100), StatusCode::kBounds);
  EXPECT_EQ(code(segment.span.size() - 4096), StatusCode::kBounds);
  header->magic = 1;
  EXPECT_EQ(code(segment.span.size()), StatusCode::kVersion);
  header->magic = good.magic;
  header->layout_hash ^= 1;
  EXPECT_EQ(code(segment.span.size()), StatusCode::kVersion);
  header->layout_hash = good.layout_hash;
  header->slabs[kOps].offset += 64;
  EXPECT_EQ(code(segment.span.size()), StatusCode::kBounds);
  header->slabs[kOps] = good.slabs[kOps];
  header->slabs[kOps].count = 0xffffffff;
  EXPECT_EQ(code(segment.span.size()), StatusCode::kBounds);
  header->slabs[kOps] = good.slabs[kOps];
  EXPECT_TRUE(Reader::Open(segment.span).ok());
}

TEST(GmgReader, Malicious_ranges_inside_records_are_bounded) {
  Segment segment;
  const auto graph = testing::Chain(4, 1000, 256);
  graph::BoundSizes sizes;
  ASSERT_TRUE(graph->Bind({}, &sizes).ok());
  const uint32_t slot = segment.gmg->AddInstance(*graph, sizes);
  InstanceRecord& record = segment.gmg->Write(slot);
  record.id = uint64_t{1};
  record.op_begin = 500u;
  record.op_count = 0xfffffff0u;
  segment.gmg->CloseWrites();
  const Result<Reader> reader = Reader::Open(segment.span);
  ASSERT_TRUE(reader.ok());
  ASSERT_EQ(reader->Instances().size(), 1u);
  EXPECT_TRUE(reader->Instances()[0].ops.empty());
}

TEST(GmgReader, Race_instances_are_seen_whole) {
  Segment segment;
  const auto graph = testing::Chain(8, 1000, 256);
  graph::BoundSizes sizes;
  ASSERT_TRUE(graph->Bind({}, &sizes).ok());
  const uint32_t slot = segment.gmg->AddInstance(*graph, sizes);
  segment.gmg->Write(slot).id = uint64_t{1};
  segment.gmg->CloseWrites();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int64_t round = 1; !stop.load(std::memory_order_relaxed); ++round) {
      InstanceRecord& record = segment.gmg->Write(slot);
      record.submit_ns = round;
      for (uint32_t op = 0; op < 8; ++op) segment.gmg->ops(slot)[op].start_ns = round;
      segment.gmg->CloseWrites();
      DeviceRecord* const device = segment.gmg->At<DeviceRecord>(kDevices, 0);
      Gmg::UpdateRecord(device, [&] {
        device->busy_ns = round;
        device->free_at_ns = -round;
      });
      if (round % 64 == 0) std::this_thread::yield();
    }
  });
  const Result<Reader> reader = Reader::Open(segment.span);
  ASSERT_TRUE(reader.ok());
  int seen = 0;
  for (int i = 0; i < 3000; ++i) {
    for (const InstanceView& view : reader->Instances()) {
      ++seen;
      for (const OpView& op : view.ops)
        ASSERT_TRUE(op.start_ns == view.submit_ns || view.submit_ns == 0);
    }
    for (const DeviceView& view : reader->Devices()) ASSERT_EQ(view.busy_ns, -view.free_at_ns);
  }
  stop.store(true);
  writer.join();
  EXPECT_GT(seen, 0);
}

TEST(GmgReader, Edge_record_left_open_by_a_dead_writer_is_left_out) {
  Segment segment;
  DeviceRecord* const device = segment.gmg->At<DeviceRecord>(kDevices, 0);
  device->sequence = 1u;
  const Result<Reader> reader = Reader::Open(segment.span);
  ASSERT_TRUE(reader.ok());
  ASSERT_EQ(reader->Devices().size(), 1u);
  EXPECT_EQ(reader->Devices()[0].index, 1u);
}

}  // namespace
}  // namespace slice::gmg
