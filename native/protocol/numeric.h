// Output element types: how they become float32 and back, the same bits on every backend.
#pragma once

#include "protocol/shape.h"

namespace putget {

PUTGET_PURE float float_of_bits(uint32_t bits) {
  union {
    uint32_t u;
    float f;
  } both{bits};
  return both.f;
}

PUTGET_PURE uint32_t bits_of_float(float value) {
  union {
    float f;
    uint32_t u;
  } both{value};
  return both.u;
}

struct Float32 {
  using Bits = uint32_t;
  PUTGET_PURE static float widen(Bits bits) { return float_of_bits(bits); }
  PUTGET_PURE static Bits narrow(float value) { return bits_of_float(value); }
};

struct BFloat16 {
  using Bits = uint16_t;
  PUTGET_PURE static float widen(Bits bits) { return float_of_bits(uint32_t{bits} << 16); }
  // Round to nearest, ties to even; a NaN becomes the quiet NaN that torch writes.
  PUTGET_PURE static Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  PUTGET_PURE static float widen(Bits bits) {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // Subnormal: mantissa * 2^-24, exact in float32.
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return float_of_bits(sign | bits_of_float(magnitude));
  }
  PUTGET_PURE static Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<Bits>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<Bits>(sign | 0x7c00u);  // rounds to 65536 or more: infinity
    if (magnitude >= 0x38800000u) {                                          // normal in float16
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      return static_cast<Bits>(sign | ((rounded - 0x38000000u) >> 13));
    }
    if (magnitude < 0x33000000u) return static_cast<Bits>(sign);  // below half of the smallest subnormal
    const uint32_t shift = 126 - (magnitude >> 23);               // subnormal: shift the full mantissa into place
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1u)) ? 1u : 0u;
    return static_cast<Bits>(sign | (kept + up));
  }
};

}  // namespace putget
