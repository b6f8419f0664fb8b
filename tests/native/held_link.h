// A transport that holds some writes back: what an order forbids then has the time to happen, whatever the scheduler
// does.
#pragma once

#include <chrono>
#include <random>

#include "putget_transport.h"

namespace putget::across {

// In front of another table, for a proxy that is set up. One thread at a time calls it.
class HeldLink {
 public:
  HeldLink(const putget_transport& link, uint64_t seed) : link_(link), table_(link), random_(seed) {
    table_.self = this;
    table_.counter_word = counter_word;
    table_.write = write;
    table_.error = error;
  }
  HeldLink(const HeldLink&) = delete;             // the table has its address
  HeldLink& operator=(const HeldLink&) = delete;  // the table has its address

  const putget_transport& table() const { return table_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kHeld = std::chrono::milliseconds(3);
  static constexpr uint32_t kOneIn = 4;

  static int counter_word(void* self, uint32_t imm, const uint64_t** word) {
    const putget_transport& link = static_cast<HeldLink*>(self)->link_;
    return link.counter_word(link.self, imm, word);
  }
  static const char* error(void* self) {
    const putget_transport& link = static_cast<HeldLink*>(self)->link_;
    return link.error(link.self);
  }
  static int write(void* self, const putget_transport_write* write) {
    HeldLink& held = *static_cast<HeldLink*>(self);
    if (Clock::now() < held.until_) return PUTGET_TRANSPORT_FULL;
    const int status = held.link_.write(held.link_.self, write);
    if (status == PUTGET_TRANSPORT_OK && held.random_() % kOneIn == 0) held.until_ = Clock::now() + kHeld;
    return status;
  }

  const putget_transport& link_;
  putget_transport table_;
  std::mt19937_64 random_;
  Clock::time_point until_{};
};

}  // namespace putget::across
