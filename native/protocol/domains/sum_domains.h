// The finish half of combine: adds up what all domains have for this rank.
//
// Each domain has summed its rows of a token (serve.h; the own one by its own combine), and rounded that to the
// output's type. The token's rank adds these rows in float32, in the order of domains, and rounds once. So the bits
// depend on the routing and on which ranks are a domain, and not on timing; nor on the token's rank, unless the sums of
// other domains are quantised. CTAs share the rows; the first one waits, and hands on what it has seen.
// docs/protocol/domains.md explains the tags.
#pragma once

#include "protocol/combine/sentinel_sum.h"
#include "protocol/domains/waits.h"

namespace putget {

constexpr uint32_t kNotSeen = ~0u;  // no value of a word

// The part that has not come, and the rank that holds it up or has released the round.
template <class Exec>
PUTGET_RARE void report_no_returns(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch,
                                   const DomainsScratch& scratch) {
  RankSet missing = RankSet::none();
  for (uint32_t domain = 0; domain < across.domains.count(); ++domain) {
    if (ended_by(scratch.value[domain], kEndedByRelease)) {
      const uint32_t agent = across.domains.agent(plan.shape.ep_rank, domain);
      report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, epoch, 0, 0, agent);
      return;
    }
    if (scratch.value[domain] == kNotSeen) add_missing_of(exec, plan, across, domain, missing);
  }
  if (!report_lost<Tag::X9>(exec, plan, across, Phase::kCombine, epoch)) {
    report_timeout(exec, plan, Phase::kCombine, epoch, missing);
  }
}

// Waits for the sums of the domains that took rows, each thread for some. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_TEXT bool await_returns(Exec& exec, const Plan& plan, const DomainsPlan& across, uint32_t epoch,
                               DomainsScratch& scratch) {
  const Domains& domains = across.domains;
  const Board board = across.board_of(plan.shape.ep_rank);
  Patience patience;
  bool well = true;
  PUTGET_ROLLED
  for (uint32_t domain = exec.thread(); domain < domains.count(); domain += exec.threads()) {
    scratch.value[domain] = kEndedByCombine;
    if (across.sent_rows[domain] == 0) continue;
    uint64_t seen = 0;
    const bool came = await_shared<Tag::X9>(exec, plan, across, board.returned(domain), across.returned_here(domain),
                                            exec.block() == 0, epoch, patience, seen);
    scratch.value[domain] = came ? flag_value(seen) : kNotSeen;
    well = well && came && !ended_by(flag_value(seen), kEndedByRelease);
  }
  if (!exec.any(!well)) return true;
  if (exec.thread() == 0) report_no_returns(exec, plan, across, epoch, scratch);
  return false;
}

// Where each domain's sums begin, into scratch.sums. A block barrier must follow.
template <class Exec>
PUTGET_TEXT void look_up_sums(const Exec& exec, const Plan& plan, const DomainsPlan& across, DomainsScratch& scratch) {
  const Splits splits(across.domains, across.parcels);
  const uint32_t own = across.domains.domain_of(plan.shape.ep_rank);
  PUTGET_ROLLED
  for (uint32_t domain = exec.thread(); domain < across.domains.count(); domain += exec.threads()) {
    scratch.sums[domain] =
        domain == own ? nullptr : across.return_inbox + splits.return_inbox(plan.shape.ep_rank, domain);
  }
}

// A token's row of one domain's sums; null if that domain took none.
PUTGET_TEXT const uint8_t* domain_sum(const Plan& plan, const DomainsPlan& across, uint32_t token, uint32_t domain,
                                      const DomainsScratch& scratch) {
  const uint8_t* sums = scratch.sums[domain];
  if (sums == nullptr) return across.own_sums + uint64_t{token} * plan.shape.output_row_bytes();
  const int32_t row = across.home_rows[uint64_t{token} * across.domains.count() + domain];
  return row < 0 ? nullptr : sums + uint64_t{static_cast<uint32_t>(row)} * across.parcels.return_row_bytes;
}

// A pack of a domain's sum as it lies here. Zeros where `row` is null.
template <class Codec, uint32_t kElements>
struct SumAsWritten {
  Pack<Codec, kElements> raw;

  template <class Exec>
  PUTGET_TEXT void load(Exec& exec, const Plan&, const uint8_t* row, uint32_t pack) {
    raw = exec.get_or_zero(reinterpret_cast<const Pack<Codec, kElements>*>(row), pack);  // [X9]
  }
  template <class Exec>
  PUTGET_TEXT Sums<kElements> widen(Exec&) const {
    return putget::widen(raw);
  }
};

// The same of a sum that came quantised.
template <uint32_t kElements>
struct SumQuantised {
  Pack<Fp8, kElements> raw;
  float scale;

