// Moving experts between ranks: a rank that holds an expert puts its bytes into the landing area of the rank that shall
// have it, which looks at them and takes them into a slot later. docs/protocol.md explains the tags.
//
// Orders come from the host, which posts them; kernels find them when they run, and wait for nothing: what is not there
// yet is left to the next kernel. `move` puts and checks, a bounded number of bytes a kernel; `take` writes slots, and
// the tables that say what is in them, when the caller says that this round's experts may change.
//
// A thread of the host may put in place of the kernels, each rank as it likes. Kernels tell it which cells are free,
// look at what it has copied, and do all else.
#pragma once

#include "protocol/landing/plan.h"

namespace putget {

// --- where things are ------------------------------------------------------------------------------------------------

PUTGET_PURE uint32_t cell_of(const LandingPlan& plan, uint32_t arrival) { return (arrival - 1) % plan.cells; }
PUTGET_PURE uint8_t* cell_at(const LandingPlan& plan, uint32_t rank, uint32_t arrival) {
  return plan.base[rank] + plan.begin + cell_of(plan, arrival) * plan.cell_bytes;
}
// The flag that `src` stores into the memory of `dst` when the bytes of an arrival are there.
PUTGET_PURE uint64_t* landed_flag(const LandingPlan& plan, uint32_t dst, uint32_t src, uint32_t arrival) {
  return part_flag(plan.base[dst], plan.flags, src, cell_of(plan, arrival));
}
// The flag that `dst` stores into the memory of every rank when it is done with an arrival's cell.
PUTGET_PURE uint64_t* taken_flag(const LandingPlan& plan, uint32_t rank, uint32_t dst, uint32_t arrival) {
  return part_flag(plan.base[rank], plan.flags, dst, kMaxCells + cell_of(plan, arrival));
}

// Whether order or batch `a` is `b` or comes before it; they are counted modulo 2^32.
PUTGET_PURE bool not_behind(uint32_t a, uint32_t b) { return static_cast<int32_t>(b - a) >= 0; }

// --- bytes -----------------------------------------------------------------------------------------------------------

// The share of one word in the sum of an expert's bytes; `index` is its place. Odd weights: no single word can change
// without the sum.
PUTGET_PURE uint32_t weighed(uint32_t word, uint32_t index) { return word * (2 * index + 1); }

// Copies bytes [begin, end) of a range that begins at `offset` of an expert, all threads of the grid together; returns
// the calling thread's share of the sum. `to` may be null: bytes are only looked at.
template <class Access, class Exec>
PUTGET_TEXT uint32_t copy_range(Exec& exec, const uint8_t* from, uint8_t* to, uint64_t begin, uint64_t end,
                                uint64_t offset) {
  constexpr uint32_t kWords = sizeof(Access) / sizeof(uint32_t);
  constexpr uint32_t kInFlight = 8;  // accesses of a thread
  const uint64_t step = uint64_t{exec.blocks()} * exec.threads() * sizeof(Access);
  uint32_t sum = 0;
  PUTGET_ROLLED
  for (uint64_t at = begin + (uint64_t{exec.block()} * exec.threads() + exec.thread()) * sizeof(Access); at < end;
       at += kInFlight * step) {
    union {
      Access access;
      uint32_t word[kWords];
    } both[kInFlight];
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      both[i].access = at + i * step < end ? *reinterpret_cast<const Access*>(from + at + i * step) : Access{};
    }
    PUTGET_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (at + i * step >= end) break;
      if (to != nullptr) exec.put(reinterpret_cast<Access*>(to + at + i * step), both[i].access);  // [L1]
      PUTGET_UNROLL
      for (uint32_t w = 0; w < kWords; ++w) {
        sum += weighed(both[i].word[w], static_cast<uint32_t>((offset + at + i * step) / sizeof(uint32_t)) + w);
      }
    }
  }
  return sum;
}

