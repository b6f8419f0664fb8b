// Bodies of the functions that cpu/combine.h declares, for the source file of one type of output.
#pragma once

#include <type_traits>

#include "choose.h"
#include "cpu/clones.h"
#include "cpu/combine.h"

namespace putget::cpu {

template <class Codec, class Wire, class Rows>
PUTGET_CLONES void run_kernel(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch) {
  combine<Codec, Wire, Rows>(exec, plan, call, scratch);
}

template <class Codec>
void run_combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch, putget_path path) {
  using Packed = SameWire<Codec, kWideBytes / sizeof(typename Codec::Bits)>;
  if (path == PUTGET_PATH_GOT_NARROW) {
    return run_kernel<Codec, SameWire<Codec, 1>, DynamicTopK>(exec, plan, call, scratch);
  }
  with_rows_of(path, [&](auto rows) {
    using Rows = decltype(rows);
    if (call.sentinel == 0) {
      run_kernel<Codec, Packed, Rows>(exec, plan, call, scratch);
    } else if (plan.shape.quantised()) {
      run_kernel<Codec, SentinelWire<Codec, true>, Rows>(exec, plan, call, scratch);
    } else if (call.major.positions != nullptr) {
      if constexpr (std::is_same_v<Codec, BFloat16>) {
        combine<Codec, ExpertMajorWire<Codec>, Rows>(exec, plan, call, scratch);
      }
    } else {
      // Not in clones: nobody has sentinel rows as they are on a CPU but who asks for them.
      combine<Codec, SentinelWire<Codec, false>, Rows>(exec, plan, call, scratch);
    }
  });
}

}  // namespace putget::cpu
