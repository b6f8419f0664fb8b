// Dispatch by CTAs of several warps: what they put, word by word, against the plain way of saying the same. Exits with
// 3 and a line at the first difference. A start half waits for no peer. What peers get is looked at as soon as they
// have been told, so that ThreadSanitizer sees whether that was too early.
#include <cstdio>
#include <cstring>
#include <random>

#include "kernels.h"
#include "protocol/dispatch/dispatch.h"
#include "race_places.h"

namespace putget::stress {
namespace {

struct alignas(kRegionAlignment) Block {
  uint8_t bytes[kRegionAlignment];
};
using Memory = std::vector<Block>;

// The arguments of one dispatch.
struct Call {
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t num_tokens;
  uint32_t blocks;
  uint32_t warps;
  uint32_t segment_bytes;
  uint32_t splits;
  bool apart;
};

constexpr int kExitMismatch = 3;
constexpr uint32_t kTopK = 18;                             // ids of a chunk are more than the threads of two warps
constexpr uint32_t kRowBytes[] = {2096, 48, 10, 16, 272};  // the first: more than a warp loads at a time
constexpr uint32_t kNumbers = 150;                         // more than the threads of a CTA
constexpr uint32_t kPayloads = sizeof(kRowBytes) / sizeof(kRowBytes[0]);

class Rank {
 public:
  explicit Rank(const Call& call) : call_(call), random_(call.ep_size * 100 + call.ep_rank) {
    Shape& shape = plan_.shape;
    shape.ep_size = call.ep_size;
    shape.ep_rank = call.ep_rank;
    shape.num_experts = 2 * call.ep_size + 1;
    shape.top_k = kTopK;
    shape.max_tokens_per_rank = call.num_tokens;
    shape.num_payloads = kPayloads;
    for (uint32_t p = 0; p < kPayloads; ++p) shape.row_bytes[p] = kRowBytes[p];
    shape.output_elements = 8;
    shape.output_type = OutputType::kFloat32;
    shape.num_stats = kNumbers;
    plan_.layout = layout_of(shape);
    const uint64_t blocks = plan_.layout.total_bytes / sizeof(Block) + 1;
    memory_.assign(call.ep_size, Memory(blocks));
    for (uint32_t rank = 0; rank < call.ep_size; ++rank) {
      std::memset(memory_[rank].data(), rank == call.ep_rank ? 0 : 0xee, blocks * sizeof(Block));
      plan_.base[rank] = memory_[rank][0].bytes;
      state_.head.active.insert(rank);
    }
    want_ = memory_;
    for (uint32_t e = 0; e < shape.num_experts; ++e) owners_.push_back(static_cast<int32_t>(random_() % call.ep_size));
    routes_.assign(2 * call.num_tokens * kTopK, 7);
    arrived_.resize(call.ep_size);
    plan_.by_ep_size = Divisor(call.ep_size);
    plan_.state = &state_;
    plan_.fault = &fault_;
    plan_.expert_to_rank = owners_.data();
    plan_.target_ranks = routes_.data();
    plan_.target_slots = routes_.data() + call.num_tokens * kTopK;
    plan_.num_tokens = arrived_.data();
    plan_.invalid_ids = &invalid_;
    load_.assign(shape.num_experts, 0);
    want_load_ = load_;
    plan_.timeout_ns = plan_.warmup_timeout_ns = 20'000'000'000;
    for (uint32_t i = 0; i < call.num_tokens * kTopK; ++i) {
      ids_.push_back(static_cast<int32_t>(random_() % (shape.num_experts + 2)) - 1);
      weights_.push_back(static_cast<float>(random_() % 1000));
    }
    for (uint32_t p = 0; p < kPayloads; ++p) {
      payload_[p].resize(call.num_tokens * kRowBytes[p] / 16 + 1);
      auto* bytes = reinterpret_cast<uint8_t*>(payload_[p].data());
      for (uint32_t b = 0; b < call.num_tokens * kRowBytes[p]; ++b) bytes[b] = static_cast<uint8_t>(random_());
    }
    num_valid_ = static_cast<int32_t>(call.num_tokens) - 1;
    for (uint32_t i = 0; i < kNumbers; ++i) stats_.push_back(static_cast<int32_t>(random_()));
  }

