// Rounds across domains as threads, for ThreadSanitizer: the text that the library runs, with the product's proxies and
// its network between ranks of a process.
//
//   domains_rounds [--seed N] [--rounds N] [--domain_size N] [--blocks N] [--quantised 1] [--objects N] [--weaken TAG]
//                [--skip TAG] [--late N]
//
// ThreadSanitizer keys on virtual addresses: so all memory is mapped once, at the same address for everybody. Each rank
// computes what it must receive and what its tokens must sum to. Exit status: 0 all well; 3 a wrong value; 4 a fault;
// ThreadSanitizer's own for a race.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/exec.h"
#include "domains/local_network.h"
#include "held_link.h"
#include "protocol/combine/combine.h"
#include "protocol/dispatch/dispatch.h"
#include "protocol/domains/pack.h"
#include "protocol/domains/serve.h"
#include "protocol/domains/sum_domains.h"
#include "protocol/domains/unpack.h"
#include "protocol/round/release.h"
#include "tag_names.h"

namespace putget::across {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitMismatch = 3;
constexpr int kExitFault = 4;

constexpr uint32_t kRanks = 4;
constexpr uint32_t kExperts = 8;
constexpr uint32_t kTopK = 3;
constexpr uint32_t kTokens = 6;
constexpr uint32_t kElements = 16;
constexpr uint32_t kStats = 3;
constexpr uint64_t kTimeoutNs = 15'000'000'000;

struct Options {
  uint64_t seed = 1;
  uint32_t rounds = 60;
  uint32_t domain_size = 2;
  uint32_t blocks = 1;     // that share the rows of a step, each a thread
  uint32_t quantised = 0;  // 1: sums of other domains come quantised
  uint32_t objects = 1;    // of one workspace, with rows of their own sizes
  uint32_t late = kRanks;  // a rank that gives its rows when its domain's agents have had the time to sum without them
};

uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

// Tokens that an object has room for, and elements of a row that it sends. With those of the second one, rows from one
// rank come to lie where the first one has answers for others.
uint32_t room_of(uint32_t object) { return kTokens << 2 * object; }
uint32_t row_elements(uint32_t object) { return kElements << object; }

// All ranks' knowledge of a round, from the seed alone.
struct Story {
  uint64_t seed;
  uint32_t objects;

  uint64_t draw(uint32_t what, uint32_t round, uint32_t a = 0, uint32_t b = 0) const {
    return mix(mix(mix(seed * 31 + what) + round) + (uint64_t{a} << 32 | b));
  }
  bool combines(uint32_t round) const { return draw(1, round) % 3 != 0; }
  bool releases(uint32_t round, uint32_t rank) const { return draw(2, round, rank) % 2 == 0; }  // else left open
  uint32_t object(uint32_t round) const { return static_cast<uint32_t>(draw(10, round) % objects); }
  uint32_t tokens(uint32_t round, uint32_t source) const {
    return draw(3, round, source) % 4 == 0 ? 0 : static_cast<uint32_t>(draw(4, round, source) % (kTokens + 1));
  }
  int32_t id(uint32_t round, uint32_t source, uint32_t entry) const {
    return static_cast<int32_t>(draw(5, round, source, entry) % (kExperts + 2)) - 2;
  }
  bool goes_to(uint32_t round, uint32_t source, uint32_t token, uint32_t rank) const {
    for (uint32_t k = 0; k < kTopK; ++k) {
      const int32_t expert = id(round, source, token * kTopK + k);
      if (expert >= 0 && expert / (kExperts / kRanks) == rank) return true;
    }
    return false;
  }
  // Small whole numbers: their sums have no rounding, whatever their order.
  float row(uint32_t round, uint32_t source, uint32_t token, uint32_t element) const {
    return static_cast<float>(draw(6, round, source, token * 2 * kElements + element) % 1000);
  }
  // Half of all stories have statistics; without them a message without rows has no bytes.
  uint32_t num_stats() const { return seed % 2 == 0 ? kStats : 0; }
  bool tells(uint32_t round, uint32_t source) const { return draw(8, round, source) % 3 != 0; }  // else zeros
  int32_t stat(uint32_t round, uint32_t source, uint32_t i) const {
    return tells(round, source) ? static_cast<int32_t>(draw(9, round, source, i)) : 0;
  }
  float answer(uint32_t round, uint32_t source, uint32_t token, uint32_t rank) const {
    return static_cast<float>(draw(7, round, source, token * kRanks + rank) % 1000);
  }
};

[[noreturn]] void fail(int status, const char* what, uint32_t rank, uint32_t round) {
  std::fprintf(stderr, "%s at rank %u, round %u\n", what, rank, round);
  std::_Exit(status);
}

Shape shape_of(uint32_t rank, uint32_t object, uint32_t num_stats) {
  Shape shape{};
  shape.ep_size = kRanks;
  shape.ep_rank = rank;
  shape.num_experts = kExperts;
  shape.top_k = kTopK;
  shape.max_tokens_per_rank = room_of(object);
  shape.num_payloads = 1;
  shape.row_bytes[0] = row_elements(object) * sizeof(float);
  shape.output_elements = kElements;
  shape.output_type = OutputType::kFloat32;
  shape.num_stats = num_stats;
  return shape;
}

template <class Type>
std::vector<Type> zeros(uint64_t count) {
  return std::vector<Type>(count == 0 ? 1 : count);
}

// Lines, so that rows lie where the widest access can take them.
struct alignas(128) Line {
  uint8_t byte[128];
};

// State that the objects of a rank's workspace share.
struct Shared {
  Shared(const Story& story, uint32_t rank) {
    for (uint32_t object = 0; object < story.objects; ++object) {
      bytes = std::max(bytes, layout_of(shape_of(rank, object, story.num_stats())).total_bytes);
    }
    symmetric = zeros<Line>(bytes / sizeof(Line) + 1);
    state.head.mixed = story.objects > 1 ? 1 : 0;
  }

