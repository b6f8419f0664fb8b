// Output element types: how they become float32 and back, the same bits on every backend.
#pragma once

#include "protocol/round/shape.h"

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
  // Two elements that were loaded as one word, the first in its lower half: an instruction each.
  PUTGET_PURE static void widen_pair(uint32_t both, float& first, float& second) {
    first = float_of_bits(both << 16);
    second = float_of_bits(both & 0xffff0000u);
  }
  // Round to nearest, ties to even; a NaN becomes the one that the hardware's conversion makes.
  PUTGET_PURE static Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  PUTGET_PURE static float widen(Bits bits) {
#if defined(__CUDA_ARCH__)
    // Without branches: the exponents of both types are apart by a power of two, but for the largest one.
    constexpr float kApart = 5192296858534827628530496329220096.0f;  // 2^112
    const uint32_t rest = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    const float magnitude = __fmul_rn(float_of_bits((bits & 0x7fffu) << 13), kApart);
    return float_of_bits(bits_of_float(magnitude) | rest | uint32_t{bits & 0x8000u} << 16);
#else
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    // Subnormal: mantissa * 2^-24, exact in float32.
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    return float_of_bits(sign | bits_of_float(magnitude));
#endif
  }
  PUTGET_PURE static void widen_pair(uint32_t both, float& first, float& second) {
    first = widen(static_cast<Bits>(both));
    second = widen(static_cast<Bits>(both >> 16));
  }
  PUTGET_PURE static Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;                             // as above
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

// Calls body(Codec{}) for an output type. On the host.
template <class Body>
auto with_codec(OutputType type, Body body) {
  switch (type) {
    case OutputType::kFloat16:
      return body(Float16{});
    case OutputType::kFloat32:
      return body(Float32{});
    default:
      return body(BFloat16{});
  }
}

// FP8 E4M3 without infinities (OCP 8-bit floating point specification): 448 is the largest value.
struct Fp8 {
  using Bits = uint8_t;
  static constexpr float kMax = 448.0f;
  PUTGET_PURE static float widen(Bits bits) {
    const uint32_t sign = uint32_t{bits & 0x80u} << 24;
    const uint32_t exponent = (bits >> 3) & 0xfu;
    const uint32_t mantissa = bits & 0x7u;
    if (exponent == 0xfu && mantissa == 0x7u) return float_of_bits(sign | 0x7fc00000u);
    if (exponent != 0) return float_of_bits(sign | ((exponent + 120) << 23) | (mantissa << 20));
    // Subnormal: mantissa * 2^-9, exact in float32.
    return float_of_bits(sign | bits_of_float(static_cast<float>(mantissa) * 0.001953125f));
  }
  // Round to nearest, ties to even; what is too large becomes the largest value; a NaN becomes 0x7f.
  PUTGET_PURE static Bits narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    if (magnitude >= 0x43e00000u) return static_cast<Bits>(sign | 0x7eu);  // from 448 on
    if (magnitude >= 0x3c800000u) {                                        // normal in E4M3: from 2^-6 on
      const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
      return static_cast<Bits>(sign | ((rounded - 0x3c000000u) >> 20));
    }
    // Subnormal: the sum's last place is 2^-9, so float32 addition rounds as wanted.
    const float rounded = float_of_bits(magnitude) + 16384.0f;
    return static_cast<Bits>(sign | (bits_of_float(rounded) - bits_of_float(16384.0f)));
  }
};

// kElements values of one output type, moved as one access.
template <class Codec, uint32_t kElements>
struct alignas(sizeof(typename Codec::Bits) * kElements < 16 ? sizeof(typename Codec::Bits) * kElements : 16) Pack {
  typename Codec::Bits bits[kElements];
};

template <uint32_t kElements>
struct Sums {
  float value[kElements];

  PUTGET_PURE void add(const Sums& other) {
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) value[e] = value[e] + other.value[e];
  }
};

template <class Codec, uint32_t kElements>
PUTGET_PURE Sums<kElements> widen(const Pack<Codec, kElements>& pack) {
  Sums<kElements> sums;
  if constexpr (sizeof(typename Codec::Bits) == 2 && kElements % 2 == 0) {
    union {
      Pack<Codec, kElements> pack;
      uint32_t pair[kElements / 2];
    } both{pack};
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; e += 2) {
      Codec::widen_pair(both.pair[e / 2], sums.value[e], sums.value[e + 1]);
    }
  } else {
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) sums.value[e] = Codec::widen(pack.bits[e]);
  }
  return sums;
}

// A product that no compiler joins with the addition behind it: the sums must be the same bits everywhere.
PUTGET_PURE float times(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;  // compiled with -ffp-contract=off
#endif
}

// The scale of a block of which no element is larger than `largest`: the largest element becomes the largest FP8 value.
// Blocks of nothing but zeros have a scale too.
PUTGET_PURE float block_scale(float largest) {
  constexpr float kSmallest = 1e-30f;
  const float value = largest > kSmallest ? largest : kSmallest;
#if defined(__CUDA_ARCH__)
  // The rounded quotient without a branch: a guess and its remainder, which is exact. An infinity stays one.
  constexpr float kInverse = 1.0f / Fp8::kMax;
  const float guess = __fmul_rn(value, kInverse);
  const float quotient = __fmaf_rn(__fmaf_rn(-Fp8::kMax, guess, value), kInverse, guess);
  return value < float_of_bits(0x7f800000u) ? quotient : value;
#else
  return value / Fp8::kMax;
#endif
}

}  // namespace putget
