// Work items of dispatch, (token, segment, split), token-major. Segment 0 carries ids and weights,
// the others are segments of payload rows; where there are few of them, several warps split the targets of each. Where
// each warp has many, only segments of long rows are items (short_rows.h has the rest). Each CTA takes a contiguous
// range of items, so a large batch gives a CTA many tokens and a small one gives a token many CTAs.
#pragma once

#include "protocol/round/access.h"
#include "protocol/round/routing.h"

namespace putget {

constexpr uint32_t kFewItemsOfWarp = 6;   // up to there a short item among them costs less than a further turn
constexpr uint32_t kShortRow = 512;       // bytes at most
constexpr uint32_t kShortRowAccess = 16;  // ... which are moved in such accesses

// Whether rows of this payload may be no items. Those of the first one always are, so that a token has some.
inline bool is_short(const Shape& shape, uint32_t payload) {
  return payload > 0 && shape.row_bytes[payload] <= kShortRow && shape.row_bytes[payload] % kShortRowAccess == 0;
}

// Items of a token with one split, if its rows allow the widest access. `apart`: what is short is no item.
inline uint32_t segments_of_token(const Shape& shape, uint32_t segment_bytes, bool apart) {
  uint32_t segments = apart ? 0 : 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    if (!apart || !is_short(shape, p)) segments += (shape.row_bytes[p] + segment_bytes - 1) / segment_bytes;
  }
  return segments;
}

// Whether what is short is no item: where so many warps have more than a few each.
inline bool short_apart(const Shape& shape, uint32_t num_tokens, uint32_t segment_bytes, uint32_t splits,
                        uint64_t warps) {
  const uint64_t items = uint64_t{num_tokens} * segments_of_token(shape, segment_bytes, false);
  return splits == 1 && shape.num_payloads > 0 && items > kFewItemsOfWarp * warps;
}

// Fills in how the call's rows are cut into segments, and for how many CTAs; `splits` is a power of two. On the host,
// before the kernel; the call has its number of tokens.
inline void cut_into_items(DispatchCall& call, const Shape& shape, uint32_t segment_bytes, uint32_t splits,
                           uint32_t blocks, bool apart) {
  call.segment_bytes = segment_bytes;
  call.short_apart = apart;
  uint32_t segments = apart ? 0 : 1;
  for (uint32_t p = 0; p < shape.num_payloads; ++p) {
    const bool is_apart = apart && is_short(shape, p) && call.access_bytes[p] == kShortRowAccess;
    call.segments[p] = is_apart ? 0 : (shape.row_bytes[p] + segment_bytes - 1) / segment_bytes;
    segments += call.segments[p];
  }
  call.split_bits = lowest_bit(splits);
  call.items_per_token = Divisor(segments * splits);
  const uint32_t items = call.num_tokens * segments * splits;
  call.items_of_block = items / blocks;
  call.blocks_with_more = items % blocks;
  call.top_k = Divisor(shape.top_k);
}

// Whether a CTA of so many warps may have more to put than an item for each, once the call has been cut.
inline bool several_items(const DispatchCall& call, uint32_t warps) {
  return call.items_of_block + (call.blocks_with_more != 0) > warps;
}

// ... and whether it may have more than items of one chunk.
inline bool has_many_items(uint32_t items_of_block, uint32_t items_of_token) {
  return (items_of_block + 1) / items_of_token + 2 > kChunkTokens;
}
inline bool many_items(const DispatchCall& call) {
  return call.short_apart != 0 || has_many_items(call.items_of_block, call.items_per_token.value());
}

// This CTA's part of the list of items, and the tokens it touches.
struct Share {
  uint32_t begin;  // items
  uint32_t end;
  uint32_t first_token;
  uint32_t end_token;

  template <class Exec>
  PUTGET_TEXT Share(const Exec& exec, const DispatchCall& call) {
    const uint32_t more = call.blocks_with_more;
    begin = exec.block() * call.items_of_block + (exec.block() < more ? exec.block() : more);
    end = begin + call.items_of_block + (exec.block() < more ? 1 : 0);
    first_token = call.items_per_token.quotient(begin);
    end_token = call.items_per_token.quotient(end + call.items_per_token.value() - 1);
  }

  // The first token that the CTA routes: where all up to its last one are a chunk, the batch's first, since slots are
  // then known without counting what comes before the share.
  PUTGET_TEXT uint32_t first_chunk() const { return end_token <= kChunkTokens ? 0 : first_token; }
  PUTGET_TEXT uint32_t chunk_of(uint32_t token) const {
    return end_token - token < kChunkTokens ? end_token - token : kChunkTokens;
  }
  // The first token whose header this CTA has: it also records the token's routes.
  PUTGET_TEXT uint32_t first_header(const DispatchCall& call) const {
    return begin == first_token * call.items_per_token.value() ? first_token : first_token + 1;
  }
};

