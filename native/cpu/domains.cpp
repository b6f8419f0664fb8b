#include "cpu/domains.h"

#include "cpu/clones.h"
#include "cpu/exec.h"
#include "protocol/domains/pack.h"
#include "protocol/domains/serve.h"
#include "protocol/domains/sum_domains.h"
#include "protocol/domains/unpack.h"

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
PUTGET_CLONES void run_serve(Exec& exec, const Plan& plan, const DomainsPlan& across, DomainsScratch& scratch,
                             CombineScratch& of_domain) {
  putget::serve_sources<Codec, Wire, TopK, kQuantised>(exec, plan, across, scratch, of_domain);
}

template <class Codec, class Wire, bool kQuantised>
PUTGET_CLONES void run_sum(Exec& exec, const Plan& plan, const DomainsPlan& across, const CombineCall& call,
                           DomainsScratch& scratch) {
  putget::sum_domains<Codec, Wire, kQuantised>(exec, plan, across, call, scratch);
}

}  // namespace

void pack(const Plan& plan, const DomainsPlan& across, const DispatchCall& call) {
  Exec exec;
  DomainsScratch scratch{};
  const auto run = [&](auto id) { putget::pack<decltype(id)>(exec, plan, across, call, scratch); };
  if (call.ids_are_64bit != 0) {
    run(int64_t{});
  } else {
    run(int32_t{});
  }
}

void unpack(const Plan& plan, const DomainsPlan& across, uint32_t max_rows) {
  Exec exec;
  DomainsScratch scratch{};
  putget::unpack(exec, plan, across, max_rows, scratch);
}

void close_round(const Plan& plan, const DomainsPlan& across, uint32_t kind) {
  Exec exec;
  close_by_itself(exec, plan, across, kind);
}

void serve_sources(const Plan& plan, const DomainsPlan& across) {
  Exec exec;
  DomainsScratch scratch{};
  CombineScratch of_domain{};
  const bool is_quantised = across.wire != WireType::kSame;  // of rows in whole packs
  const bool is_few = across.domains.size(across.domains.domain_of(plan.shape.ep_rank)) <= kFew;
  with_wire(plan.shape, plan.shape.output_row_bytes() % kWideBytes == 0, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    if constexpr (Wire::kElements != 1) {
      if (is_quantised && is_few) {
        return run_serve<Codec, Wire, FewRows<kFew>, true>(exec, plan, across, scratch, of_domain);
      }
      if (is_quantised) return run_serve<Codec, Wire, DynamicTopK, true>(exec, plan, across, scratch, of_domain);
      if (is_few) return run_serve<Codec, Wire, FewRows<kFew>, false>(exec, plan, across, scratch, of_domain);
    }
    run_serve<Codec, Wire, DynamicTopK, false>(exec, plan, across, scratch, of_domain);
  });
}

void sum_domains(const Plan& plan, const DomainsPlan& across, const CombineCall& call) {
  Exec exec;
  DomainsScratch scratch{};
  const bool wide = plan.shape.output_row_bytes() % kWideBytes == 0 && is_wide(call.out) && is_wide(call.addend);
  with_wire(plan.shape, wide, [&](auto codec, auto wire) {
    using Codec = decltype(codec);
    using Wire = decltype(wire);
    if (across.wire == WireType::kSame) {
      run_sum<Codec, Wire, false>(exec, plan, across, call, scratch);
    } else {
      run_sum<Codec, Wire, true>(exec, plan, across, call, scratch);
    }
  });
}

}  // namespace putget::cpu
