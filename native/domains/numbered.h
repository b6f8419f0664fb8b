// A list that one thread appends to while others look things up.
#pragma once

#include <atomic>
#include <memory>

namespace putget::proxy {

// Numbers from 0 on for pointers. Looking one up takes no lock; everything else is for one thread at a time.
template <class T>
class Numbered {
 public:
  static constexpr uint32_t kMost = 1u << 20;

  // Null where nothing has this number.
  T* operator[](uint32_t number) const {
    if (number >= kMost) return nullptr;
    const Block* const block = blocks_[number / kBlock].load(std::memory_order_acquire);
    return block == nullptr ? nullptr : block->entries[number % kBlock].load(std::memory_order_acquire);
  }

  // False: there are too many.
  bool add(T* entry, uint32_t& number) {
    number = 0;
    while (number < used_ && (*this)[number] != nullptr) ++number;
    if (number == kMost) return false;
    if (number == used_) ++used_;
    auto& block = blocks_[number / kBlock];
    if (block.load(std::memory_order_relaxed) == nullptr) {
      owned_[number / kBlock] = std::make_unique<Block>();
      block.store(owned_[number / kBlock].get(), std::memory_order_release);
    }
    block.load(std::memory_order_relaxed)->entries[number % kBlock].store(entry, std::memory_order_release);
    return true;
  }

  // The number is free for another one.
  T* take(uint32_t number) {
    T* const entry = (*this)[number];
    if (entry != nullptr) {
      blocks_[number / kBlock].load(std::memory_order_relaxed)->entries[number % kBlock].store(nullptr);
    }
    return entry;
  }

  // One behind the largest number that was ever given.
  uint32_t end() const { return used_; }

 private:
  static constexpr uint32_t kBlock = 1024;
  struct Block {
    std::atomic<T*> entries[kBlock] = {};
  };

  std::atomic<Block*> blocks_[kMost / kBlock] = {};
  std::unique_ptr<Block> owned_[kMost / kBlock];
  uint32_t used_ = 0;
};

}  // namespace putget::proxy