// Where the rows of one token go.
struct Targets {
  const RouteScratch& route;
  uint32_t token;  // of the chunk
  uint8_t* const* base;
  uint32_t split;
  uint32_t splits;

  // Calls visit(base, row) for this split's targets, from the own rank on, so that sources do not all write to the same
  // rank at once.
  template <class Visit>
  PUTGET_TEXT void visit(const Plan& plan, Visit visit) const {
    const uint32_t ep_size = plan.shape.ep_size;
    uint32_t count = 0;
    route.targets[token].visit_from(plan.shape.ep_rank, ep_size, [&](uint32_t rank) {
      if ((count++ & (splits - 1)) != split) return;
      visit(base[rank], row_index(route.slot(token, rank), plan.shape.ep_rank, ep_size));
    });
  }

  // The same for a warp, calling visit(row) with where it is in a region of such rows: its lanes look for the rows of
  // as many ranks at once. Whole warps call it.
  template <class Exec, class Visit>
  PUTGET_TEXT void visit_rows(const Exec& exec, const Plan& plan, uint64_t region, uint32_t row_bytes,
                              Visit visit) const {
    const uint32_t ep_size = plan.shape.ep_size;
    const uint32_t ep_rank = plan.shape.ep_rank;
    const uint32_t width = ep_size < exec.lanes() ? ep_size : exec.lanes();
    uint32_t first = ep_rank - ep_rank % exec.lanes();
    uint32_t count = 0;
    PUTGET_ROLLED
    for (uint32_t looked_at = 0; looked_at < ep_size; looked_at += exec.lanes()) {
      const uint32_t rank = first + exec.lane();
      const bool goes = rank < ep_size && (route.going[rank] >> token & 1u) != 0;
      const uint8_t* row = nullptr;
      if (goes) row = base[rank] + region + row_index(route.slot(token, rank), ep_rank, ep_size) * row_bytes;
      visit_bits_from(exec.votes(goes), ep_rank % exec.lanes(), width, [&](uint32_t lane) {
        const uint8_t* of_lane = exec.of_lane(row, lane);
        if ((count++ & (splits - 1)) == split) visit(const_cast<uint8_t*>(of_lane));
      });
      first += exec.lanes();
      if (first >= ep_size) first = 0;
    }
  }
};

// The k-th expert of a token, to each of its targets.
PUTGET_TEXT void put_expert(const Plan& plan, const Targets& targets, uint32_t k, int32_t id, float weight) {
  targets.visit(plan, [&](uint8_t* base, uint32_t row) {
    const uint64_t index = uint64_t{row} * plan.shape.top_k + k;
    reinterpret_cast<int32_t*>(base + plan.layout.topk_ids)[index] = id;        // [D2]
    reinterpret_cast<float*>(base + plan.layout.topk_weights)[index] = weight;  // [D2]
  });
}

// One item, whose source is loaded before its destinations are known. A warp calls it.
template <class Id, class Exec>
class Item {
  using Wide = typename Exec::Access16;

 public:
  PUTGET_TEXT Item(const Plan& plan, const DispatchCall& call, uint32_t index) { become(plan, call, index); }

  PUTGET_TEXT void become(const Plan& plan, const DispatchCall& call, uint32_t index) {
    token_ = call.items_per_token.quotient(index);
    const uint32_t in_token = index - token_ * call.items_per_token.value();
    const uint32_t segment = in_token >> call.split_bits;
    split_ = in_token & ((1u << call.split_bits) - 1);
    const uint32_t headers = is_apart(call) ? 0 : 1;
    bytes_ = 0;
    if (segment < headers) return;
    uint32_t of_payload = segment - headers;
    uint32_t p = 0;
    while (of_payload >= call.segments[p]) of_payload -= call.segments[p++];
    const uint32_t offset = of_payload * call.segment_bytes;
    row_bytes_ = plan.shape.row_bytes[p];
    bytes_ = row_bytes_ - offset < call.segment_bytes ? row_bytes_ - offset : call.segment_bytes;
    access_bytes_ = call.access_bytes[p];
    source_ = static_cast<const uint8_t*>(call.payload[p]) + uint64_t{token_} * row_bytes_ + offset;
    region_ = plan.layout.payload[p] + offset;
  }

  // Everything that `load` needs is there before the text goes on.
  PUTGET_TEXT void pin(const Exec& exec) {
    exec.pin(source_);
    exec.pin(bytes_);
  }

  PUTGET_TEXT uint32_t token() const { return token_; }

  // Whether what is short is no item.
  PUTGET_TEXT static bool is_apart(const DispatchCall& call) { return Exec::kManyItems && call.short_apart != 0; }

