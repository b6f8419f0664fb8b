// Stands in for native/cuda in a build without it.
#include "backend.h"
#include "landing.h"

#if !defined(PUTGET_WITH_CUDA)

namespace putget::cuda {
namespace {

[[noreturn]] void unavailable() {
  throw Error(PUTGET_UNAVAILABLE,
              "this build of putget has no CUDA part: install it where the CUDA compiler is available "
              "(pip install nvidia-cuda-nvcc, or a CUDA toolkit), with PUTGET_CUDA=ON");
}

}  // namespace

std::unique_ptr<Backend> create_backend(const MemoryConfig&) { unavailable(); }
uint32_t gpu_count() { unavailable(); }
CopyBeside copy_beside() { return nullptr; }
putget_gpu gpu_report(uint32_t) { unavailable(); }
void moe_group(const moe::Grouping&, const moe::CopyPlan&, uint32_t, const Queue&) { unavailable(); }
void moe_expand(const moe::ExpandCall&, const Queue&) { unavailable(); }
void moe_by_source(const moe::BySourceCall&, const Queue&) { unavailable(); }
void moe_count_routes(const moe::RoutesCall&, bool, const Queue&) { unavailable(); }
void moe_compact(const moe::CompactCall&, bool, const Queue&) { unavailable(); }
void moe_send_pairs(const moe::SendPairsCall&, bool, const Queue&) { unavailable(); }
void moe_place_pairs(const moe::PlacePairsCall&, const Queue&) { unavailable(); }
void moe_sum_pairs(const moe::SumPairsCall&, bool, const Queue&) { unavailable(); }
void moe_activate(const moe::ActivationCall&, OutputType, moe::Gate, const Queue&) { unavailable(); }
void moe_product(const moe::GroupedProduct&, const Queue&) { unavailable(); }
void moe_networks(const moe::Networks&, const Queue&) { unavailable(); }
void moe_finalize(const moe::Grouping&, const moe::FinalizeCall&, OutputType, const Queue&) { unavailable(); }
void choose_replicas(const balancer::ChoiceCall<int32_t>&, uint32_t*, const Queue&) { unavailable(); }
void choose_replicas(const balancer::ChoiceCall<int64_t>&, uint32_t*, const Queue&) { unavailable(); }
std::unique_ptr<Landing> create_landing(const LandingPlan&, const std::vector<BlobPart>&, int, uint32_t) {
  unavailable();
}

}  // namespace putget::cuda

#endif