PUTGET_PURE bool is_wide(const void* first, const void* second, uint64_t bytes) {
  return ((reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second) | bytes) & 15) == 0;
}

// The calling thread's share of the sum of bytes [first, last) of a part, which begins at `from`.
template <class Exec>
PUTGET_TEXT uint32_t look_at_range(Exec& exec, const uint8_t* from, uint64_t first, uint64_t last,
                                   const BlobPart& part) {
  if (is_wide(from, from, part.slot_bytes)) {
    return copy_range<typename Exec::Access16>(exec, from, nullptr, first, last, part.offset);
  }
  return copy_range<uint32_t>(exec, from, nullptr, first, last, part.offset);
}

// Bytes [begin, end) of an expert as it travels, both multiples of 16: from a slot into a cell, or from a cell into a
// slot.
template <class Exec>
PUTGET_TEXT uint32_t copy_blob(Exec& exec, const LandingPlan& plan, const SlotBytes& slot, uint8_t* cell, bool into,
                               uint64_t begin, uint64_t end) {
  using Wide = typename Exec::Access16;
  uint32_t sum = 0;
  PUTGET_ROLLED
  for (uint32_t p = slot.first_part; p < slot.end_part; ++p) {
    const BlobPart part = plan.parts[p];
    if (end <= part.offset || begin >= part.offset + part.slot_bytes) continue;
    const uint64_t first = begin > part.offset ? begin - part.offset : 0;
    const uint64_t last = end - part.offset < part.slot_bytes ? end - part.offset : part.slot_bytes;
    uint8_t* in_slot = part.slots + slot.slot * part.slot_bytes;
    uint8_t* in_cell = cell + part.offset;
    const uint8_t* from = into ? in_slot : in_cell;
    uint8_t* to = into ? in_cell : in_slot;
    if (is_wide(from, to, part.slot_bytes)) {
      sum += copy_range<Wide>(exec, from, to, first, last, part.offset);
    } else {
      sum += copy_range<uint32_t>(exec, from, to, first, last, part.offset);
    }
  }
  return sum;
}

// The sum of such bytes in a cell, where they have come.
template <class Exec>
PUTGET_TEXT uint32_t look_at_blob(Exec& exec, const LandingPlan& plan, const SlotBytes& slot, const uint8_t* cell,
                                  uint64_t begin, uint64_t end) {
  uint32_t sum = 0;
  PUTGET_ROLLED
  for (uint32_t p = slot.first_part; p < slot.end_part; ++p) {
    const BlobPart part = plan.parts[p];
    if (end <= part.offset || begin >= part.offset + part.slot_bytes) continue;
    const uint64_t first = begin > part.offset ? begin - part.offset : 0;
    const uint64_t last = end - part.offset < part.slot_bytes ? end - part.offset : part.slot_bytes;
    sum += look_at_range(exec, cell + part.offset, first, last, part);  // [L4]
  }
  return sum;
}

// The sum of an expert in its slot. All CTAs of a kernel.
template <class Exec>
PUTGET_TEXT uint32_t sum_of_slot(Exec& exec, const LandingPlan& plan, const SlotBytes& slot) {
  uint32_t sum = 0;
  PUTGET_ROLLED
  for (uint32_t p = slot.first_part; p < slot.end_part; ++p) {
    const BlobPart part = plan.parts[p];
    sum += look_at_range(exec, part.slots + slot.slot * part.slot_bytes, 0, part.slot_bytes, part);
  }
  return sum;
}

// --- orders ----------------------------------------------------------------------------------------------------------

// The host posts the next batch: its orders, and where they end, are there. The host calls it.
template <class Exec>
PUTGET_TEXT void post_batch(Exec& exec, LandingOrders& orders, uint32_t batch) {
  exec.template publish<Tag::H1>(&orders.posted, pack_flag(batch, 0));
}