  // Issues the first loads; `put` waits for them.
  PUTGET_TEXT void load(Exec& exec, const Plan& plan, const DispatchCall& call) {
    if (is_header()) {
      if (exec.lane() < plan.shape.top_k) load_header(plan, call, exec.lane());
    } else if (access_bytes_ == sizeof(Wide)) {
      load_wide(exec, exec.lane());
    }
  }

  // Puts the items of the chunk that begins with first_token.
  PUTGET_TEXT void put(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t num_valid,
                       const RouteScratch& route, uint32_t first_token, uint8_t* const* base) {
    const Targets targets{route, token_ - first_token, base, split_, 1u << call.split_bits};
    if (is_header()) {
      put_header(exec, plan, call, num_valid, targets);
    } else if (access_bytes_ == sizeof(Wide)) {
      put_wide(exec, plan, targets);
    } else {
      with_narrow_access(access_bytes_, [&](auto access) {
        put_narrow<decltype(access)>(exec, plan, targets, source_, region_, row_bytes_, bytes_);
      });
    }
  }

 private:
  static constexpr uint32_t kUnroll = Exec::template put_unroll<Wide>();

  PUTGET_TEXT bool is_header() const { return bytes_ == 0; }

  PUTGET_TEXT void load_header(const Plan& plan, const DispatchCall& call, uint32_t k) {
    const uint64_t index = uint64_t{token_} * plan.shape.top_k + k;
    id_.load(static_cast<const Id*>(call.topk_ids) + index, 1);
    weight_ = call.topk_weights[index];
  }

  // Ids and weights, each as one row per target.
  PUTGET_TEXT void put_header(Exec& exec, const Plan& plan, const DispatchCall& call, uint32_t num_valid,
                              const Targets& targets) {
    const uint32_t top_k = plan.shape.top_k;
    PUTGET_ROLLED
    for (uint32_t k = exec.lane(); k < top_k; k += exec.lanes()) {
      if (k >= exec.lanes()) load_header(plan, call, k);
      put_expert(plan, targets, k, token_ < num_valid ? sent_id(plan, id_[0]) : -1, weight_);
    }
  }

  PUTGET_TEXT void load_wide(Exec& exec, uint32_t first) {
    const Wide* from = reinterpret_cast<const Wide*>(source_);
    PUTGET_UNROLL
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * exec.lanes();
      if (i < bytes_ / sizeof(Wide)) ahead_[u] = from[i];
    }
  }

  PUTGET_TEXT void put_wide(Exec& exec, const Plan& plan, const Targets& targets) {
    const uint32_t count = bytes_ / sizeof(Wide);
    PUTGET_ROLLED
    for (uint32_t begin = 0; begin < count;) {
      const uint32_t first = begin + exec.lane();
      const auto put_to = [&](uint8_t* to) {
        Wide* from_first = reinterpret_cast<Wide*>(to) + first;
        PUTGET_UNROLL
        for (uint32_t u = 0; u < kUnroll; ++u) {
          if (first + u * exec.lanes() < count) exec.put(from_first + u * exec.lanes(), ahead_[u]);  // [D2]
        }
      };
      if constexpr (Exec::kManyItems) {
        targets.visit_rows(exec, plan, region_, row_bytes_, put_to);
      } else {
        targets.visit(plan, [&](uint8_t* base, uint32_t row) { put_to(base + region_ + uint64_t{row} * row_bytes_); });
      }
      begin += exec.lanes() * kUnroll;
      if (begin < count) load_wide(exec, begin + exec.lane());
    }
  }

  // Static, and with what it needs by value: so the item itself stays in registers.
  template <class Access>
  PUTGET_RARE static void put_narrow(Exec& exec, const Plan& plan, const Targets targets, const uint8_t* source,
                                     uint64_t region, uint32_t row_bytes, uint32_t bytes) {
    const Access* from = reinterpret_cast<const Access*>(source);
    PUTGET_ROLLED
    for (uint32_t i = exec.lane(); i < bytes / sizeof(Access); i += exec.lanes()) {
      const Access value = from[i];
      targets.visit(plan, [&](uint8_t* base, uint32_t row) {
        exec.put(reinterpret_cast<Access*>(base + region + uint64_t{row} * row_bytes) + i, value);  // [D2]
      });
    }
  }

  uint32_t token_;
  uint32_t split_;
  uint32_t row_bytes_ = 0;
  uint32_t bytes_;  // 0: ids and weights
  uint32_t access_bytes_ = 0;
  const uint8_t* source_ = nullptr;
  uint64_t region_ = 0;  // of the payload, from the segment's first byte on
  Ids<Id, 1> id_;
  float weight_;
  Wide ahead_[kUnroll];
};

}  // namespace putget
