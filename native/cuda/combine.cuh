// combine_kernel: the protocol's combine on a grid of CTAs, one instance for what travels, output type, rows of a
// token.
//
//   grid      choose.h; warps share the list of (token, segment) items, and before it that of rows to send or copy
//   block     each warp works on one item at a time
//   shared    CombineScratch, static
//   waits     CTAs that sum at C3, or at F2 for sentinel rows. Where rows are copied, C3 follows J2 of all CTAs of a
//             peer: so all CTAs must be resident at once
#pragma once

#include "cuda/exec.cuh"
#include "protocol/combine/combine.h"

namespace putget::cuda {

constexpr int kCombineRegisters = 80;

template <class Codec, class Wire, class TopK>
__global__ void __maxnreg__(kCombineRegisters)
    combine_kernel(const __grid_constant__ Plan plan, const __grid_constant__ CombineCall call) {
  __shared__ CombineScratch shared;
  Exec exec;
  combine<Codec, Wire, TopK>(exec, plan, call, kept_at_hand(shared));
}

}  // namespace putget::cuda