// How many orders are done, of one kind. The host calls it, before it writes over those.
template <class Exec>
PUTGET_TEXT uint32_t orders_done(Exec& exec, const uint64_t& progress) {
  return flag_epoch(exec.template observe<Tag::H4>(&progress));
}

template <class Exec>
PUTGET_TEXT bool cell_is_free(Exec& exec, const LandingPlan& plan, const PutOrder& order) {
  const uint32_t before = order.arrival - plan.cells;  // of the same cell
  const uint64_t* flag = taken_flag(plan, plan.ep_rank, order.dst, order.arrival);
  const bool is_first = order.arrival - plan.first <= plan.cells;
  return is_first || flag_epoch(exec.template observe<Tag::L6>(flag)) == before;
}

// How many experts in a row the next kernel can work on: `can` are known already, `left` are posted.
PUTGET_PURE bool is_enough(const LandingPlan& plan, uint32_t can, uint32_t left, uint64_t begin, uint64_t most_bytes) {
  return can == left || can == kAhead || can * plan.blob_bytes >= begin + most_bytes;
}

// Which batch the next table belongs to.
PUTGET_PURE void note_next_table(const LandingPlan& plan, LandingState& state) {
  if (state.written != state.end.tables) state.table_batch = plan.orders->table[state.written % kOrders].batch;
}

// A look at what the host has posted: by one thread of the first CTA, which has the value when it notes it, before J4.
// The word lies behind a bus: so it is on its way beside all that a kernel does.
template <class Exec>
PUTGET_TEXT uint64_t look_at_posted(Exec& exec, const LandingPlan& plan) {
  const bool looks = exec.block() == 0 && exec.thread() == 0;
  return looks ? exec.template observe_ahead<Tag::H2>(&plan.orders->posted) : 0;
}
template <class Exec>
PUTGET_TEXT void note_posted(const Exec& exec, const LandingPlan& plan, uint64_t posted) {
  if (exec.block() == 0 && exec.thread() == 0) plan.state->posted = flag_epoch(posted);
}

// The next kernel's share, if it moves as many bytes. One thread of the last CTA.
template <class Exec>
PUTGET_TEXT void look_ahead(Exec& exec, const LandingPlan& plan, LandingState& state, uint64_t most_bytes) {
  if (state.posted != state.batch) {
    const uint32_t batch = flag_epoch(exec.template observe<Tag::H2>(&plan.orders->posted));
    state.batch = batch;
    state.end = plan.orders->end[batch % kOrders];
    note_next_table(plan, state);
    exec.template publish<Tag::H3>(&plan.progress->batch, pack_flag(batch, 0));
  }
  const uint64_t most_put = plan.by_thread != 0 ? kAhead * plan.blob_bytes : most_bytes;
  while (!is_enough(plan, state.can_put, state.end.puts - state.put, state.put_bytes, most_put)) {
    const PutOrder order = plan.orders->put[(state.put + state.can_put) % kOrders];
    if (!cell_is_free(exec, plan, order)) break;
    state.ahead_put[state.can_put++] = order;
  }
  if (plan.by_thread != 0 && state.may_copy != state.put + state.can_put) {
    state.may_copy = state.put + state.can_put;
    exec.template publish<Tag::H7>(&plan.progress->may_copy, pack_flag(state.may_copy, 0));
  }
  while (!is_enough(plan, state.can_check, state.end.takes - state.checked, state.check_bytes, most_bytes)) {
    const TakeOrder order = plan.orders->take[(state.checked + state.can_check) % kOrders];
    const uint64_t flag = exec.template observe<Tag::L3>(landed_flag(plan, plan.ep_rank, order.src, order.arrival));
    if (flag_epoch(flag) != order.arrival) break;
    state.ahead_take[state.can_check] = order;
    state.landed_sum[state.can_check++] = flag_value(flag);
  }
  *plan.landed = static_cast<int32_t>(
      state.checked == state.end.takes ? state.batch : plan.orders->take[state.checked % kOrders].batch - 1);
}

