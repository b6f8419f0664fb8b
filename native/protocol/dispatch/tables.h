// Whether ranks route by the same expert_to_rank. A row that its source sends to a rank whose own table gives the
// expert to somebody else finds no expert there, and nobody says so.
//
// Each dispatch leaves a note in every peer's memory: a digest of its table. The next dispatch looks at the notes of
// the last round. That is in the last CTA, by a warp that has nothing to publish, while another one publishes D3 and
// the first CTA waits for peers. Notes order nothing and nobody waits for them.
#pragma once

#include "protocol/round/routing.h"
#include "protocol/round/signal.h"

namespace putget {

// Where a writer's note of a round is: behind its `finished` flag, two that take turns.
PUTGET_PURE uint64_t* table_note(uint8_t* base, const Plan& plan, uint32_t writer, uint32_t round) {
  return flag_line(base, plan.layout.finished, writer) + 1 + (round & 1u);
}

// The digest in a note that nobody has left: the memory has been started, or prepared for a second layout.
constexpr uint32_t kNoTable = 0;

// Hash of (expert, rank). Unequal tables almost never have equal sums. The last steps of MurmurHash3 (Appleby, public
// domain).
PUTGET_PURE uint32_t mixed(uint32_t key) {
  key = (key ^ key >> 16) * 0x85ebca6bu;
  key = (key ^ key >> 13) * 0xc2b2ae35u;
  return key ^ key >> 16;
}

// Tells the peers of this round's table and counts those of the last round that were another one than here, of which
// object it may have been: rounds, and the rows that came from there. One warp calls it, when all threads have kept the
// table and the rank has seen D1.
template <class Exec>
PUTGET_RARE void compare_tables(const Exec& exec, const Plan& plan, const StateHead& head,
                                const int8_t* rank_of_expert) {
  const uint32_t last_round = head.epoch;
  const uint32_t round = last_round + 1;
  // On their way while the digest is made.
  const uint32_t own_last = plan.state->table[last_round & 1u];
  const auto note_of = [&](uint32_t peer) {
    return peer < plan.shape.ep_size ? exec.peek(table_note(plan.own(), plan, peer, last_round)) : 0;  // [N2]
  };
  uint64_t theirs = note_of(exec.lane());
  uint32_t digest = 0;
  PUTGET_ROLLED
  for (uint32_t expert = exec.lane(); expert < table_experts(plan); expert += exec.lanes()) {
    digest += mixed(expert << 8 | static_cast<uint8_t>(rank_of_expert[expert]));
  }
  for (uint32_t step = 1; step < exec.lanes(); step *= 2) digest += exec.of_lane(digest, exec.lane() ^ step);
  if (digest == kNoTable) ++digest;
  if (exec.lane() == 0) plan.state->table[round & 1u] = digest;
  PUTGET_ROLLED
  for (uint32_t peer = exec.lane(); peer < plan.shape.ep_size; peer += exec.lanes()) {
    if (peer != exec.lane()) theirs = note_of(peer);
    if (!head.active.has(peer)) continue;
    exec.note(table_note(plan.base[peer], plan, plan.shape.ep_rank, round), pack_flag(round, digest));  // [N1]
    const uint32_t their_last = flag_epoch(theirs) == last_round ? flag_value(theirs) : kNoTable;
    if (their_last == kNoTable || their_last == own_last) continue;
    exec.add(plan.tables_apart + peer, 1);
    exec.add(plan.tables_apart + plan.shape.ep_size + peer, rows_of(head.left[peer]));
  }
}

}  // namespace putget
