// The CPU backend: the protocol text run by the calling thread and its helpers.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend.h"
#include "choose.h"
#include "cpu/clones.h"
#include "cpu/combine.h"
#include "cpu/domains.h"
#include "cpu/exec.h"
#include "cpu/own_pages.h"
#include "cpu/symmetric_memory.h"
#include "protocol/dispatch/dispatch.h"
#include "protocol/round/exec.h"
#include "protocol/round/release.h"
#include "protocol/round/words.h"
#include "team.h"

namespace putget::cpu {
namespace {

static_assert(ExecCheck<Exec>::kComplete);

constexpr uint32_t kWholeRow = 1u << 30;

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kWideBytes == 0; }

// The least work that is worth waking a helper for.
constexpr uint64_t kBytesOfBlock = 128 * 1024;
// Items that a block has at least, where rows are long enough to be cut.
constexpr uint32_t kItemsOfBlock = 2;

uint64_t ceil_div(uint64_t value, uint64_t divisor) { return (value + divisor - 1) / divisor; }

// How many blocks move so many bytes of so many rows, and how they cut rows; `wanted` blocks, unless it is 0.
struct Grid {
  uint32_t blocks;
  uint32_t segment_bytes;

  Grid(uint64_t bytes, uint64_t rows, uint32_t row_bytes, uint32_t most, uint32_t wanted)
      : blocks(wanted != 0 ? wanted : clamped(bytes / kBytesOfBlock, most)) {
    const uint64_t pieces = ceil_div(uint64_t{kItemsOfBlock} * blocks, std::max<uint64_t>(rows, 1));
    const auto piece = static_cast<uint32_t>(ceil_div(row_bytes, pieces));
    segment_bytes = blocks == 1 ? kWholeRow : round_up(piece, kWarpBytes);
  }

 private:
  static uint32_t clamped(uint64_t blocks, uint32_t most) {
    return static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, std::clamp(most, 1u, kMaxParts)));
  }
};

Grid grid_of_dispatch(const Shape& shape, uint32_t num_tokens, uint32_t most, const putget_launch& tuning) {
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) bytes += shape.row_bytes[p];
  const uint32_t longest = *std::max_element(shape.row_bytes, shape.row_bytes + kMaxPayloads);
  return {num_tokens * bytes * shape.most_rows(), num_tokens, longest, most, tuning.blocks};
}

// A rank that sums much is sent much: others have about as many tokens.
Grid grid_of_combine(const Shape& shape, uint32_t num_tokens, uint32_t most, const putget_launch& tuning) {
  const uint32_t row_bytes = shape.output_row_bytes();
  return {uint64_t{num_tokens} * shape.most_rows() * row_bytes, num_tokens, row_bytes, most, tuning.blocks};
}