  template <class Exec>
  bool puts() {
    DispatchCall call{};
    call.topk_ids = ids_.data();
    call.topk_weights = weights_.data();
    for (uint32_t p = 0; p < kPayloads; ++p) {
      call.payload[p] = payload_[p].data();
      call.access_bytes[p] = kRowBytes[p] % 16 == 0 ? 16 : 2;
    }
    call.num_valid_tokens = &num_valid_;
    call.ids_access_bytes = sizeof(int32_t);
    call.num_tokens = call_.num_tokens;
    call.max_rows = call_.num_tokens;
    call.expert_load = load_.data();
    call.stats = stats_.data();
    call.half = Half::kStart;
    cut_into_items(call, plan_.shape, call_.segment_bytes, call_.splits, call_.blocks, call_.apart);
    if (!Exec::kManyItems && (many_items(call) || (Exec::kFewTokens && several_items(call, call_.warps)))) {
      std::printf("a call that the kernel is not for\n");
      return false;
    }
    say();
    std::vector<DispatchScratch> scratch(call_.blocks);
    places().clear();
    name_place(&state_, 1, "state");
    name_place(scratch.data(), scratch.size(), "scratch");
    name_place(routes_.data(), routes_.size(), "routes");
    use_plan(plan_);
    bool arrived = false;
    std::thread peers([&] {
      use_plan(plan_);
      arrived = check_arrived();
    });
    launch_ctas<Exec>(call_.blocks, call_.warps,
                      [&](Exec& exec) { dispatch<int32_t>(exec, plan_, call, scratch[exec.block()]); });
    peers.join();
    return arrived && check_own();
  }

 private:
  struct Bytes16 {
    uint64_t half[2];
  };
  struct Route {
    int32_t rank;
    int32_t slot;
  };

  int32_t rank_of(uint32_t token, uint32_t k) const {
    const int32_t id = ids_[token * kTopK + k];
    const bool exists = id >= 0 && id < static_cast<int32_t>(plan_.shape.num_experts);
    return exists && token < static_cast<uint32_t>(num_valid_) ? owners_[id] : -1;
  }

  // The same, said plainly.
  void say() {
    want_rows_.assign(call_.ep_size, 0);
    for (uint32_t token = 0; token < call_.num_tokens; ++token) {
      std::vector<bool> sent(call_.ep_size);
      for (uint32_t k = 0; k < kTopK; ++k) {
        const int32_t rank = rank_of(token, k);
        const int32_t id = ids_[token * kTopK + k];
        if (rank < 0 && id != -1 && token < static_cast<uint32_t>(num_valid_)) ++want_invalid_;
        if (rank >= 0) ++want_load_[id];
        const bool owner = rank >= 0 && !sent[rank];
        want_routes_.push_back({owner ? rank : -1, owner ? static_cast<int32_t>(want_rows_[rank]) : -1});
        if (!owner) continue;
        sent[rank] = true;
        want_row(token, rank, want_rows_[rank]);
      }
      for (uint32_t rank = 0; rank < call_.ep_size; ++rank) want_rows_[rank] += sent[rank] ? 1 : 0;
    }
  }

  // As a peer does: when all parts have been told.
  bool check_arrived() {
    const cpu::Exec exec;
    for (uint32_t rank = 0; rank < call_.ep_size; ++rank) {
      for (uint32_t part = 0; part < call_.blocks; ++part) {
        const uint64_t* flag = part_flag(plan_.base[rank], plan_.layout.arrived, call_.ep_rank, part);
        const uint32_t rows = part + 1 == call_.blocks ? want_rows_[rank] : 0;
        const uint64_t until = exec.now_ns() + plan_.timeout_ns;
        while (exec.template observe<Tag::D4>(flag) != pack_flag(1, pack_part(call_.blocks, rows))) {
          if (exec.now_ns() > until) return differs("arrived", rank, part);
          exec.pause(0);
        }
      }
      for (uint32_t p = 0; p < kPayloads; ++p) {
        if (!same(rank, plan_.layout.payload[p], kRowBytes[p])) return differs("payload", rank, p);
      }
      if (!same_stats(rank)) return differs("stats", rank, 0);
      if (!same(rank, plan_.layout.topk_ids, kTopK * sizeof(int32_t))) return differs("topk_ids", rank, 0);
      if (!same(rank, plan_.layout.topk_weights, kTopK * sizeof(float))) return differs("topk_weights", rank, 0);
    }
    return true;
  }

  bool check_own() const {
    for (uint32_t i = 0; i < want_routes_.size(); ++i) {
      if (plan_.target_ranks[i] != want_routes_[i].rank) return differs("target_ranks", i, 0);
      if (plan_.target_slots[i] != want_routes_[i].slot) return differs("target_slots", i, 0);
    }
    for (uint32_t e = 0; e < load_.size(); ++e) {
      if (load_[e] != want_load_[e]) return differs("expert_load", e, static_cast<uint32_t>(load_[e]));
    }
    return want_invalid_ == invalid_ || differs("invalid_ids", static_cast<uint32_t>(invalid_), 0);
  }

