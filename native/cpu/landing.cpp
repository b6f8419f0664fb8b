// Landing areas on the CPU: the calling thread is the kernel.
#include "landing.h"
#include "cpu/exec.h"

namespace putget::cpu {
namespace {

class CpuLanding final : public Landing {
 public:
  CpuLanding(const LandingPlan& plan, const std::vector<BlobPart>& parts) : Landing(plan), parts_(parts) {
    plan_.parts = parts_.data();
    plan_.state = &state_;
    plan_.orders = orders_ = &posted_;
    plan_.progress = progress_ = &done_;
  }

  void move(uint64_t most_bytes, void*) override {
    Exec exec;
    move_experts(exec, plan_, most_bytes, scratch_);
  }
  void take(const int32_t* batch, void*) override {
    Exec exec;
    take_experts(exec, plan_, batch, scratch_);
  }
  void step(const GatherPlan& gather, uint64_t most_bytes, void*) override {
    Exec exec;
    step_experts(exec, plan_, gather, most_bytes, scratch_);
  }
  uint32_t copy(const PutOrder& order) override {
    Exec exec;
    return copy_blob(exec, plan_, order.from, cell_at(plan_, order.dst, order.arrival), true, 0, plan_.blob_bytes);
  }

 private:
  std::vector<BlobPart> parts_;
  LandingState state_{};
  LandingOrders posted_{};
  LandingProgress done_{};
  LandingScratch scratch_{};
};

}  // namespace

std::unique_ptr<Landing> create_landing(const LandingPlan& plan, const std::vector<BlobPart>& parts) {
  return std::make_unique<CpuLanding>(plan, parts);
}

}  // namespace putget::cpu