  template <class Exec>
  PUTGET_TEXT void load(Exec& exec, const Plan& plan, const uint8_t* row, uint32_t pack) {
    raw = exec.get_or_zero(reinterpret_cast<const Pack<Fp8, kElements>*>(row), pack);  // [X9]
    const uint8_t* scales = row == nullptr ? nullptr : row + plan.shape.scales_offset();
    scale = exec.get_or_zero(reinterpret_cast<const float*>(scales), pack * kElements / kScaleBlock);
  }
  template <class Exec>
  PUTGET_TEXT Sums<kElements> widen(Exec& exec) const {
    if constexpr (kElements % sizeof(uint32_t) == 0) {
      return Fp8Wire::widen(exec, raw, scale);
    } else {
      Sums<kElements> sums = putget::widen(raw);
      for (uint32_t e = 0; e < kElements; ++e) sums.value[e] = times(sums.value[e], scale);
      return sums;
    }
  }
};

// Adds packs of one domain's row to the sums, which begin with those of the first domain.
template <class Part, uint32_t kTogether, uint32_t kElements, class Exec>
PUTGET_TEXT void add_domain(Exec& exec, const Plan& plan, const uint8_t* row, uint32_t begin, uint32_t end,
                            bool is_first, Sums<kElements> (&sum)[kTogether]) {
  Part part[kTogether];
  PUTGET_UNROLL
  for (uint32_t i = 0; i < kTogether; ++i) {
    const uint32_t pack = begin + i * exec.lanes();
    part[i].load(exec, plan, pack < end ? row : nullptr, pack);
  }
  PUTGET_UNROLL
  for (uint32_t i = 0; i < kTogether; ++i) {
    if (is_first) {
      sum[i] = part[i].widen(exec);
    } else {
      sum[i].add(part[i].widen(exec));
    }
  }
}

// Adds the domains' rows of a segment of a token, so many packs of each lane at once.
template <class Codec, class Wire, bool kQuantised, class Exec>
PUTGET_TEXT void add_segment(Exec& exec, const Plan& plan, const DomainsPlan& across, const CombineCall& call,
                             uint32_t token, uint32_t first, uint32_t end, const DomainsScratch& scratch) {
  constexpr uint32_t kTogether = 4;
  using Row = Pack<Codec, Wire::kElements>;
  const uint64_t out = uint64_t{token} * (plan.shape.output_elements / Wire::kElements);
  PUTGET_ROLLED
  for (uint32_t begin = first + exec.lane(); begin < end; begin += kTogether * exec.lanes()) {
    Sums<Wire::kElements> sum[kTogether] = {};
    PUTGET_ROLLED
    for (uint32_t domain = 0; domain < across.domains.count(); ++domain) {
      const uint8_t* row = domain_sum(plan, across, token, domain, scratch);
      if (kQuantised && scratch.sums[domain] != nullptr) {
        add_domain<SumQuantised<Wire::kElements>>(exec, plan, row, begin, end, domain == 0, sum);
      } else {
        add_domain<SumAsWritten<Codec, Wire::kElements>>(exec, plan, row, begin, end, domain == 0, sum);
      }
    }
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kTogether; ++i) {
      const uint32_t pack = begin + i * exec.lanes();
      if (pack >= end) break;
      if (call.addend != nullptr) sum[i].add(widen(reinterpret_cast<const Row*>(call.addend)[out + pack]));
      Row narrowed;
      exec.template narrow<Codec>(sum[i].value, narrowed);
      reinterpret_cast<Row*>(call.out)[out + pack] = narrowed;
    }
  }
}

// Adds the domains' rows of this rank's tokens.
template <class Codec, class Wire, bool kQuantised, class Exec>
PUTGET_TEXT void add_domains(Exec& exec, const Plan& plan, const DomainsPlan& across, const CombineCall& call,
                             const DomainsScratch& scratch) {
  constexpr uint32_t kSegment = 4 * Exec::kLanes;  // packs
  const uint32_t packs = plan.shape.output_elements / Wire::kElements;
  const uint32_t in_segment = Exec::kLanes == 1 ? packs : kSegment;
  const uint32_t segments = (packs + in_segment - 1) / in_segment;
  const uint32_t step = exec.blocks() * exec.warps();
  PUTGET_ROLLED
  for (uint32_t item = exec.block() * exec.warps() + exec.warp(); item < call.num_tokens * segments; item += step) {
    const uint32_t token = item / segments;
    const uint32_t first = (item - token * segments) * in_segment;
    const uint32_t end = first + in_segment < packs ? first + in_segment : packs;
    add_segment<Codec, Wire, kQuantised>(exec, plan, across, call, token, first, end, scratch);
  }
}

// After the domain's combine has left its sums in own_sums.
template <class Codec, class Wire, bool kQuantised, class Exec>
PUTGET_TEXT void sum_domains(Exec& exec, const Plan& plan, const DomainsPlan& across, const CombineCall& call,
                             DomainsScratch& scratch) {
  if (has_fault(exec, plan)) return;
  const uint32_t epoch = across.epoch();
  look_up_sums(exec, plan, across, scratch);
  if (!await_returns(exec, plan, across, epoch, scratch)) return;
  const bool looks = exec.block() == 0 && exec.thread() == 0;
  const uint64_t sent = looks ? look_at_outbox(exec, plan, across) : 0;
  add_domains<Codec, Wire, kQuantised>(exec, plan, across, call, scratch);
  if (looks) note_outbox(across, sent);
}

}  // namespace putget
