// Data of the mover of experts: orders, their outcomes, and places (landing.h).
#pragma once

#include "protocol/round/signal.h"

namespace putget {

constexpr uint32_t kMaxCells = kMaxParts / 2;  // of a landing area: experts that it has room for
constexpr uint32_t kAhead = 8;                 // experts that one kernel puts, or looks at, at most
// Orders of each kind that are posted and not done, at most; and batches that kernels have not seen.
#if defined(PUTGET_STRESS)
constexpr uint32_t kOrders = 4;
#else
constexpr uint32_t kOrders = 256;
#endif

// One tensor's part of an expert: slot s has the bytes at slots + s * slot_bytes, a multiple of 4 at a multiple of 4;
// they travel at `offset` of the cell, a multiple of 16.
struct BlobPart {
  uint8_t* slots;
  uint64_t slot_bytes;
  uint64_t offset;
};

// Parts [first_part, end_part) of slot `slot`.
struct SlotBytes {
  uint32_t first_part;
  uint32_t end_part;
  uint32_t slot;
};

// Arrivals of a rank are numbered: all ranks know who puts which. The n-th one, from 1 on, has cell (n - 1) % cells.
struct PutOrder {
  SlotBytes from;
  uint32_t dst;
  uint32_t arrival;
};

struct TakeOrder {
  SlotBytes to;
  uint32_t src;
  uint32_t arrival;
  uint32_t batch;  // it is taken together with all orders of this batch
};

// A table gets the words that lie ready for it, together with all orders of this batch.
struct TableOrder {
  uint32_t table;
  uint32_t batch;
};

// Orders of the batches up to this one end here, counted from the first order on.
struct BatchEnd {
  uint32_t puts;
  uint32_t takes;
  uint32_t tables;
};

// A table on the device, which kernels of rounds read, and where its next words lie.
struct Table {
  uint32_t* words;
  const uint32_t* next;  // host memory that kernels read; the host writes it while no order of this table is open
  uint64_t num_words;
};

// In host memory that kernels read. Written by the host alone, and only what kernels have done with.
struct LandingOrders {
  uint64_t posted;   // flag (batch, 0): the last one that is posted
  uint64_t planned;  // flag (window, 0): the last one whose loads the host has done with; see step.h
  uint64_t copied;   // flag (puts, 0): those that the thread has copied
  uint32_t copied_sum[kOrders];
  BatchEnd end[kOrders];
  PutOrder put[kOrders];
  TakeOrder take[kOrders];
  TableOrder table[kOrders];
};

// In host memory that kernels write: how many orders are done, and which batch they have seen.
struct LandingProgress {
  uint64_t batch;     // flag (batch, 0)
  uint64_t put;       // flag (orders, 0)
  uint64_t taken;     // likewise
  uint64_t written;   // likewise, of tables
  uint64_t agreed;    // flag (batch, 0): the last one that `take` was called with
  uint64_t gathered;  // flag (window, 0): the last one whose loads of all ranks are there; see step.h
  uint64_t wrong;     // flag (1 + order of a take whose bytes are not those that were sent, 0)
  uint64_t may_copy;  // flag (puts, 0): those whose cells are free, and those before them; for a thread alone
};

// Private. The CTA that joins last changes it, for the next kernel.
struct LandingState {
  uint32_t batch;   // posted, as far as kernels know,
  BatchEnd end;     // ... and its end
  uint32_t posted;  // as the first CTA has seen it, for the last one
  uint32_t put;     // orders done
  uint32_t checked;
  uint32_t taken;
  uint32_t written;             // tables
  uint32_t agreed;              // the last batch that `take` was called with
  uint32_t can_put;             // puts from the next one on whose cells are free
  uint32_t may_copy;            // puts that the thread has been told of
  uint32_t can_check;           // takes from the next one on that have come,
  uint32_t wrong;               // 1: bytes differ from their sum; no more is checked
  uint64_t put_bytes;           // of the next put that are on their way,
  uint64_t check_bytes;         // ... of the next take that have been looked at
  uint32_t landed_sum[kAhead];  // sums of takes that have come, as their sources say,
  uint32_t check_sum[kAhead];   // ... of what has been looked at,
  uint32_t put_sum[kAhead];     // ... and of what is on its way
  uint32_t joined;              // CTAs at J4
  // Copies of orders that CTAs need: looks of many at one word of host memory take turns, a microsecond each.
  PutOrder ahead_put[kAhead];    // the can_put next ones,
  TakeOrder ahead_take[kAhead];  // ... the can_check next ones,
  TakeOrder to_take[kMaxCells];  // ... and what is checked and not taken, by its number
  uint32_t table_batch;          // of the next table, if there is one
};

struct LandingPlan {
  uint32_t ep_size;
  uint32_t ep_rank;
  uint32_t cells;
  uint32_t first;       // arrivals are counted from this epoch on: flags of older ones say less
  uint32_t by_thread;   // 1: a thread of the host puts, kernels do not
  uint64_t cell_bytes;  // a multiple of kRegionAlignment
  uint64_t blob_bytes;  // of one expert as it travels, a multiple of 16
  uint64_t begin;       // of cell 0
  uint64_t flags;       // [ep_size, kMaxParts]: of a rank, landed [kMaxCells], then taken [kMaxCells]
  uint8_t* base[kMaxRanks];
  const RankSet* active;  // private memory
  const BlobPart* parts;  // private memory
  const Table* tables;    // private memory
  LandingState* state;
  const LandingOrders* orders;
  LandingProgress* progress;
  int32_t* landed;  // one number on the device: the last batch of which everything has come here
};

// Shared memory of one CTA.
struct LandingScratch {
  uint32_t is_last;
};

}  // namespace putget
