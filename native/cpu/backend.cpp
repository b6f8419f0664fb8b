// The CPU backend: the protocol text run by the calling thread.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "backend.h"
#include "choose.h"
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
    whole_rows.segments_of_row = segments_of_row(plan.shape, kWholeRow);
    const bool narrow = !aligned(call.out) || !aligned(call.addend);
    const putget_path path = call.sentinel != 0 ? sentinel_path(plan.shape) : got_path(plan.shape, narrow);
    whole_rows.wide_out = plan.shape.output_row_bytes() % kWideBytes == 0 && !narrow;
    with_codec(plan.shape.output_type, [&](auto codec) {
      using Codec = decltype(codec);
      using Packed = SameWire<Codec, kWideBytes / sizeof(typename Codec::Bits)>;
      const auto run = [&](auto wire, auto rows) {
        putget::combine<Codec, decltype(wire), decltype(rows)>(exec, plan, whole_rows, combine_scratch_);
      };
      with_rows_of(path, [&](auto rows) {
        if (path == PUTGET_PATH_GOT_NARROW) {
          run(SameWire<Codec, 1>{}, DynamicTopK{});
        } else if (call.sentinel == 0) {
          run(Packed{}, rows);
        } else if (plan.shape.quantised()) {
          run(SentinelWire<Codec, true>{}, rows);
        } else {
          run(SentinelWire<Codec, false>{}, rows);
        }
      });
    });
  }

  void launches(const Shape& shape, uint32_t, bool sentinel, const Limits&, void*, putget_launch* dispatch,
                putget_launch* combine) const override {
    *dispatch = putget_launch{};
    dispatch->path = PUTGET_PATH_MANY_CHUNKS;
    *combine = putget_launch{};
    combine->path = sentinel ? sentinel_path(shape) : got_path(shape, false);
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
