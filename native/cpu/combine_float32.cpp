#include "cpu/combine_text.h"

namespace putget::cpu {

template void run_combine<Float32>(Exec&, const Plan&, const CombineCall&, CombineScratch&, putget_path);

}  // namespace putget::cpu
