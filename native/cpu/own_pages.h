// Pages of this process alone.
#pragma once

#include <cstdint>
#include <memory>

namespace putget::cpu {

// Zeroed, and whole: nothing else lies on them. Throws Error(PUTGET_SYSTEM).
std::shared_ptr<uint8_t> make_pages(uint64_t bytes);

}  // namespace putget::cpu