// The first `count` have been used.
template <class Type>
PUTGET_PURE void drop(Type (&values)[kAhead], uint32_t count) {
  for (uint32_t i = 0; i < kAhead; ++i) values[i] = i + count < kAhead ? values[i + count] : Type{};
}

// The next `count` puts are done: tells each rank that shall have such an expert.
template <class Exec, class SumOf>
PUTGET_TEXT void tell_of_puts(Exec& exec, const LandingPlan& plan, LandingState& state, uint32_t count, SumOf sum_of) {
  if (count == 0) return;
  for (uint32_t i = 0; i < count; ++i) {
    const PutOrder& order = state.ahead_put[i];
    uint64_t* flag = landed_flag(plan, order.dst, plan.ep_rank, order.arrival);
    exec.template publish<Tag::L2>(flag, pack_flag(order.arrival, sum_of(i)));
  }
  state.put += count;
  state.can_put -= count;
  drop(state.ahead_put, count);
  exec.template publish<Tag::H3>(&plan.progress->put, pack_flag(state.put, 0));
}

// Ends this kernel's part of the puts: it tells of each whose last bytes it put.
template <class Exec>
PUTGET_TEXT void pass_put(Exec& exec, const LandingPlan& plan, LandingState& state, uint64_t end) {
  state.put_bytes = end;
  if (end < plan.blob_bytes) return;
  const auto count = static_cast<uint32_t>(end / plan.blob_bytes);
  state.put_bytes = end - count * plan.blob_bytes;
  tell_of_puts(exec, plan, state, count, [&](uint32_t i) { return state.put_sum[i]; });
  drop(state.put_sum, count);
}

// The same for what the thread has copied. Where nothing can have been, it reads nothing: that takes a microsecond.
template <class Exec>
PUTGET_TEXT void pass_copied(Exec& exec, const LandingPlan& plan, LandingState& state) {
  if (state.put == state.may_copy) return;
  const uint32_t first = state.put;
  const uint32_t end = flag_epoch(exec.template observe<Tag::H6>(&plan.orders->copied));
  const auto sum_of = [&](uint32_t i) { return plan.orders->copied_sum[(first + i) % kOrders]; };
  tell_of_puts(exec, plan, state, end - first, sum_of);
}

// The thread's look: if the cell of the next put is free, `copy` puts all of its bytes, and returns their sum. `copied`
// counts. Returns whether there was one. The thread calls it.
template <class Exec, class Copy>
PUTGET_TEXT bool copy_next(Exec& exec, LandingOrders& orders, const LandingProgress& progress, uint32_t& copied,
                           Copy copy) {
  const uint32_t may = flag_epoch(exec.template observe<Tag::H8>(&progress.may_copy));
  if (may == copied) return false;
  orders.copied_sum[copied % kOrders] = copy(orders.put[copied % kOrders]);  // [L1]
  ++copied;
  exec.template publish<Tag::H5>(&orders.copied, pack_flag(copied, 0));
  return true;
}

template <class Exec>
PUTGET_TEXT void pass_check(Exec& exec, const LandingPlan& plan, LandingState& state, uint64_t end) {
  state.check_bytes = end;
  if (end < plan.blob_bytes) return;
  const auto count = static_cast<uint32_t>(end / plan.blob_bytes);
  state.check_bytes = end - count * plan.blob_bytes;
  for (uint32_t i = 0; i < count; ++i) {
    if (state.check_sum[i] != state.landed_sum[i]) {
      state.wrong = 1;
      exec.template publish<Tag::H3>(&plan.progress->wrong, pack_flag(state.checked + 1, 0));
      return;
    }
    state.to_take[state.checked % kMaxCells] = state.ahead_take[i];
    ++state.checked;
  }
  state.can_check -= count;
  drop(state.ahead_take, count);
  drop(state.check_sum, count);
  drop(state.landed_sum, count);
}