  uint64_t bytes = 0;
  std::vector<Line> symmetric;
  State state{};
  FaultRecord fault{};
};

// One object on one rank.
class Rank {
 public:
  Rank(const Story& story, const Domains& domains, uint32_t rank, uint32_t object, const Options& options,
       Shared& shared, proxy::LocalNetwork& network)
      : story_(story),
        blocks_(options.blocks),
        object_(object),
        held_(*network.table(rank), (story.seed * kRanks + rank) * 2 + object),
        plan_{},
        across_(domains),
        network_(network),
        rank_(rank),
        symmetric_(shared.symmetric),
        state_(shared.state),
        fault_(shared.fault) {
    plan_.shape = shape_of(rank, object, story.num_stats());
    plan_.shape.domain_begin = domains.member(domains.domain_of(rank), 0);
    plan_.shape.domain_ranks = domains.size(0);
    plan_.layout = layout_of(plan_.shape);
    plan_.sentinel = by_rank(sentinel_region(shared.bytes, plan_.shape), plan_.shape);
    for (uint32_t expert = 0; expert < kExperts; ++expert) table_.push_back(expert / (kExperts / kRanks));
    for (auto* routes : {&near_ranks_, &near_slots_, &ranks_, &slots_}) {
      *routes = zeros<int32_t>(room_of(object) * kTopK);
    }
    state_.head.active = RankSet::none();
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      if (domains.domain_of(peer) == domains.domain_of(rank)) state_.head.active.insert(peer);
    }
    plan_.state = &state_;
    plan_.fault = &fault_;
    plan_.expert_to_rank = table_.data();
    plan_.target_ranks = near_ranks_.data();
    plan_.target_slots = near_slots_.data();
    plan_.num_tokens = num_tokens_;
    plan_.invalid_ids = &invalid_;
    plan_.timeout_ns = plan_.warmup_timeout_ns = kTimeoutNs;
    plan_.by_ep_size = Divisor(kRanks);
    plan_.object_id = object + 1;
    across_.wire = options.quantised != 0 ? WireType::kFp8 : WireType::kSame;
    prepare_domains();
  }

