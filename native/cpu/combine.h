// One block of combine on a CPU. Each type of output has a source file of its own, so that compilers work side by side.
#pragma once

#include "cpu/exec.h"
#include "protocol/combine/combine.h"
#include "putget.h"

namespace putget::cpu {

constexpr uint32_t kWideBytes = 16;

// The path says how rows come back, and how many a token has at most.
template <class Codec>
void run_combine(Exec& exec, const Plan& plan, const CombineCall& call, CombineScratch& scratch, putget_path path);

}  // namespace putget::cpu