// Experts lie one behind the other here: where a share ends that begins in the first of `can`.
PUTGET_PURE uint64_t end_of_share(uint64_t begin, uint64_t most_bytes, uint64_t can, uint64_t blob_bytes) {
  if (can == 0) return begin;
  return can * blob_bytes - begin < most_bytes ? can * blob_bytes : begin + most_bytes;
}

// One kernel's moves: the ends of its shares. All CTAs find the same: the state changes behind J4.
struct MoveShare {
  uint64_t put_end;
  uint64_t check_end;
};

// Adds the shares of the lanes of a warp to a sum, which calls it together.
template <class Exec>
PUTGET_TEXT void add_sum(Exec& exec, uint32_t* to, uint32_t share) {
  for (uint32_t step = 1; step < exec.lanes(); step *= 2) share += exec.of_lane(share, exec.lane() ^ step);
  if (exec.lane() == 0 && share != 0) exec.add(to, share);
}

// Puts up to most_bytes of the next orders, a multiple of 16, and looks at as many that have come. All CTAs of a
// kernel.
template <class Exec>
PUTGET_TEXT MoveShare move_share(Exec& exec, const LandingPlan& plan, uint64_t most_bytes) {
  LandingState& state = *plan.state;
  const uint64_t blob = plan.blob_bytes;
  const uint32_t can_put = plan.by_thread == 0 ? state.can_put : 0;
  const uint32_t can_check = state.wrong == 0 ? state.can_check : 0;
  const MoveShare share{end_of_share(state.put_bytes, most_bytes, can_put, blob),
                        end_of_share(state.check_bytes, most_bytes, can_check, blob)};
  uint64_t at = state.put_bytes;
  PUTGET_ROLLED
  for (uint32_t i = 0; at < share.put_end; ++i) {
    const PutOrder order = state.ahead_put[i];
    const uint64_t end = share.put_end < (i + 1) * blob ? share.put_end : (i + 1) * blob;
    uint8_t* cell = cell_at(plan, order.dst, order.arrival);
    add_sum(exec, &state.put_sum[i], copy_blob(exec, plan, order.from, cell, true, at - i * blob, end - i * blob));
    at = end;
  }
  at = state.check_bytes;
  PUTGET_ROLLED
  for (uint32_t i = 0; at < share.check_end; ++i) {
    const TakeOrder order = state.ahead_take[i];
    const uint64_t end = share.check_end < (i + 1) * blob ? share.check_end : (i + 1) * blob;
    const uint8_t* cell = cell_at(plan, plan.ep_rank, order.arrival);
    add_sum(exec, &state.check_sum[i], look_at_blob(exec, plan, order.to, cell, at - i * blob, end - i * blob));
    at = end;
  }
  return share;
}

// Notes and tells what has been moved, and looks what the next kernel can do. One thread of the last CTA.
template <class Exec>
PUTGET_TEXT void pass_move(Exec& exec, const LandingPlan& plan, const MoveShare& share, uint64_t most_bytes) {
  LandingState& state = *plan.state;
  state.joined = 0;
  if (plan.by_thread != 0) {
    pass_copied(exec, plan, state);
  } else {
    pass_put(exec, plan, state, share.put_end);
  }
  if (state.wrong == 0) pass_check(exec, plan, state, share.check_end);
  look_ahead(exec, plan, state, most_bytes);
}

// The kernel that only moves; it waits for nothing. All CTAs.
template <class Exec>
PUTGET_TEXT void move_experts(Exec& exec, const LandingPlan& plan, uint64_t most_bytes, LandingScratch& scratch) {
  exec.wait_for_earlier_work();
  const uint64_t posted = look_at_posted(exec, plan);
  const MoveShare share = move_share(exec, plan, most_bytes);
  note_posted(exec, plan, posted);
  if (!exec.template last_to_arrive<Join::J4>(&plan.state->joined, &scratch.is_last) || exec.thread() != 0) return;
  pass_move(exec, plan, share, most_bytes);
}