  // When all ranks are there.
  void meet(const std::vector<std::vector<std::unique_ptr<Rank>>>& ranks) {
    uint8_t* inbox[kMaxRanks] = {};
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      Rank& other = *ranks[peer][object_];
      plan_.base[peer] = other.symmetric_.data()->byte;
      if (across_.is_near(plan_, peer)) {
        across_.board[peer] = other.board_.data();
        inbox[peer] = other.inbox_.data()->byte;
      } else {
        inbox_of_[peer] = target_of(other, other.regions_[1]);
        return_inbox_of_[peer] = target_of(other, other.regions_[3]);
      }
    }
    across_.look_up_messages(plan_.shape, inbox);
    proxy::Config config{
        rank_, 0,           object_,     0,  kTimeoutNs, across_.parcels, across_.domains, &held_.table(),
        {},    regions_[0], regions_[2], {}, {}};
    std::copy_n(across_.board, kMaxRanks, config.board);
    std::copy_n(inbox_of_, kMaxRanks, config.inbox_of);
    std::copy_n(return_inbox_of_, kMaxRanks, config.return_inbox_of);
    config.warms_up = story_.seed % 2 == 0;  // all ranks alike, as where rows wait on GPUs
    proxy_ = std::make_unique<proxy::Proxy>(config);
  }
  proxy::Proxy* proxy() { return proxy_.get(); }

  void play(uint32_t round, bool is_late) {
    dispatch(round);
    if (is_late && story_.combines(round)) wait_for_early_sums();
    check_received(round);
    if (story_.combines(round)) {
      combine(round);
    } else if (story_.releases(round, rank_)) {
      release();
    }
    if (state_.head.fault != 0) fail_with_fault(round);
  }
  // The last round ends for others too.
  void end() { close_open_round(exec_, plan_, across_, kEndedByRelease); }

 private:
  const putget_transport& table() const { return *network_.table(rank_); }

  [[noreturn]] void fail_with_fault(uint32_t round) const {
    std::fprintf(stderr, "kind %u, phase %u, epoch %u, misuse %u, source %u, missing %x; lost", fault_.kind,
                 fault_.phase, fault_.epoch, fault_.misuse, fault_.source, fault_.missing.word[0]);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::fprintf(stderr, " %llx", static_cast<unsigned long long>(*across_.board_of(rank_).lost(rank)));
    }
    std::fputc('\n', stderr);
    fail(kExitFault, "a fault", rank_, round);
  }

  void prepare_domains() {
    across_.row = ParcelRow::of(plan_.shape);
    Shape home = plan_.shape;
    home.wire_type = across_.wire;
    // Messages of up to three parcels.
    across_.parcels = ParcelShape::make(room_of(object_), kTopK, across_.row.bytes, home.wire_row_bytes(),
                                        96 + 2 * (across_.row.bytes + kTopK), story_.num_stats());
    const Splits splits(across_.domains, across_.parcels);
    board_ = zeros<uint64_t>(Board::kWords);
    const uint64_t bytes[4] = {splits.outbox_bytes(), splits.inbox_bytes(rank_), splits.returns_bytes(rank_),
                               splits.return_inbox_bytes()};
    std::vector<Line>* memory[4] = {&outbox_, &inbox_, &returns_, &return_inbox_};
    for (uint32_t i = 0; i < 4; ++i) {
      *memory[i] = zeros<Line>(bytes[i] / sizeof(Line));
      table().add_region(table().self, memory[i]->data(), bytes[i], -1, &regions_[i]);
    }
    across_.outbox = outbox_.data()->byte;
    across_.returns = returns_.data()->byte;
    across_.return_inbox = return_inbox_.data()->byte;
    const uint32_t room = room_of(object_);
    own_sums_ = zeros<Line>(room);
    across_.own_sums = own_sums_.data()->byte;
    across_.target_ranks = ranks_.data();
    across_.target_slots = slots_.data();
    const uint32_t sources = across_.domains.sources(rank_, kRanks);
    served_sums_ = zeros<Line>(sources * room);
    across_.served_sums = served_sums_.data()->byte;
    served_ranks_ = served_slots_ = zeros<int32_t>(sources * room * kTopK);
    across_.served_ranks = served_ranks_.data();
    across_.served_slots = served_slots_.data();
    home_rows_ = zeros<int32_t>(room * kRanks);
    across_.home_rows = home_rows_.data();
    across_.sent_rows = sent_rows_;
    across_.sent_table = &sent_table_;
    across_.served_rows = served_rows_;
    across_.joined = joined_;
    across_.handed_on = handed_on_;
    across_.state = &domains_state_;
  }

  uint32_t target_of(const Rank& other, uint32_t region) const {
    uint8_t address[16], description[16];
    uint64_t address_bytes = sizeof(address), description_bytes = sizeof(description);
    uint32_t peer = 0, target = 0;
    other.table().address(other.table().self, address, &address_bytes);
    other.table().describe_region(other.table().self, region, description, &description_bytes);
    table().add_peer(table().self, address, address_bytes, &peer);
    table().add_target(table().self, peer, description, description_bytes, &target);
    return target;
  }

  // A kernel of several blocks: body(exec, scratch) of each in a thread of its own.
  template <class Body>
  void run_blocks(Body body) {
    std::vector<std::thread> threads;
    for (uint32_t block = 0; block < blocks_; ++block) {
      threads.emplace_back([&, block] {
        stress::yield_seed = draws_ + block;
        cpu::Exec exec(block, blocks_);
        DomainsScratch scratch{};
        body(exec, scratch);
      });
    }
    for (std::thread& thread : threads) thread.join();
    draws_ = mix(draws_) | 1;
  }

  void dispatch(uint32_t round) {
    const uint32_t tokens = story_.tokens(round, rank_);
    for (uint32_t i = 0; i < tokens * kTopK; ++i) {
      ids_[i] = story_.id(round, rank_, i);
      weights_[i] = static_cast<float>(i);
    }
    for (uint32_t token = 0; token < tokens; ++token) {
      const uint32_t elements = row_elements(object_);
      for (uint32_t e = 0; e < elements; ++e) rows_[token * elements + e] = story_.row(round, rank_, token, e);
    }
    DispatchCall call{};
    call.topk_ids = ids_;
    call.topk_weights = weights_;
    call.payload[0] = rows_;
    call.access_bytes[0] = 16;
    for (uint32_t i = 0; i < kStats; ++i) stats_[i] = story_.stat(round, rank_, i);
    call.stats = story_.num_stats() != 0 && story_.tells(round, rank_) ? stats_ : nullptr;
    call.num_tokens = tokens;
    call.max_rows = room_of(object_);
    call.ids_access_bytes = 4;
    cut_into_items(call, plan_.shape, 1u << 30, 1, 1, false);
    DispatchScratch of_domain{};
    run_blocks([&](cpu::Exec& exec, DomainsScratch& own) { pack<int32_t>(exec, plan_, across_, call, own); });
    putget::dispatch<int32_t>(exec_, plan_, call, of_domain);
    run_blocks([&](cpu::Exec& exec, DomainsScratch& own) { unpack(exec, plan_, across_, room_of(object_), own); });
    if (state_.head.fault != 0) fail_with_fault(round);
  }

  // Nobody tells of sums while this rank has not given its rows: it goes on at once if somebody has, else in a while.
  void wait_for_early_sums() const {
    constexpr uint64_t kPatienceNs = 30'000'000;
    const uint64_t begun = exec_.now_ns();
    bool told = false;
    while (!told && exec_.now_ns() - begun < kPatienceNs) {
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        if (peer == rank_ || !across_.is_near(plan_, peer)) continue;
        for (uint32_t source = 0; source < kRanks; ++source) {
          const uint64_t back = exec_.peek(across_.board_of(peer).back(source));
          told = told || (flag_epoch(back) == across_.epoch() && flag_value(back) != 0);
        }
      }
      std::this_thread::yield();
    }
  }

  void check_received(uint32_t round) {
    const uint8_t* own = plan_.own();
    for (uint32_t source = 0; source < kRanks; ++source) {
      uint32_t slot = 0;
      for (uint32_t token = 0; token < story_.tokens(round, source); ++token) {
        if (!story_.goes_to(round, source, token, rank_)) continue;
        const uint64_t row = row_index(slot++, source, kRanks);
        const uint32_t elements = row_elements(object_);
        const auto* values = reinterpret_cast<const float*>(own + plan_.layout.payload[0]) + row * elements;
        for (uint32_t e = 0; e < elements; ++e) {
          if (values[e] != story_.row(round, source, token, e)) fail(kExitMismatch, "a wrong row", rank_, round);
        }
        auto* answers = reinterpret_cast<float*>(plan_.own() + plan_.layout.output) + row * kElements;
        for (uint32_t e = 0; e < kElements; ++e) answers[e] = story_.answer(round, source, token, rank_);
      }
      if (num_tokens_[source] != static_cast<int32_t>(slot)) fail(kExitMismatch, "a wrong count", rank_, round);
      const int32_t* told = stats_line(plan_.own(), plan_, source);
      for (uint32_t i = 0; i < story_.num_stats(); ++i) {
        if (told[i] != story_.stat(round, source, i)) fail(kExitMismatch, "a wrong number", rank_, round);
      }
    }
  }

  void combine(uint32_t round) {
    using Wire = SameWire<Float32, 4>;
    CombineCall call{};
    call.out = across_.own_sums;
    call.num_tokens = story_.tokens(round, rank_);
    call.segment_bytes = 1u << 30;
    call.segments_of_row = segments_of_row(plan_.shape, call.segment_bytes);
    call.sending_blocks = 1;
    call.sentinel_sources = sentinel_sources(plan_, call);
    call.rows_access_bytes = 16;
    call.wide_out = 1;
    close_open_round(exec_, plan_, across_, kEndedByCombine);
    CombineScratch of_domain{};
    call.half = Half::kStart;
    putget::combine<Float32, Wire, DynamicTopK>(exec_, plan_, call, of_domain);
    run_blocks([&](cpu::Exec& exec, DomainsScratch& own) {
      CombineScratch of_sums{};
      if (is_quantised()) {
        serve_sources<Float32, Wire, DynamicTopK, true>(exec, plan_, across_, own, of_sums);
      } else {
        serve_sources<Float32, Wire, DynamicTopK, false>(exec, plan_, across_, own, of_sums);
      }
    });
    call.half = Half::kFinish;
    putget::combine<Float32, Wire, DynamicTopK>(exec_, plan_, call, of_domain);
    call.out = out_.data()->byte;
    run_blocks([&](cpu::Exec& exec, DomainsScratch& own) {
      if (is_quantised()) {
        sum_domains<Float32, Wire, true>(exec, plan_, across_, call, own);
      } else {
        sum_domains<Float32, Wire, false>(exec, plan_, across_, call, own);
      }
    });
    if (state_.head.fault != 0) fail_with_fault(round);
    const auto* sums = reinterpret_cast<const float*>(out_.data());
    for (uint32_t token = 0; token < call.num_tokens; ++token) {
      const float want = wanted_sum(round, token);
      for (uint32_t e = 0; e < kElements; ++e) {
        if (sums[token * kElements + e] != want) fail(kExitMismatch, "a wrong sum", rank_, round);
      }
    }
  }

  bool is_quantised() const { return across_.wire != WireType::kSame; }

  // All elements of a row are the same, so each is the largest one of its block.
  float wanted_sum(uint32_t round, uint32_t token) const {
    float want = 0;
    for (uint32_t domain = 0; domain < across_.domains.count(); ++domain) {
      float sum = 0;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const bool counts = across_.domains.domain_of(rank) == domain && story_.goes_to(round, rank_, token, rank);
        if (counts) sum += story_.answer(round, rank_, token, rank);
      }
      const bool comes = is_quantised() && domain != across_.domains.domain_of(rank_) && sum != 0;
      want += comes ? times(Fp8::kMax, block_scale(sum)) : sum;
    }
    return want;
  }

  void release() {
    CombineScratch scratch{};
    close_open_round(exec_, plan_, across_, kEndedByRelease);
    putget::release(exec_, plan_, scratch.wait);
  }

  const Story story_;
  const uint32_t blocks_;
  const uint32_t object_;
  uint64_t draws_ = mix(story_.seed) | 1;
  HeldLink held_;
  Plan plan_;
  DomainsPlan across_;
  proxy::LocalNetwork& network_;
  const uint32_t rank_;
  cpu::Exec exec_;
  std::vector<Line>& symmetric_;  // the workspace's, and the following
  State& state_;
  FaultRecord& fault_;
  std::vector<Line> outbox_, inbox_, returns_, return_inbox_, own_sums_, served_sums_;
  std::vector<Line> out_ = zeros<Line>(kTokens);
  std::vector<uint64_t> board_;
  std::vector<int32_t> table_, near_ranks_, near_slots_, ranks_, slots_, served_ranks_, served_slots_, home_rows_;
  uint32_t sent_rows_[kRanks] = {}, served_rows_[kRanks] = {}, sent_table_ = 0;
  uint32_t joined_[DomainsPlan::kJoins + kRanks] = {};
  uint64_t handed_on_[2 * kRanks + 1] = {};
  DomainsState domains_state_{};
  int32_t num_tokens_[kRanks] = {};
  unsigned long long invalid_ = 0;
  int32_t ids_[kTokens * kTopK] = {};
  float weights_[kTokens * kTopK] = {};
  int32_t stats_[kStats] = {};
  alignas(16) float rows_[kTokens * 2 * kElements] = {};
  uint32_t regions_[4] = {};
  uint32_t inbox_of_[kMaxRanks] = {}, return_inbox_of_[kMaxRanks] = {};
  std::unique_ptr<proxy::Proxy> proxy_;
};

