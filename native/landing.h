// The interface of a backend (cpu, cuda) to the C ABI of landing areas.
#pragma once

#include <memory>
#include <vector>

#include "protocol/landing/step.h"

namespace putget {

// The orders, the progress and the private state of one rank's landing, and its calls.
class Landing {
 public:
  virtual ~Landing() = default;
  virtual void move(uint64_t most_bytes, void* stream) = 0;
  virtual void take(const int32_t* batch, void* stream) = 0;
  virtual void step(const GatherPlan& gather, uint64_t most_bytes, void* stream) = 0;
  // Puts all bytes of an expert, and returns their sum: for a plan by thread, whose thread calls it.
  virtual uint32_t copy(const PutOrder& order) = 0;

  LandingOrders& orders() { return *orders_; }
  const LandingProgress& progress() const { return *progress_; }
  const LandingPlan& plan() const { return plan_; }

 protected:
  explicit Landing(const LandingPlan& plan) : plan_(plan) {}
  LandingPlan plan_;
  LandingOrders* orders_ = nullptr;
  LandingProgress* progress_ = nullptr;
};

// `plan` has everything but what each allocates: parts, state, orders, progress.
namespace cpu {
std::unique_ptr<Landing> create_landing(const LandingPlan& plan, const std::vector<BlobPart>& parts);
}
namespace cuda {
std::unique_ptr<Landing> create_landing(const LandingPlan& plan, const std::vector<BlobPart>& parts, int ordinal,
                                        uint32_t num_sms);
}

}  // namespace putget
