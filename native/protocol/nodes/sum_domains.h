// The finish half of combine: adds up what all domains have for this rank.
//
// Each domain has summed its rows of a token (serve.h; the own one by its own combine), and rounded that to the
// output's type. The token's rank adds these rows in float32, in the order of domains, and rounds once. So the bits
// depend on the routing and on which ranks are a domain, and neither on timing nor on the token's rank. One CTA runs
// it. docs/protocol/nodes.md explains the tags.
#pragma once

#include "protocol/combine/reduce.h"
#include "protocol/nodes/waits.h"

namespace putget {

// Waits for the sums of the domains that took rows. Ends with a block barrier; false: a fault.
template <class Exec>
PUTGET_TEXT bool await_returns(Exec& exec, const Plan& plan, const NodesPlan& nodes, uint32_t epoch,
                               NodesScratch& scratch) {
  const Domains& domains = nodes.domains;
  const Board board = nodes.board_of(plan.shape.ep_rank);
  Patience patience;
  RankSet missing = RankSet::none();
  PUTGET_ROLLED
  for (uint32_t domain = 0; domain < domains.count(); ++domain) {
    if (nodes.sent_rows[domain] == 0) continue;
    if (exec.thread() == 0) {
      await_word<Tag::X9>(exec, plan, nodes, board.returned(domain), epoch, patience, scratch);
    }
    exec.sync();
    const bool came = scratch.well != 0;
    const bool released = came && ended_by(flag_value(scratch.seen), kEndedByRelease);
    exec.sync();
    if (released) {
      const uint32_t agent = domains.agent(plan.shape.ep_rank, domain);
      if (exec.thread() == 0) {
        report_misuse(exec, plan, Phase::kCombine, Misuse::kPeerReleased, epoch, 0, 0, agent);
      }
      return false;
    }
    if (!came) add_missing_of(exec, plan, nodes, domain, missing);
  }
  if (missing.empty()) return true;
  if (exec.thread() == 0 && !report_lost<Tag::X9>(exec, plan, nodes, Phase::kCombine, epoch)) {
    report_timeout(exec, plan, Phase::kCombine, epoch, missing);
  }
  return false;
}

// A token's row of one domain's sums; null if that domain took none.
PUTGET_TEXT const uint8_t* domain_sum(const Plan& plan, const NodesPlan& nodes, uint32_t token, uint32_t domain) {
  const Domains& domains = nodes.domains;
  if (domain == domains.domain_of(plan.shape.ep_rank)) {
    return nodes.own_sums + uint64_t{token} * plan.shape.output_row_bytes();
  }
  const int32_t row = nodes.home_rows[uint64_t{token} * domains.count() + domain];
  if (row < 0) return nullptr;
  const uint64_t split = Splits(domains, nodes.parcel).landing(plan.shape.ep_rank, domain);
  return nodes.landing + split + uint64_t{static_cast<uint32_t>(row)} * nodes.parcel.return_row_bytes;
}

// Adds the domains' rows of this rank's tokens.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void add_domains(Exec& exec, const Plan& plan, const NodesPlan& nodes, const CombineCall& call) {
  using Row = Pack<Codec, Wire::kElements>;
  const uint32_t packs = plan.shape.output_elements / Wire::kElements;
  PUTGET_ROLLED
  for (uint32_t token = exec.warp(); token < call.num_tokens; token += exec.warps()) {
    const uint64_t first = uint64_t{token} * packs;
    for (uint32_t pack = exec.lane(); pack < packs; pack += exec.lanes()) {
      const auto sum_of = [&](uint32_t domain) {
        const auto* row = reinterpret_cast<const Row*>(domain_sum(plan, nodes, token, domain));
        return widen(exec.get_or_zero(row, pack));  // [X9]
      };
      Sums<Wire::kElements> sum = sum_of(0);
      PUTGET_ROLLED
      for (uint32_t domain = 1; domain < nodes.domains.count(); ++domain) sum.add(sum_of(domain));
      if (call.addend != nullptr) sum.add(widen(reinterpret_cast<const Row*>(call.addend)[first + pack]));
      Row out;
      exec.template narrow<Codec>(sum.value, out);
      reinterpret_cast<Row*>(call.out)[first + pack] = out;
    }
  }
}

// One CTA calls it, after the domain's combine has left its sums in own_sums.
template <class Codec, class Wire, class Exec>
PUTGET_TEXT void sum_domains(Exec& exec, const Plan& plan, const NodesPlan& nodes, const CombineCall& call,
                             NodesScratch& scratch) {
  if (plan.state->head.fault != 0) return;
  const uint32_t epoch = plan.state->head.epoch;
  if (await_returns(exec, plan, nodes, epoch, scratch)) add_domains<Codec, Wire>(exec, plan, nodes, call);
}

}  // namespace putget