// Writes the tables of batches up to `last`; returns where their orders end. All CTAs of a kernel.
template <class Exec>
PUTGET_TEXT uint32_t write_tables(Exec& exec, const LandingPlan& plan, uint32_t last) {
  const LandingState& state = *plan.state;
  const uint64_t step = uint64_t{exec.blocks()} * exec.threads();
  uint32_t end = state.written;
  if (end == state.end.tables || !not_behind(state.table_batch, last)) return end;
  PUTGET_ROLLED
  for (; end != state.end.tables; ++end) {
    const TableOrder order = plan.orders->table[end % kOrders];
    if (!not_behind(order.batch, last)) break;
    const Table table = plan.tables[order.table];
    for (uint64_t i = uint64_t{exec.block()} * exec.threads() + exec.thread(); i < table.num_words; i += step) {
      table.words[i] = table.next[i];
    }
  }
  return end;
}

// Where the orders end that one kernel takes.
struct TakeShare {
  uint32_t end;
  uint32_t end_tables;
};

// Takes what has come of the batches up to `last` into its slots, and writes their tables. The caller sees to it that
// the slots are not in use. All CTAs of a kernel.
template <class Exec>
PUTGET_TEXT TakeShare take_share(Exec& exec, const LandingPlan& plan, uint32_t last) {
  const LandingState& state = *plan.state;
  uint32_t end = state.taken;
  PUTGET_ROLLED
  for (; end != state.checked; ++end) {
    const TakeOrder order = state.to_take[end % kMaxCells];
    if (!not_behind(order.batch, last)) break;
    uint8_t* cell = cell_at(plan, plan.ep_rank, order.arrival);
    copy_blob(exec, plan, order.to, cell, false, 0, plan.blob_bytes);  // [L4]
  }
  return {end, write_tables(exec, plan, last)};
}

// Tells the host and the sources what has been taken; nothing, where that is nothing: a store to the host takes longer
// than the rest of an idle kernel. One thread of the last CTA.
template <class Exec>
PUTGET_TEXT void pass_take(Exec& exec, const LandingPlan& plan, uint32_t last, const TakeShare& share) {
  LandingState& state = *plan.state;
  state.joined = 0;
  const bool takes = state.taken != share.end;
  PUTGET_ROLLED
  for (; state.taken != share.end; ++state.taken) {
    const TakeOrder order = state.to_take[state.taken % kMaxCells];
    for (uint32_t rank = 0; rank < plan.ep_size; ++rank) {
      if (!plan.active->has(rank)) continue;
      uint64_t* flag = taken_flag(plan, rank, plan.ep_rank, order.arrival);
      exec.template publish<Tag::L5>(flag, pack_flag(order.arrival, 0));
    }
  }
  if (takes) exec.template publish<Tag::H3>(&plan.progress->taken, pack_flag(state.taken, 0));
  if (state.written != share.end_tables) {
    state.written = share.end_tables;
    note_next_table(plan, state);
    exec.template publish<Tag::H3>(&plan.progress->written, pack_flag(share.end_tables, 0));
  }
  if (state.agreed != last && not_behind(state.agreed, last)) {
    state.agreed = last;
    exec.template publish<Tag::H3>(&plan.progress->agreed, pack_flag(last, 0));
  }
}

// The kernel that only takes, up to *batch. All CTAs.
template <class Exec>
PUTGET_TEXT void take_experts(Exec& exec, const LandingPlan& plan, const int32_t* batch, LandingScratch& scratch) {
  exec.wait_for_earlier_work();
  const auto last = static_cast<uint32_t>(*batch);
  const TakeShare share = take_share(exec, plan, last);
  if (!exec.template last_to_arrive<Join::J4>(&plan.state->joined, &scratch.is_last) || exec.thread() != 0) return;
  pass_take(exec, plan, last, share);
}

}  // namespace putget