void run(const Options& options) {
  uint8_t domain_of[kRanks];
  RankSet everybody = RankSet::none();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    domain_of[rank] = static_cast<uint8_t>(rank / options.domain_size);
    everybody.insert(rank);
  }
  const Domains domains(domain_of, kRanks, everybody);
  proxy::LocalNetwork network(kRanks, options.seed);
  const Story story{options.seed, options.objects};
  std::vector<std::unique_ptr<Shared>> shared;
  std::vector<std::vector<std::unique_ptr<Rank>>> ranks(kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    shared.push_back(std::make_unique<Shared>(story, rank));
    for (uint32_t object = 0; object < options.objects; ++object) {
      ranks[rank].push_back(std::make_unique<Rank>(story, domains, rank, object, options, *shared.back(), network));
    }
  }
  const auto each = [&](auto body) {
    for (auto& objects : ranks) {
      for (auto& object : objects) body(*object);
    }
  };
  each([&](Rank& object) { object.meet(ranks); });
  each([&](Rank& object) { network.stepper().add(object.proxy()); });
  each([&](Rank& object) {
    while (!object.proxy()->has_begun()) std::this_thread::yield();
  });
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      stress::yield_seed = options.seed * kRanks + rank + 1;
      for (uint32_t round = 1; round <= options.rounds; ++round) {
        ranks[rank][story.object(round)]->play(round, rank == options.late);
      }
      for (auto& object : ranks[rank]) object->end();
    });
  }
  for (std::thread& thread : threads) thread.join();
  each([&](Rank& object) {
    bool rests = false;
    while (!rests) {
      network.stepper().remove(object.proxy());
      rests = object.proxy()->resting() && object.proxy()->quiet();
      if (!rests) network.stepper().add(object.proxy());
    }
  });
}

uint32_t tag(const char* name) {
  const uint32_t value = stress::value_named<Tag>(name);
  if (value != stress::kNoSuchTag) return value;
  std::fprintf(stderr, "there is no such tag\n");
  std::exit(kExitUsage);
}

}  // namespace
}  // namespace putget::across

int main(int count, char** words) {
  putget::across::Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    const char* value = words[i + 1];
    if (name == "--seed") options.seed = std::strtoull(value, nullptr, 10);
    if (name == "--rounds") options.rounds = static_cast<uint32_t>(std::atoi(value));
    if (name == "--domain_size") options.domain_size = static_cast<uint32_t>(std::atoi(value));
    if (name == "--blocks") options.blocks = static_cast<uint32_t>(std::atoi(value));
    if (name == "--quantised") options.quantised = static_cast<uint32_t>(std::atoi(value));
    if (name == "--objects") options.objects = static_cast<uint32_t>(std::atoi(value));
    if (name == "--late") options.late = static_cast<uint32_t>(std::atoi(value));
    if (name == "--weaken") putget::stress::weakened_tag = putget::across::tag(value);
    if (name == "--skip") putget::stress::skipped_tag = putget::across::tag(value);
  }
  putget::across::run(options);
  return 0;
}