  void want_row(uint32_t token, int32_t rank, uint32_t slot) {
    const uint64_t row = row_index(slot, call_.ep_rank, call_.ep_size);
    uint8_t* base = want_[rank][0].bytes;
    for (uint32_t p = 0; p < kPayloads; ++p) {
      const auto* from = reinterpret_cast<const uint8_t*>(payload_[p].data()) + token * kRowBytes[p];
      std::memcpy(base + plan_.layout.payload[p] + row * kRowBytes[p], from, kRowBytes[p]);
    }
    for (uint32_t k = 0; k < kTopK; ++k) {
      const int32_t id = ids_[token * kTopK + k];
      const int32_t sent = id < static_cast<int32_t>(plan_.shape.num_experts) ? id : -1;
      const uint64_t at = (row * kTopK + k) * sizeof(int32_t);
      std::memcpy(base + plan_.layout.topk_ids + at, &sent, sizeof(sent));
      std::memcpy(base + plan_.layout.topk_weights + at, &weights_[token * kTopK + k], sizeof(float));
    }
  }

  // A whole region: what was not to be written has not been.
  bool same(uint32_t rank, uint64_t region, uint64_t row_bytes) const {
    const uint64_t bytes = row_bytes * call_.num_tokens * call_.ep_size;
    return std::memcmp(memory_[rank][0].bytes + region, want_[rank][0].bytes + region, bytes) == 0;
  }

  // The own line, and no other one.
  bool same_stats(uint32_t rank) const {
    std::vector<uint8_t> want(call_.ep_size * kNumbers * sizeof(int32_t));
    std::memcpy(want.data(), want_[rank][0].bytes + plan_.layout.stats, want.size());
    std::memcpy(want.data() + call_.ep_rank * kNumbers * sizeof(int32_t), stats_.data(), kNumbers * sizeof(int32_t));
    return std::memcmp(memory_[rank][0].bytes + plan_.layout.stats, want.data(), want.size()) == 0;
  }

  bool differs(const char* what, uint32_t first, uint32_t second) const {
    std::fprintf(stderr,
                 "mismatch: rank %u of %u: %s (%u, %u): %u tokens, %u CTAs of %u warps, segments of %u, %u splits, "
                 "apart %d\n",
                 call_.ep_rank, call_.ep_size, what, first, second, call_.num_tokens, call_.blocks, call_.warps,
                 call_.segment_bytes, call_.splits, call_.apart);
    return false;
  }

  Call call_;
  std::mt19937 random_;
  Plan plan_{};
  State state_{};
  FaultRecord fault_{};
  std::vector<Memory> memory_, want_;
  std::vector<int32_t> owners_, routes_, arrived_, ids_, load_, want_load_, stats_;
  std::vector<float> weights_;
  std::vector<Bytes16> payload_[kPayloads];
  unsigned long long invalid_ = 0;
  int32_t num_valid_ = 0;
  std::vector<Route> want_routes_;
  std::vector<uint32_t> want_rows_;
  unsigned long long want_invalid_ = 0;
};

// Ranks that fit into the lanes of a warp and that do not; chunks, and CTAs that share a token.
bool many() {
  for (uint32_t ep_size : {1u, 3u, kWarpLanes, kWarpLanes + 1}) {
    const uint32_t chunk = kChunkTokens;
    const uint32_t chunks = ep_size <= 3 ? 5 : 1;  // of many ranks there is much memory
    for (const Call& call :
         {Call{ep_size, ep_size - 1, chunks * chunk + 3, 2, 3, 512, 1, true},
          Call{ep_size, 0, chunk + 6, 3, 2, 96, 1, true}, Call{ep_size, ep_size / 2, chunk + 7, 2, 2, 4096, 1, false},
          Call{ep_size, 0, chunk + 5, 1, 2, 1024, 2, false}, Call{ep_size, ep_size - 1, 1, 1, 2, 512, 1, true}}) {
      if (!Rank(call).puts<cuda::ManyItemsExec>()) return false;
    }
  }
  return true;
}

// Items of one chunk; an item for each warp.
bool one_chunk() {
  return Rank({3, 1, 7, 7, 2, 4096, 1, false}).puts<cuda::Exec>() &&
         Rank({5, 4, 4, 6, 3, 512, 2, false}).puts<cuda::Exec>() &&
         Rank({3, 2, 3, 10, 3, 512, 1, false}).puts<cuda::FewTokensExec>() &&
         Rank({4, 0, 1, 15, 2, 256, 2, false}).puts<cuda::FewTokensExec>();
}

}  // namespace
}  // namespace putget::stress

int main() { return putget::stress::many() && putget::stress::one_chunk() ? 0 : putget::stress::kExitMismatch; }
