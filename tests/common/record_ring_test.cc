#include "common/wire/record_ring.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
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

// A ring with several consumer threads under one mutex, as the executor has: one per device, which
// sometimes runs an op between two looks, and a copy thread that takes a device's signal while the
// device does.
class SharedConsumer {
 public:
  static constexpr size_t kDevices = 2;

  explicit SharedConsumer(std::byte* memory) : ring_(memory, kCapacity) {
    for (size_t d = 0; d < kDevices; ++d) {
      events_[d] = CreateEventFd().value();
      polls_[d] = Fd(::epoll_create1(EPOLL_CLOEXEC));
      Watch(polls_[d], events_[d], EPOLLIN | EPOLLEXCLUSIVE);
      Watch(copier_poll_, events_[d], EPOLLIN | EPOLLET | EPOLLEXCLUSIVE);
    }
    stop_ = CreateEventFd().value();
    for (const Fd& poll : polls_) Watch(poll, stop_, EPOLLIN);
    Watch(copier_poll_, stop_, EPOLLIN);
    for (size_t d = 0; d < kDevices; ++d) threads_[d] = std::thread([this, d] { RunDevice(d); });
    threads_[kDevices] = std::thread([this] { RunCopier(); });
  }
  ~SharedConsumer() {
    stopping_ = true;
    SignalEventFd(stop_);
    for (std::thread& thread : threads_) thread.join();
  }
  void Signal(size_t device) const { SignalEventFd(events_[device]); }
  // Waits until `count` records have come, in order, each once. False: they did not for so long
  // that a wake-up must have been lost.
  bool Await(uint64_t count) const {
    pollfd item{progress_.get(), POLLIN, 0};
    while (received_ < count && !bad_) {
      if (::poll(&item, 1, 20'000) == 0) return false;
      ClearEventFd(progress_);
    }
    return !bad_;
  }

 private:
  static void Watch(const Fd& poll, const Fd& event, uint32_t events) {
    epoll_event entry{};
    entry.events = events;
    SLICE_CHECK(::epoll_ctl(poll.get(), EPOLL_CTL_ADD, event.get(), &entry) == 0, "epoll_ctl");
  }
  void Spin(uint32_t turns) const {
    while (turns > 0 && !stopping_) --turns;
  }
  void DrainLocked() {
    RecordRing::Record record;
    for (;;) {
      const Result<bool> got = ring_.Pop(&record);
      if (!got.ok() || (*got && record.type != received_ + 1)) bad_ = true;
      if (!got.ok() || !*got) return;
      ++received_;
      SignalEventFd(progress_);
    }
  }
  void LeaveLocked() {
    while (!ring_.PrepareSleep()) DrainLocked();
  }
  void RunDevice(size_t device) {
    std::minstd_rand random(static_cast<uint32_t>(device));
    uint32_t looks = 0;  // without announcing sleep: commands are expected
    while (!stopping_) {
      std::unique_lock lock(mutex_);
      DrainLocked();
      if (looks > 0) {
        --looks;
        lock.unlock();
        Spin(64);
        continue;
      }
      LeaveLocked();
      if (random() % 4 == 0) {  // an op
        lock.unlock();
        Spin(random() % 4096);
        continue;
      }
      lock.unlock();
      epoll_event event;
      const int timeout_ms = random() % 64 == 0 ? 1 : -1;
      if (::epoll_wait(polls_[device].get(), &event, 1, timeout_ms) > 0) {
        ClearEventFd(events_[device]);
        looks = random() % 8;
      }
      lock.lock();
      ring_.EndSleep();
    }
  }
  void RunCopier() {
    while (!stopping_) {
      std::unique_lock lock(mutex_);
      DrainLocked();
      LeaveLocked();
      lock.unlock();
      epoll_event event;
      ::epoll_wait(copier_poll_.get(), &event, 1, -1);
      lock.lock();
      ring_.EndSleep();
    }
  }

  std::mutex mutex_;
  RecordRing ring_;
  std::array<Fd, kDevices> events_, polls_;
  Fd copier_poll_{::epoll_create1(EPOLL_CLOEXEC)};
  Fd stop_, progress_ = CreateEventFd().value();
  std::atomic<uint64_t> received_{0};
  std::atomic<bool> bad_{false}, stopping_{false};
  std::array<std::thread, kDevices + 1> threads_;
};

TEST(Race_RecordRing, SleepClaimedAheadOfThePush_LosesNoWakeUp) {
  RingMemory memory;
  RecordRing producer(memory.bytes, kCapacity);
  SharedConsumer consumer(memory.bytes);
  constexpr uint32_t kRecords = 10'000;
  std::minstd_rand random(3);
  uint32_t claims = 0;
  for (uint32_t i = 1; i <= kRecords; ++i) {
    if (random() % 2 == 0 && producer.ClaimSleep()) {
      ++claims;
      consumer.Signal(0);
      for (volatile uint32_t placing = random() % 4096; placing > 0;) placing = placing - 1;
    }
    ASSERT_TRUE(producer.PushStruct(i, i));
    if (producer.ConsumerSleeps()) consumer.Signal(random() % SharedConsumer::kDevices);
    ASSERT_TRUE(consumer.Await(i)) << "record " << i << ", after " << claims << " claims";
  }
  EXPECT_GT(claims, 0u);
}

}  // namespace
}  // namespace slice
