#include "common/wire/record_ring.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

namespace slice {
namespace {

constexpr size_t kCapacity = 4096;

struct RingMemory {
  alignas(64) std::byte bytes[RecordRing::kHeaderBytes + kCapacity] = {};
};

std::vector<std::byte> Payload(size_t size, uint8_t seed) {
  std::vector<std::byte> payload(size);
  for (size_t i = 0; i < size; ++i) payload[i] = static_cast<std::byte>(seed + i * 7);
  return payload;
}

TEST(Happy_RecordRing, RecordsOfAllSizes_ComeBackInOrderAcrossTheWrap) {
  RingMemory memory;
  RecordRing producer(memory.bytes, kCapacity);
  RecordRing consumer(memory.bytes, kCapacity);
  RecordRing::Record record;
  std::mt19937 random(7);
  for (uint32_t i = 0; i < 5000; ++i) {
    const auto payload = Payload(random() % (kCapacity / 4 + 1), static_cast<uint8_t>(i));
    ASSERT_TRUE(producer.Push(i + 1, payload)) << i;
    ASSERT_TRUE(consumer.Pop(&record).value());
    ASSERT_EQ(record.type, i + 1);
    ASSERT_EQ(record.payload, payload);
  }
  EXPECT_FALSE(consumer.Pop(&record).value());
}

TEST(Edge_RecordRing, FullRing_RefusesAndKeepsWhatItHolds) {
  RingMemory memory;
  RecordRing producer(memory.bytes, kCapacity);
  RecordRing consumer(memory.bytes, kCapacity);
  uint32_t pushed = 0;
  while (producer.Push(pushed + 1, Payload(100, static_cast<uint8_t>(pushed)))) ++pushed;
  EXPECT_GE(pushed, kCapacity / 112 - 1);
  RecordRing::Record record;
  for (uint32_t i = 0; i < pushed; ++i) {
    ASSERT_TRUE(consumer.Pop(&record).value());
    EXPECT_EQ(record.type, i + 1);
    EXPECT_EQ(record.payload, Payload(100, static_cast<uint8_t>(i)));
  }
  EXPECT_TRUE(producer.Push(1, {}));
}

TEST(Malicious_RecordRing, NonsenseTail_IsAProtocolError) {
  for (const uint64_t tail :
       {uint64_t{3}, uint64_t{kCapacity + 8}, UINT64_MAX, uint64_t{1} << 63}) {
    RingMemory memory;
    std::memcpy(memory.bytes + 64, &tail, sizeof tail);
    RecordRing::Record record;
    // A consumer that attached before the attack: its head is 0.
    RecordRing consumer(memory.bytes, kCapacity);
    EXPECT_EQ(consumer.Pop(&record).status().code(), StatusCode::kProtocol) << tail;
  }
}

TEST(Malicious_RecordRing, RecordLongerThanAnnounced_IsAProtocolError) {
  RingMemory memory;
  RecordRing consumer(memory.bytes, kCapacity);
  const uint32_t header[2] = {1, 0xfffffff0};
  std::memcpy(memory.bytes + RecordRing::kHeaderBytes, header, sizeof header);
  const uint64_t tail = 64;
  std::memcpy(memory.bytes + 64, &tail, sizeof tail);
  RecordRing::Record record;
  EXPECT_EQ(consumer.Pop(&record).status().code(), StatusCode::kProtocol);
}

TEST(Malicious_RecordRing, NonsenseHead_ReadsAsFull) {
  RingMemory memory;
  RecordRing producer(memory.bytes, kCapacity);
  const uint64_t far_head = uint64_t{1} << 40;
  std::memcpy(memory.bytes, &far_head, sizeof far_head);
  EXPECT_FALSE(producer.Push(1, Payload(8, 1)));
}

TEST(Race_RecordRing, ProducerAndSleepingConsumer_LoseNothing) {
  RingMemory memory;
  RecordRing producer(memory.bytes, kCapacity);
  constexpr uint32_t kRecords = 200'000;
  Fd wake = CreateEventFd().value();
  std::atomic<bool> bad{false};
  std::thread consumer_thread([&] {
    RecordRing consumer(memory.bytes, kCapacity);
    RecordRing::Record record;
    uint32_t expected = 1;
    while (expected <= kRecords) {
      Result<bool> got = consumer.Pop(&record);
      if (!got.ok()) {
        bad = true;
        return;
      }
      if (*got) {
        uint32_t value = 0;
        std::memcpy(&value, record.payload.data(), sizeof value);
        if (record.type != expected || value != expected * 3) bad = true;
        ++expected;
        continue;
      }
      if (consumer.PrepareSleep()) {
        uint64_t count = 0;
        while (::read(wake.get(), &count, sizeof count) < 0 && errno == EAGAIN)
          std::this_thread::yield();
        consumer.EndSleep();
      }
    }
  });
  for (uint32_t i = 1; i <= kRecords; ++i) {
    const uint32_t value = i * 3;
    while (!producer.PushStruct(i, value)) std::this_thread::yield();
    if (producer.ConsumerSleeps()) SignalEventFd(wake);
  }
  consumer_thread.join();
  EXPECT_FALSE(bad);
}

}  // namespace
}  // namespace slice
