// The protocol text on a CPU with stages: what bulk copies do on a GPU is done at once, by copying. For tests of that
// text; reading and writing rows where they are is faster here.
#pragma once

#include <vector>

#include "cpu/exec.h"

namespace putget::cpu {

template <class Base>
class Ring : public Base {
 public:
  static constexpr bool kHasRing = true;
  using Access16 = typename Base::Access16;

  Ring(const Base& base, const RingShape& shape)
      : Base(base),
        stage_bytes_(shape.stage_bytes),
        memory_(uint64_t{shape.stages} * shape.stage_bytes / sizeof(Access16)) {}

  uint8_t* stage(uint32_t s) { return reinterpret_cast<uint8_t*>(memory_.data()) + uint64_t{s} * stage_bytes_; }

  void fetch(uint32_t s, uint32_t offset, const uint8_t* from, uint32_t bytes) { copy(from, stage(s) + offset, bytes); }
  void expect(uint32_t, uint32_t) const {}
  void await_stage(uint32_t) const {}

  void fetch_piece(const uint8_t* from, uint32_t bytes) { fetch(turn_, 0, from, bytes); }
  void await_piece() const {}
  void send_piece(uint8_t* to, uint32_t bytes) { copy(stage(turn_), to, bytes); }
  void close_piece() { turn_ ^= 1u; }

  template <class Access>
  Access get_staged(const Access* from) const {
    return *from;
  }

 private:
  // 16 bytes at a time, as on a GPU.
  void copy(const uint8_t* from, uint8_t* to, uint32_t bytes) const {
    for (uint32_t i = 0; i < bytes / sizeof(Access16); ++i) {
      this->put(reinterpret_cast<Access16*>(to) + i, reinterpret_cast<const Access16*>(from)[i]);
    }
  }

  uint32_t stage_bytes_;
  uint32_t turn_ = 0;
  std::vector<Access16> memory_;
};

using RingExec = Ring<Exec>;

}  // namespace putget::cpu
