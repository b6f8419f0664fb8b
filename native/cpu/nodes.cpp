#include "cpu/nodes.h"

#include "cpu/clones.h"
#include "cpu/exec.h"
#include "protocol/nodes/pack.h"
#include "protocol/nodes/serve.h"
#include "protocol/nodes/sum_domains.h"
#include "protocol/nodes/unpack.h"

namespace putget::cpu {
namespace {

constexpr uint32_t kWideBytes = 16;
constexpr uint32_t kFew = 4;  // rows of a token in a domain of so many ranks

bool is_wide(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kWideBytes == 0; }

// Calls body(codec, wire) with how rows are summed: by wide accesses, or an element at a time.
template <class Body>
void with_wire(const Shape& shape, bool wide, Body body) {
  with_codec(shape.output_type, [&](auto codec) {
    using Codec = decltype(codec);
    if (wide) {
      body(codec, SameWire<Codec, kWideBytes / sizeof(typename Codec::Bits)>{});
    } else {
      body(codec, SameWire<Codec, 1>{});
    }
  });
}

template <class Codec, class Wire, class TopK, bool kQuantised>
PUTGET_CLONES void run_serve(Exec& exec, const Plan& plan, const NodesPlan& nodes, NodesScratch& scratch,
                             CombineScratch& of_domain) {
  putget::serve_sources<Codec, Wire, TopK, kQuantised>(exec, plan, nodes, scratch, of_domain);
}

template <class Codec, class Wire, bool kQuantised>
PUTGET_CLONES void run_sum(Exec& exec, const Plan& plan, const NodesPlan& nodes, const CombineCall& call,
                           NodesScratch& scratch) {
  putget::sum_domains<Codec, Wire, kQuantised>(exec, plan, nodes, call, scratch);
}

}  // namespace

void pack(const Plan& plan, const NodesPlan& nodes, const DispatchCall& call) {
  Exec exec;
  NodesScratch scratch{};
  const auto run = [&](auto id) { putget::pack<decltype(id)>(exec, plan, nodes, call, scratch); };
  if (call.ids_are_64bit != 0) {
    run(int64_t{});
  } else {
    run(int32_t{});
  }
}

void unpack(const Plan& plan, const NodesPlan& nodes, uint32_t max_rows) {
  Exec exec;
  NodesScratch scratch{};
  putget::unpack(exec, plan, nodes, max_rows, scratch);
}

void close_round(const Plan& plan, const NodesPlan& nodes, uint32_t kind) {
  Exec exec;
  close_by_itself(exec, plan, nodes, kind);
}

void serve_sources(const Plan& plan, const NodesPlan& nodes) {
  Exec exec;
  NodesScratch scratch{};
  CombineScratch of_domain{};
  const bool is_quantised = nodes.wire != WireType::kSame;  // of rows in whole packs
  const bool is_few = nodes.domains.size(nodes.domains.domain_of(plan.shape.ep_rank)) <= kFew;
  with_wire(plan.shape, plan.shape.output_row_bytes() % kWideBytes == 0, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    if constexpr (Wire::kElements != 1) {
      if (is_quantised && is_few) {
        return run_serve<Codec, Wire, FewRows<kFew>, true>(exec, plan, nodes, scratch, of_domain);
      }
      if (is_quantised) return run_serve<Codec, Wire, DynamicTopK, true>(exec, plan, nodes, scratch, of_domain);
      if (is_few) return run_serve<Codec, Wire, FewRows<kFew>, false>(exec, plan, nodes, scratch, of_domain);
    }
    run_serve<Codec, Wire, DynamicTopK, false>(exec, plan, nodes, scratch, of_domain);
  });
}

void sum_domains(const Plan& plan, const NodesPlan& nodes, const CombineCall& call) {
  Exec exec;
  NodesScratch scratch{};
  const bool wide = plan.shape.output_row_bytes() % kWideBytes == 0 && is_wide(call.out) && is_wide(call.addend);
  with_wire(plan.shape, wide, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    if (nodes.wire == WireType::kSame) {
      run_sum<Codec, Wire, false>(exec, plan, nodes, call, scratch);
    } else {
      run_sum<Codec, Wire, true>(exec, plan, nodes, call, scratch);
    }
  });
}

}  // namespace putget::cpu
