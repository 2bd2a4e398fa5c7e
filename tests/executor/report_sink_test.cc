#include "daemon/executor/report_sink.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <thread>

#include "common/wire/executor_ring.h"

namespace slice::executor {
namespace {

constexpr size_t kCapacity = 4096;

struct Sink {
  Sink() {
    const Fd memory = CreateMemfd("reports", RecordRing::MemoryBytes(kCapacity)).value();
    mapping = Mapping::Map(memory, RecordRing::MemoryBytes(kCapacity), true).value();
    ring.emplace(mapping.data(), kCapacity);
    event = CreateEventFd().value();
    sink = std::make_unique<ReportSink>(
        Mapping::Map(memory, RecordRing::MemoryBytes(kCapacity), true).value(), kCapacity,
        event.Duplicate().value());
  }
  bool Signalled() const {
    pollfd poll{event.get(), POLLIN, 0};
    return ::poll(&poll, 1, 0) == 1;
  }
  Mapping mapping;
  std::optional<RecordRing> ring;
  Fd event;
  std::unique_ptr<ReportSink> sink;
};

TEST(Happy_ReportSink, WakesTheEngineOnlyWhenItSleeps) {
  Sink s;
  s.sink->Push(wire::kIntent, wire::Intent{1, 2});
  EXPECT_FALSE(s.Signalled());
  RecordRing::Record record;
  ASSERT_TRUE(*s.ring->Pop(&record));
  ASSERT_TRUE(s.ring->PrepareSleep());
  s.sink->Push(wire::kIntent, wire::Intent{1, 2}, false);
  EXPECT_FALSE(s.Signalled());
  s.sink->Push(wire::kIntent, wire::Intent{1, 2});
  EXPECT_TRUE(s.Signalled());
}

TEST(Edge_ReportSink, FullRingKeepsReportsInOrder) {
  Sink s;
  constexpr uint64_t kReports = 2000;
  for (uint64_t i = 0; i < kReports; ++i) s.sink->Push(wire::kIntent, wire::Intent{i, 0});
  uint64_t next = 0;
  RecordRing::Record record;
  while (next < kReports) {
    while (*s.ring->Pop(&record)) {
      wire::Intent intent{};
      ASSERT_EQ(record.payload.size(), sizeof intent);
      std::memcpy(&intent, record.payload.data(), sizeof intent);
      ASSERT_EQ(intent.transfer, next++);
    }
    s.sink->Flush();
  }
  EXPECT_FALSE(s.sink->Flush());
}

TEST(Edge_ReportSink, PromiseIsInTheRingOrRefused) {
  Sink s;
  while (s.sink->TryPush(wire::kIntent, wire::Intent{1, 0})) {
  }
  s.sink->Push(wire::kIntent, wire::Intent{2, 0});
  RecordRing::Record record;
  ASSERT_TRUE(*s.ring->Pop(&record));
  ASSERT_TRUE(*s.ring->Pop(&record));
  EXPECT_TRUE(s.sink->TryPush(wire::kIntent, wire::Intent{3, 0}));  // behind the one that waited
  uint64_t last = 0;
  uint64_t before = 0;
  while (*s.ring->Pop(&record)) {
    wire::Intent intent{};
    std::memcpy(&intent, record.payload.data(), sizeof intent);
    before = last;
    last = intent.transfer;
  }
  EXPECT_EQ(before, 2u);
  EXPECT_EQ(last, 3u);
}

TEST(Race_ReportSink, ManyThreadsOneConsumer) {
  Sink s;
  constexpr uint64_t kEach = 2000;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kEach; ++i)
        s.sink->Push(wire::kIntent, wire::Intent{t << 32 | i, 0});
    });
  }
  uint64_t next[3] = {};
  uint64_t seen = 0;
  RecordRing::Record record;
  while (seen < 3 * kEach) {
    if (!*s.ring->Pop(&record)) {
      s.sink->Flush();
      continue;
    }
    wire::Intent intent{};
    std::memcpy(&intent, record.payload.data(), sizeof intent);
    ASSERT_EQ(intent.transfer & 0xffffffff, next[intent.transfer >> 32]++);
    ++seen;
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace slice::executor
