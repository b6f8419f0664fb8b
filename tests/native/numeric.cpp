// native/protocol/round/numeric.h on streams of numbers, for a test that compares it with torch.
//
//   numeric CODEC widen    prints what each of the codes 0, 1, ... is, as float32
//   numeric CODEC narrow   reads float32 from its input, prints the code of each
//   numeric CODEC widen8, narrow8     the same, eight in each step
//   numeric scale          reads float32 from its input, prints the scale of a block with this largest element
//
// CODEC is fp8, bf16 or f16; numbers are binary, in the machine's order.
#include <cstdio>
#include <limits>
#include <string_view>

#include "cpu/exec.h"
#include "protocol/round/numeric.h"

namespace {

template <class Codec>
void widen_all() {
  for (uint32_t code = 0; code <= std::numeric_limits<typename Codec::Bits>::max(); ++code) {
    const float value = Codec::widen(static_cast<typename Codec::Bits>(code));
    std::fwrite(&value, sizeof(value), 1, stdout);
  }
}

template <class Map>
void map_input(Map map) {
  float value;
  while (std::fread(&value, sizeof(value), 1, stdin) == 1) {
    const auto out = map(value);
    std::fwrite(&out, sizeof(out), 1, stdout);
  }
}

constexpr uint32_t kTogether = 8;

template <class Codec>
void widen_all_by_eights() {
  using Bits = typename Codec::Bits;
  for (uint32_t first = 0; first <= std::numeric_limits<Bits>::max(); first += kTogether) {
    putget::Pack<Codec, kTogether> pack;
    for (uint32_t e = 0; e < kTogether; ++e) pack.bits[e] = static_cast<Bits>(first + e);
    const auto wide = putget::widen(pack);
    std::fwrite(wide.value, sizeof(float), kTogether, stdout);
  }
}

template <class Codec>
void narrow_by_eights() {
  float value[kTogether] = {};
  while (const size_t count = std::fread(value, sizeof(float), kTogether, stdin)) {
    putget::Pack<Codec, kTogether> pack;
    putget::cpu::Exec().narrow<Codec>(value, pack);
    std::fwrite(pack.bits, sizeof(pack.bits[0]), count, stdout);
  }
}

template <class Codec>
int run(std::string_view what) {
  if (what == "widen") {
    widen_all<Codec>();
  } else if (what == "narrow") {
    map_input([](float value) { return Codec::narrow(value); });
  } else if (what == "widen8") {
    widen_all_by_eights<Codec>();
  } else if (what == "narrow8") {
    narrow_by_eights<Codec>();
  } else {
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  const std::string_view what = argc > 2 ? argv[2] : "";
  if (first == "fp8") return run<putget::Fp8>(what);
  if (first == "bf16") return run<putget::BFloat16>(what);
  if (first == "f16") return run<putget::Float16>(what);
  if (first != "scale") return 2;
  map_input([](float value) { return putget::block_scale(value); });
  return 0;
}
