// The protocol text on a GPU with bulk copies: each warp has a ring of stages in shared memory, which the copy engine
// of its SM fills and empties. Few warps keep many bytes in flight, and their registers hold none of them.
#pragma once

#include "cuda/bulk.cuh"
#include "cuda/exec.cuh"
#include "cuda/grid.h"

namespace putget::cuda {

constexpr uint32_t kBarrierBytes = 8;

class RingExec : public Exec {
 public:
  static constexpr bool kHasRing = true;

  // Every thread of a warp makes its own. `rings` are the CTA's.
  __device__ RingExec(uint8_t* rings, const RingShape& shape)
      : barriers_(rings + warp() * ring_bytes(shape)), stage_bytes_(shape.stage_bytes) {
    if (lane() == 0) {
      for (uint32_t s = 0; s < shape.stages; ++s) ptx::init_barrier(barrier(s), 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  // What ordinary stores of earlier kernels wrote may be fetched then.
  __device__ void wait_for_earlier_work() const {
    Exec::wait_for_earlier_work();
    order_fetches();
  }
  // What this thread has observed happens before what it fetches from here on.
  __device__ void order_fetches() const { ptx::fence_before_bulk(); }

  __device__ uint8_t* stage(uint32_t s) const { return barriers_ + kLineBytes + s * stage_bytes_; }

  // Fetching into a stage: any lanes issue copies, the warp says how many bytes these are, and awaits them.
  __device__ void fetch(uint32_t s, uint32_t offset, const uint8_t* from, uint32_t bytes) const {
    ptx::bulk_load(ptx::shared_address(stage(s)) + offset, from, bytes, barrier(s));
  }
  __device__ void expect(uint32_t s, uint32_t bytes) {
    if (lane() == 0) ptx::arrive_and_expect(barrier(s), bytes);
    under_way_ |= 1u << s;
    __syncwarp();
  }
  __device__ void await_stage(uint32_t s) {
    while (!ptx::phase_ended(barrier(s), phases_ >> s & 1u)) {
    }
    phases_ ^= 1u << s;
    under_way_ &= ~(1u << s);
  }

  // Moving through two stages in turns: the warp fetches a piece, one lane sends it, and the warp closes it.
  __device__ void fetch_piece(const uint8_t* from, uint32_t bytes) {
    ptx::await_bulk_reads<1>();
    __syncwarp();
    if (lane() == 0) fetch(turn_, 0, from, bytes);
    expect(turn_, bytes);
  }
  __device__ void await_piece() { await_stage(turn_); }
  __device__ void send_piece(uint8_t* to, uint32_t bytes) const {
    ptx::bulk_store(to, ptx::shared_address(stage(turn_)), bytes);
  }
  __device__ void close_piece() {
    ptx::close_bulk_group();
    turn_ ^= 1u;
  }
  // What this lane has sent is there, so that a release after the next block barrier covers it.
  __device__ void complete_puts() const { ptx::await_bulk_stores(); }

  // Before the CTA ends, whatever became of its waits: nothing may be under way from or to its shared memory.
  __device__ void settle() {
    for (uint32_t s = 0; under_way_ != 0; ++s) {
      if (under_way_ >> s & 1u) await_stage(s);
    }
    ptx::await_bulk_reads<0>();
  }

  template <class Access>
  __device__ Access get_staged(const Access* from) const {
    static_assert(sizeof(Access) == sizeof(uint4), "rows of 16-byte packs");
    union {
      uint4 raw;
      Access value;
    } both{*reinterpret_cast<const uint4*>(from)};
    return both.value;
  }

 private:
  __device__ uint32_t barrier(uint32_t s) const { return ptx::shared_address(barriers_) + s * kBarrierBytes; }

  uint8_t* barriers_;
  uint32_t stage_bytes_;
  uint32_t phases_ = 0;     // the parity that each stage's next fetch ends
  uint32_t under_way_ = 0;  // stages that are being filled
  uint32_t turn_ = 0;       // the stage of the next piece
};

}  // namespace putget::cuda
