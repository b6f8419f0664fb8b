// The CPU backend: the protocol text run by the calling thread.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "backend.h"
#include "cpu/exec.h"
#include "cpu/symmetric_memory.h"
#include "protocol/combine/combine.h"
#include "protocol/dispatch/dispatch.h"
#include "protocol/round/exec.h"
#include "protocol/round/release.h"
#include "protocol/round/words.h"

namespace putget::cpu {
namespace {

static_assert(ExecCheck<Exec>::kComplete);

constexpr uint32_t kWideBytes = 16;

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kWideBytes == 0; }

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const MemoryConfig& config)
      : Backend(config), symmetric_(config.ep_size, config.ep_rank, config.bytes) {}

  putget_share export_share() override {
    putget_share share{};
    share.kind = PUTGET_SHARE_DESCRIPTOR;
    share.descriptor = symmetric_.export_descriptor();
    share.bytes = config_.bytes;
    return share;
  }

  void import_share(uint32_t peer, const putget_share& share) override {
    if (share.kind != PUTGET_SHARE_DESCRIPTOR) throw Error(PUTGET_INVALID, "CPU memory is shared by descriptors only");
    symmetric_.import_descriptor(peer, share.descriptor);
  }

  void renew() override { symmetric_.renew(); }

  void start(uint32_t epoch, const RankSet& active) override {
    state_ = State{};
    state_.head.epoch = epoch;
    state_.head.active = active;
    state_.head.mixed = mixed_;
    std::fill_n(state_.sent, kMaxParts, pack_flag(epoch, 0));
    fault_ = FaultRecord{};
    uint8_t* own = symmetric_.base(config_.ep_rank);
    const uint64_t flags = control_bytes(config_.ep_size) / sizeof(uint64_t);
    std::fill_n(reinterpret_cast<uint64_t*>(own), flags, pack_flag(epoch, 0));
    clear_sentinel_rows(sentinel_begin(), config_.bytes);
  }

  State read_state() override { return state_; }

  void share_between_layouts() override {
    mixed_ = 1;
    if (state_.head.mixed) return;
    state_.head.mixed = 1;
    uint8_t* own = symmetric_.base(config_.ep_rank);
    for (uint32_t rank = 0; rank < config_.ep_size; ++rank) {
      *flag_line(own, finished_lines(config_.ep_size), rank) = finished_before_mixing(state_);
    }
  }
  uint8_t* base(uint32_t rank) const override { return symmetric_.base(rank); }
  State* state() const override { return &state_; }
  FaultRecord* fault() const override { return &fault_; }

  void dispatch(const Plan& plan, const DispatchCall& call, const Limits&, void*) override {
    const Interruptible running(*this);
    Exec exec;
    DispatchCall whole_rows = call;
    const bool apart = short_apart(plan.shape, call.num_tokens, kWholeRow, 1, 1);
    cut_into_items(whole_rows, plan.shape, kWholeRow, 1, 1, apart);
    if (call.ids_are_64bit) {
      putget::dispatch<int64_t>(exec, plan, whole_rows, dispatch_scratch_);
    } else {
      putget::dispatch<int32_t>(exec, plan, whole_rows, dispatch_scratch_);
    }
  }

  void combine(const Plan& plan, const CombineCall& call, const Limits&, void*) override {
    const Interruptible running(*this);
    Exec exec;
    CombineCall whole_rows = call;
    whole_rows.segment_bytes = kWholeRow;
    whole_rows.sending_blocks = 1;
    whole_rows.first_summing = first_summing(1, 1);
    whole_rows.sentinel_sources = sentinel_sources(plan, call);
    whole_rows.pieces_of_row = pieces_of_row(plan.shape, kWholeRow);
    const bool packed = plan.shape.output_row_bytes() % kWideBytes == 0 && aligned(call.out) && aligned(call.addend);
    whole_rows.wide_out = packed;
    with_codec(plan.shape.output_type, [&](auto codec) {
      using Codec = decltype(codec);
      using Packed = SameWire<Codec, kWideBytes / sizeof(typename Codec::Bits)>;
      if (call.sentinel != 0) {
        with_rows(plan.shape, [&](auto rows) {
          if (plan.shape.quantised()) {
            putget::combine<Codec, SentinelWire<Codec, true>, decltype(rows)>(exec, plan, whole_rows, combine_scratch_);
          } else {
            putget::combine<Codec, SentinelWire<Codec, false>, decltype(rows)>(exec, plan, whole_rows,
                                                                               combine_scratch_);
          }
        });
      } else if (!packed) {
        putget::combine<Codec, SameWire<Codec, 1>, DynamicTopK>(exec, plan, whole_rows, combine_scratch_);
      } else {
        with_rows(plan.shape, [&](auto rows) {
          putget::combine<Codec, Packed, decltype(rows)>(exec, plan, whole_rows, combine_scratch_);
        });
      }
    });
  }

  void launches(const Shape&, uint32_t, bool, const Limits&, void*, putget_launch* dispatch,
                putget_launch* combine) const override {
    *dispatch = putget_launch{};
    *combine = putget_launch{};
  }

  void release(const Plan& plan, void*) override {
    Exec exec;
    putget::release(exec, plan, combine_scratch_.wait);
  }

 private:
  void clear_sentinel_rows(uint64_t begin, uint64_t end) override {
    std::memset(symmetric_.base(config_.ep_rank) + begin, kNotCome & 0xff, end - begin);
  }

  // A call whose waits the host may end. Its fault is then another one than that of a deadline.
  class Interruptible {
   public:
    explicit Interruptible(CpuBackend& memory) : memory_(memory) { interrupt::asked = {}; }
    ~Interruptible() {
      constexpr auto kTimeout = static_cast<uint32_t>(FaultKind::kPeerTimeout);
      if (!interrupt::asked.stopped || memory_.fault_.kind != kTimeout) return;
      memory_.fault_.kind = memory_.state_.head.fault = static_cast<uint32_t>(FaultKind::kInterrupted);
    }
    Interruptible(const Interruptible&) = delete;             // of one call
    Interruptible& operator=(const Interruptible&) = delete;  // of one call

   private:
    CpuBackend& memory_;
  };

  static constexpr uint32_t kWholeRow = 1u << 30;

  SymmetricMemory symmetric_;
  mutable State state_{};
  mutable FaultRecord fault_{};
  uint32_t mixed_ = 0;
  DispatchScratch dispatch_scratch_{};
  CombineScratch combine_scratch_{};
};

}  // namespace

void set_interrupt_check(int (*check)()) { interrupt::check.store(check, std::memory_order_release); }

std::unique_ptr<Backend> create_backend(const MemoryConfig& config) { return std::make_unique<CpuBackend>(config); }

}  // namespace putget::cpu
