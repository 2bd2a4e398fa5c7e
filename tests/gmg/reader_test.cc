// Readers of the segment: damaged ones are refused, a busy writer never shows half a change.
#include "daemon/gmg/reader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

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

// Blocks are freed and used again by instances of another size; 4 readers at full speed. An odd id
// has 8 ops, an even one 5, and every op carries the id.
TEST(GmgReader, Race_reused_blocks_are_never_mixed) {
  Segment segment;
  const std::shared_ptr<const graph::Template> graphs[] = {testing::Chain(5, 1000, 256),
                                                           testing::Chain(8, 1000, 512)};
  graph::BoundSizes sizes[2];
  for (size_t g = 0; g < 2; ++g) ASSERT_TRUE(graphs[g]->Bind({}, &sizes[g]).ok());
  std::atomic<uint64_t> seen{0};
  std::atomic<bool> stop{false}, mixed{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 4; ++r) {
    readers.emplace_back([&] {
      const Reader reader = *Reader::Open(segment.span);
      while (!stop.load(std::memory_order_relaxed)) {
        for (const InstanceView& view : reader.Instances()) {
          bool good = view.ops.size() == (view.id % 2 == 1 ? 8u : 5u);
          for (const OpView& op : view.ops) good &= op.duration_ns == static_cast<int64_t>(view.id);
          for (const TensorView& tensor : view.tensors)
            good &= tensor.bytes == (view.id % 2 == 1 ? 512 : 256);
          if (!good) mixed.store(true);
          seen.fetch_add(1, std::memory_order_relaxed);
        }
      }
    });
  }
  const auto add = [&](uint64_t id) {
    const size_t g = id % 2;
    const uint32_t slot = segment.gmg->AddInstance(*graphs[g], sizes[g]);
    segment.gmg->Write(slot).id = id;
    for (uint32_t op = 0; op < graphs[g]->groups().size(); ++op)
      segment.gmg->ops(slot)[op].duration_ns = static_cast<int64_t>(id);
    segment.gmg->CloseWrites();
    return slot;
  };
  std::vector<uint32_t> slots;
  uint64_t id = 1;
  for (; id <= 16; ++id) slots.push_back(add(id));
  while (seen.load(std::memory_order_relaxed) < 20'000) {
    uint32_t& slot = slots[id % slots.size()];
    segment.gmg->FreeInstance(slot);
    segment.gmg->CloseWrites();
    slot = add(id++);
    if (id % 64 == 0) std::this_thread::yield();
  }
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_FALSE(mixed.load());
}

TEST(GmgReader, Happy_the_head_of_an_access_queue_says_who_waits_for_whom) {
  Segment segment;
  const uint32_t index = segment.gmg->AllocateRecord(kPieces);
  auto* const record = segment.gmg->At<PieceRecord>(kPieces, index);
  Gmg::UpdateRecord(record, [&] {
    record->set = 3u;
    record->version = uint64_t{7};
    record->moving = uint8_t{1};
    record->queue_length = kQueueEntriesShown + 2;
    for (uint32_t e = 0; e < kQueueEntriesShown; ++e) {
      record->queue[e].owner = uint64_t{100} + e;
      record->queue[e].kind =
          static_cast<uint8_t>(e == 0 ? AccessKind::kMove : AccessKind::kInstance);
      record->queue[e].write = uint8_t{e == 0 || e == 3};
      record->queue[e].uses_left = 2u;
    }
  });
  const Result<Reader> reader = Reader::Open(segment.span);
  ASSERT_TRUE(reader.ok());
  const std::vector<PieceView> pieces = reader->Pieces();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_TRUE(pieces[0].moving);
  EXPECT_EQ(pieces[0].queue_length, kQueueEntriesShown + 2);
  ASSERT_EQ(pieces[0].queue.size(), kQueueEntriesShown);
  //                              move r  r  w  r  r ...
  const uint32_t waits[] = {0, 1, 1, 3, 2, 2, 2, 2};
  for (size_t e = 0; e < kQueueEntriesShown; ++e) {
    EXPECT_EQ(pieces[0].queue[e].waits_for, waits[e]) << e;
    EXPECT_EQ(pieces[0].queue[e].owner, 100 + e);
  }
  EXPECT_EQ(AccessName(pieces[0].queue[0]), "move");
  EXPECT_EQ(AccessName(pieces[0].queue[3]), "write");
  EXPECT_NE(
      reader->GraphsJson(false).find(
          "{\"kind\":\"move\",\"id\":100,\"access\":\"move\",\"uses_left\":2,\"waits_for\":0}"),
      std::string::npos)
      << reader->GraphsJson(false);
}

