// Handles of one session: 64 bits, a slot's index in the low half and its generation in the high
// half. A handle of something that is gone never matches what took its slot. 0 is never valid.
//
// Owner and thread: the session, on the server thread. Handles come from tenants: Find trusts
// nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace slice::server {

template <typename T>
class HandleTable {
 public:
  uint64_t Insert(T value) {
    uint32_t index = 0;
    if (free_.empty()) {
      index = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    slots_[index].value = std::move(value);
    ++count_;
    return (uint64_t{slots_[index].generation} << 32) | index;
  }

  // nullptr when the handle is stale, forged or 0.
  T* Find(uint64_t handle) {
    const uint64_t index = handle & 0xffffffffu;
    if (index >= slots_.size()) return nullptr;
    Slot& slot = slots_[index];
    if (!slot.value.has_value() || slot.generation != handle >> 32) return nullptr;
    return &*slot.value;
  }

  bool Erase(uint64_t handle) {
    if (Find(handle) == nullptr) return false;
    const auto index = static_cast<uint32_t>(handle & 0xffffffffu);
    slots_[index].value.reset();
    --count_;
    // A slot whose generations are used up is retired: its handles would repeat.
    if (++slots_[index].generation != 0) free_.push_back(index);
    return true;
  }

  template <typename Visitor>
  void ForEach(const Visitor& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.value.has_value()) visit(*slot.value);
    }
  }

  size_t size() const { return count_; }

 private:
  struct Slot {
    uint32_t generation = 1;
    std::optional<T> value;
  };
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  size_t count_ = 0;
};

}  // namespace slice::server