template <class Id>
PUTGET_CLONES void run_dispatch(Exec& exec, const Plan& plan, const DispatchCall& call, DispatchScratch& scratch) {
  putget::dispatch<Id>(exec, plan, call, scratch);
}

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

  void dispatch(const Plan& plan, const DispatchCall& call, const Limits& limits, void*) override {
    const Interruptible running(*this);
    const bool finishes = call.half == Half::kFinish;  // by one block
    const Grid grid = grid_of_dispatch(plan.shape, finishes ? 0 : call.num_tokens, finishes ? 1 : limits.num_sms,
                                       finishes ? putget_launch{} : limits.dispatch);
    DispatchCall cut = call;
    const bool apart = short_apart(plan.shape, call.num_tokens, grid.segment_bytes, 1, grid.blocks);
    cut_into_items(cut, plan.shape, grid.segment_bytes, 1, grid.blocks, apart);
    give_scratch(grid.blocks);
    team_.run(grid.blocks, [&](uint32_t block) {
      Exec exec(block, grid.blocks);
      if (call.ids_are_64bit) {
        run_dispatch<int64_t>(exec, plan, cut, scratch_[block].dispatch);
      } else {
        run_dispatch<int32_t>(exec, plan, cut, scratch_[block].dispatch);
      }
    });
  }

  void combine(const Plan& plan, const CombineCall& call, const Limits& limits, void*) override {
    const Interruptible running(*this);
    const uint32_t most = call.half == Half::kFinish ? limits.finish_num_sms : limits.num_sms;
    const Grid grid = grid_of_combine(plan.shape, call.num_tokens, most, limits.combine);
    const bool narrow = !aligned(call.out) || !aligned(call.addend);
    const CombineCall cut = cut_combine(plan, call, grid, narrow);
    const putget_path path = call.sentinel != 0 ? sentinel_path(plan.shape) : got_path(plan.shape, narrow);
    give_scratch(grid.blocks);
    with_codec(plan.shape.output_type, [&](auto codec) {
      team_.run(grid.blocks, [&](uint32_t block) {
        Exec exec(block, grid.blocks);
        run_combine<decltype(codec)>(exec, plan, cut, scratch_[block].combine, path);
      });
    });
  }

  // A rank's own cores read what another has written as fast as what comes to them, and it is written once.
  bool sends_by_rule() const override { return false; }

  void launches(const Shape& shape, uint32_t num_tokens, bool sentinel, const Limits& limits, void*,
                putget_launch* dispatch, putget_launch* combine) const override {
    *dispatch = putget_launch{};
    dispatch->path = PUTGET_PATH_MANY_CHUNKS;
    *combine = putget_launch{};
    combine->path = sentinel ? sentinel_path(shape) : got_path(shape, false);
    dispatch->blocks = grid_of_dispatch(shape, num_tokens, limits.num_sms, limits.dispatch).blocks;
    combine->blocks = grid_of_combine(shape, num_tokens, limits.num_sms, limits.combine).blocks;
  }

  void release(const Plan& plan, void*) override {
    Exec exec;
    give_scratch(1);
    putget::release(exec, plan, scratch_[0].combine.wait);
  }

  void pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call, const Limits&, void*) override {
    const Interruptible running(*this);
    cpu::pack(plan, across, call);
  }
  void unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows, const Limits&, void*) override {
    const Interruptible running(*this);
    cpu::unpack(plan, across, max_rows);
  }
  void close_round(const Plan& plan, const DomainsPlan& across, uint32_t kind, void*) override {
    cpu::close_round(plan, across, kind);
  }
  void serve_sources(const Plan& plan, const DomainsPlan& across, const Limits&, void*) override {
    const Interruptible running(*this);
    cpu::serve_sources(plan, across);
  }
  void sum_domains(const Plan& plan, const DomainsPlan& across, const CombineCall& call, const Limits&,
                   void*) override {
    const Interruptible running(*this);
    cpu::sum_domains(plan, across, call);
  }
  std::shared_ptr<uint8_t> make_tables(uint64_t bytes) override { return make_pages(bytes); }
  std::shared_ptr<uint8_t> show_to_kernels(uint8_t* host, uint64_t) override {
    return {std::shared_ptr<uint8_t>(), host};
  }

 private:
  // Memory of one block.
  struct Scratch {
    DispatchScratch dispatch{};
    CombineScratch combine{};
  };

  // How its blocks share the work. All send what is to be sent, and then sum.
  static CombineCall cut_combine(const Plan& plan, const CombineCall& call, const Grid& grid, bool narrow) {
    CombineCall cut = call;
    cut.segment_bytes = grid.segment_bytes;
    cut.sending_blocks = grid.blocks;
    cut.first_summing = 0;
    cut.sentinel_sources = sentinel_sources(plan, call);
    cut.segments_of_row = segments_of_row(plan.shape, grid.segment_bytes);
    cut.wide_out = plan.shape.output_row_bytes() % kWideBytes == 0 && !narrow;
    return cut;
  }

  void give_scratch(uint32_t blocks) {
    if (scratch_.size() < blocks) scratch_.resize(blocks);
  }

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

  SymmetricMemory symmetric_;
  mutable State state_{};
  mutable FaultRecord fault_{};
  uint32_t mixed_ = 0;
  std::vector<Scratch> scratch_;
  Team team_;
};

}  // namespace

void set_interrupt_check(int (*check)()) { interrupt::check.store(check, std::memory_order_release); }

std::unique_ptr<Backend> create_backend(const MemoryConfig& config) { return std::make_unique<CpuBackend>(config); }

}  // namespace putget::cpu