TEST(GmgReader, Happy_a_decision_says_what_it_was_made_by_and_who_was_beaten) {
  Segment segment;
  auto* const record = segment.gmg->At<DecisionRecord>(kDecisions, 0);
  Gmg::UpdateRecord(record, [&] {
    record->number = uint64_t{1};
    record->candidate_count = uint16_t{8};
    record->basis = DecisionBasis::kLevels;
    record->candidates[0].chosen = uint8_t{1};
    record->candidates[0].batch_finish_ns = int64_t{500};
    record->candidates[1].device = uint8_t{1};
    record->candidates[1].beaten = uint8_t{1};
    record->candidates[1].queued_bucket = int32_t{7};
    record->candidates[1].batch_finish_ns = kNever;
  });
  segment.gmg->header().decision_count = uint64_t{1};
  auto* const device = segment.gmg->At<DeviceRecord>(kDevices, 1);
  Gmg::UpdateRecord(device, [&] { device->name.Set("gpu1"); });
  const Reader reader = *Reader::Open(segment.span);
  std::vector<DecisionView> decisions = reader.Decisions(10);
  ASSERT_EQ(decisions.size(), 1u);
  ASSERT_EQ(decisions[0].candidates.size(), kDecisionCandidatesMax);
  EXPECT_EQ(decisions[0].candidates_left_out, 8 - kDecisionCandidatesMax);
  EXPECT_FALSE(decisions[0].candidates[0].beaten);
  EXPECT_TRUE(decisions[0].candidates[1].beaten);
  EXPECT_EQ(decisions[0].candidates[1].queued_ms, 7);
  const std::string levels = reader.DecisionsJson(10);
  for (const char* const part :
       {"\"by\":\"levels\"", "\"device\":1,\"device_name\":\"gpu1\",\"beaten\":true",
        "\"queued_ms\":7", "\"lateness_ms\":0", "\"finish_ns\":500"})
    EXPECT_NE(levels.find(part), std::string::npos) << part << " in " << levels;
  EXPECT_EQ(levels.find(std::to_string(kNever)), std::string::npos) << levels;
  // What was not simulated has no figures.
  Gmg::UpdateRecord(record, [&] { record->basis = DecisionBasis::kOneDevice; });
  const std::string one = reader.DecisionsJson(10);
  EXPECT_NE(one.find("\"by\":\"one device\""), std::string::npos) << one;
  for (const char* const key : {"lateness_ms", "feasible", "queued_ms", "bytes_moved"})
    EXPECT_EQ(one.find(key), std::string::npos) << one;
  Gmg::UpdateRecord(record, [&] { record->basis = static_cast<DecisionBasis>(77); });
  EXPECT_NE(reader.DecisionsJson(10).find("\"by\":\"unknown\""), std::string::npos);
}

// A name that a tenant chose must not make the segment's JSON invalid.
TEST(GmgReader, Malicious_a_long_name_is_not_cut_inside_a_character) {
  Text<16> text;
  text.Set("0123456789abcd\xe6\xa8\xa1");
  EXPECT_EQ(text.Get(), "0123456789abcd");
  text.Set("0123456789ab\xe6\xa8\xa1");
  EXPECT_EQ(text.Get(), "0123456789ab\xe6\xa8\xa1");
  text.Set("0123456789abcdefgh");
  EXPECT_EQ(text.Get(), "0123456789abcde");
  text.Set(std::string(40, '\x80'));
  EXPECT_EQ(text.Get(), "");
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
