// The MoE kernels' text run by the calling thread: one block of one thread.
#include <algorithm>
#include <cmath>
#include <vector>

#include "backend.h"
#include "cpu/exec.h"
#include "moe/activation.h"
#include "moe/by_source.h"
#include "moe/compact.h"
#include "moe/finalize.h"
#include "moe/group.h"
#include "moe/pairs.h"
#include "moe/rows.h"

namespace putget::cpu {
namespace {

constexpr uint32_t kPackBytes = 16;

struct MoeExec : Exec {
  using Exec::add;

  template <class Access>
  static constexpr uint32_t copy_unroll() {
    return 1024 / sizeof(Access);
  }

  Lanes scan(uint32_t value) const { return {0, value}; }
  Lanes scan_lanes(uint32_t value) const { return {0, value}; }
  Lanes equal(int32_t) const { return {0, 1}; }
  uint32_t vote(bool condition) const { return condition ? 1 : 0; }
  template <class Value>
  Value from(Value value, uint32_t) const {
    return value;
  }
  void add(uint32_t* counter, uint32_t amount) const { *counter += amount; }
  template <uint32_t kCount>
  void put_codes(uint8_t* to, const float (&value)[kCount]) const {
    for (uint32_t e = 0; e < kCount; ++e) to[e] = Fp8::narrow(value[e]);
  }
  float exp(float value) const { return std::exp(value); }
  float erf(float value) const { return std::erf(value); }
  float divide(float a, float b) const { return a / b; }
};

std::vector<uint32_t> room_for(const moe::ValidRows& valid) { return std::vector<uint32_t>(moe::found_words(valid)); }

moe::CopyPlan whole_rows(moe::CopyPlan copy) {
  copy.num_cut = copy.num_payloads;
  copy.segments = copy.num_payloads;
  for (uint32_t p = 0; p < copy.num_payloads; ++p) {
    copy.payload[p].segment_bytes = copy.payload[p].row_bytes;
    copy.payload[p].segments = 1;
  }
  return copy;
}

// Calls body(Codec{}, Packed) with the widest packs that rows of this many elements at these addresses allow.
template <class Body>
void with_rows(OutputType type, uint32_t elements, const void* a, const void* b, Body body) {
  const uint64_t mixed =
      reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | uint64_t{elements} * element_bytes(type);
  const bool packed = mixed % kPackBytes == 0;
  switch (type) {
    case OutputType::kBFloat16:
      return body(BFloat16{}, packed);
    case OutputType::kFloat16:
      return body(Float16{}, packed);
    case OutputType::kFloat32:
      return body(Float32{}, packed);
  }
}

template <class Codec>
constexpr uint32_t kPack = kPackBytes / sizeof(typename Codec::Bits);

}  // namespace

void moe_group(const moe::Grouping& group, const moe::CopyPlan& copy) {
  MoeExec exec;
  moe::SourceScratch sources;
  const moe::GroupTables tables(group.sizes, group.scratch());
  if (copy.num_payloads == 0) return moe::group_alone(exec, group, sources, tables);
  moe::count_rows(exec, group, sources, tables);
  uint32_t lost = 0;  // which the first has counted
  const moe::Share rows = moe::count_share(exec, group, sources, tables, lost);
  const uint32_t end = moe::place_share(exec, group, sources, tables, rows);
  moe::copy_share(exec, group, whole_rows(copy), sources, rows);
  moe::tidy(exec, group, sources, tables, rows, end, {0, exec.warps()});
}

void moe_expand(const moe::ExpandCall& call) {
  MoeExec exec;
  moe::ExpandCall with_whole_rows = call;
  with_whole_rows.copy = whole_rows(call.copy);
  moe::expand_rows(exec, with_whole_rows, room_for(call.valid).data());
}

void moe_by_source(const moe::BySourceCall& call) {
  MoeExec exec;
  moe::BySourceCall with_whole_rows = call;
  with_whole_rows.copy = whole_rows(call.copy);
  moe::put_by_source(exec, with_whole_rows);
}

void moe_count_routes(const moe::RoutesCall& call, bool ids_are_64bit) {
  MoeExec exec;
  if (ids_are_64bit) {
    moe::count_routes<int64_t>(exec, call);
  } else {
    moe::count_routes<int32_t>(exec, call);
  }
}

void moe_compact(const moe::CompactCall& call, bool ids_are_64bit) {
  MoeExec exec;
  moe::SourceScratch sources;
  moe::CompactCall with_whole_rows = call;
  with_whole_rows.copy = whole_rows(call.copy);
  if (ids_are_64bit) {
    moe::compact_rows<int64_t>(exec, with_whole_rows, sources);
  } else {
    moe::compact_rows<int32_t>(exec, with_whole_rows, sources);
  }
}

void moe_send_pairs(const moe::SendPairsCall& call, bool ids_are_64bit) {
  MoeExec exec;
  moe::SendPairsCall with_whole_rows = call;
  with_whole_rows.copy = whole_rows(call.copy);
  const auto send = [&](auto id) {
    using Id = decltype(id);
    if (call.form == moe::ScaleForm::kNone) {
      moe::send_pairs<Id>(exec, with_whole_rows);
    } else {
      moe::send_quantised_pairs<Id>(exec, with_whole_rows);
    }
  };
  if (ids_are_64bit) {
    send(int64_t{});
  } else {
    send(int32_t{});
  }
}

void moe_place_pairs(const moe::PlacePairsCall& call) {
  MoeExec exec;
  moe::SourceScratch sources;
  moe::PlacePairsCall with_whole_rows = call;
  with_whole_rows.copy = whole_rows(call.copy);
  with_whole_rows.parts = 1;
  moe::place_pairs(exec, with_whole_rows, sources);
}

void moe_sum_pairs(const moe::SumPairsCall& call, bool ids_are_64bit) {
  MoeExec exec;
  moe::SumPairsCall whole = call;
  whole.segment_elements = call.elements;
  if (ids_are_64bit) {
    moe::sum_pairs<int64_t, BFloat16, 1>(exec, whole);
  } else {
    moe::sum_pairs<int32_t, BFloat16, 1>(exec, whole);
  }
}

void moe_activate(const moe::ActivationCall& call, OutputType type, moe::Gate gate) {
  MoeExec exec;
  moe::ActivationCall whole_rows = call;
  whole_rows.segment_elements = round_up(call.elements, kScaleBlock);
  std::vector<uint32_t> first = room_for(call.valid);
  with_rows(type, call.elements, call.x, call.out, [&](auto codec, bool packed) {
    using Codec = decltype(codec);
    using moe::Gate;
    const auto run = [&](auto silu) {
      constexpr Gate kGate = decltype(silu)::value ? Gate::kSilu : Gate::kGelu;
      if (call.scales != nullptr) {
        moe::activate_and_quantise_rows<Codec, kGate>(exec, whole_rows, first.data());
      } else if (packed) {
        moe::activate_rows<Codec, kPack<Codec>, kGate>(exec, whole_rows, first.data());
      } else {
        moe::activate_rows<Codec, 1, kGate>(exec, whole_rows, first.data());
      }
    };
    if (gate == Gate::kSilu) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
}

void moe_finalize(const moe::Grouping& group, const moe::FinalizeCall& call, OutputType type) {
  MoeExec exec;
  moe::FinalizeCall whole_rows = call;
  moe::SourceScratch sources;
  whole_rows.segment_elements = call.elements;
  with_rows(type, call.elements, call.rows, call.out, [&](auto codec, bool packed) {
    using Codec = decltype(codec);
    if (packed) {
      moe::finalize_rows<Codec, kPack<Codec>>(exec, group, whole_rows, sources);
    } else {
      moe::finalize_rows<Codec, 1>(exec, group, whole_rows, sources);
    }
  });
}

}  // namespace putget::cpu
