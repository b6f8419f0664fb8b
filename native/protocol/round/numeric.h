// Output element types: how they become float32 and back, the same bits on every backend.
//
// A codec turns codes into the bits of float32 and back, in one lane or in several (lanes.h).
#pragma once

#include "protocol/round/lanes.h"

namespace putget {

constexpr uint32_t kInfinity = 0x7f800000u;  // bits of float32; what is larger, without its sign, is a NaN

struct Float32 {
  using Bits = uint32_t;
  template <class L>
  PUTGET_PURE static typename L::Word widened(const typename L::Word& code) {
    return code;
  }
  template <class L>
  PUTGET_PURE static typename L::Word narrowed(const typename L::Word& bits) {
    return bits;
  }
  PUTGET_PURE static float widen(Bits bits) { return float_of_bits(bits); }
  PUTGET_PURE static Bits narrow(float value) { return bits_of_float(value); }
};

struct BFloat16 {
  using Bits = uint16_t;
  template <class L>
  PUTGET_PURE static typename L::Word widened(const typename L::Word& code) {
    return code << 16;
  }
  // Round to nearest, ties to even; a NaN becomes the one that the hardware's conversion makes.
  template <class L>
  PUTGET_PURE static typename L::Word narrowed(const typename L::Word& bits) {
    const typename L::Word rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > kInfinity ? L::all(0x7fffu) : rounded;
  }
  // Two elements that were loaded as one word, the first in its lower half: an instruction each.
  PUTGET_PURE static void widen_pair(uint32_t both, float& first, float& second) {
    first = float_of_bits(both << 16);
    second = float_of_bits(both & 0xffff0000u);
  }
  PUTGET_PURE static float widen(Bits bits) { return float_of_bits(widened<Lane>(bits)); }
  PUTGET_PURE static Bits narrow(float value) { return static_cast<Bits>(narrowed<Lane>(bits_of_float(value))); }
};

struct Float16 {
  using Bits = uint16_t;
  template <class L>
  PUTGET_PURE static typename L::Word widened(const typename L::Word& code) {
    using Word = typename L::Word;
    const Word sign = (code & 0x8000u) << 16;
    const Word exponent = code & 0x7c00u;
    const Word magnitude = (code & 0x7fffu) << 13;
    // Subnormal: mantissa * 2^-24, exact in float32.
    const Word small = L::bits_of(L::to_float(code & 0x3ffu) * 5.9604644775390625e-08f);
    const Word normal = exponent == 0x7c00u ? magnitude | kInfinity : magnitude + (112u << 23);
    return sign | (exponent == 0u ? small : normal);
  }
  // As above.
  template <class L>
  PUTGET_PURE static typename L::Word narrowed(const typename L::Word& bits) {
    using Word = typename L::Word;
    const Word sign = (bits >> 16) & 0x8000u;
    const Word magnitude = bits & 0x7fffffffu;
    const Word normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    // Subnormal: the sum's last place is 2^-24, so float32 addition rounds as wanted.
    const Word small = L::bits_of(L::of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    Word code = magnitude < 0x38800000u ? small : normal;
    code = magnitude >= 0x477ff000u ? L::all(0x7c00u) : code;  // rounds to 65536 or more: infinity
    return magnitude > kInfinity ? L::all(0x7fffu) : sign | code;
  }
  PUTGET_PURE static float widen(Bits bits) {
#if defined(__CUDA_ARCH__)
    // Without branches: the exponents of both types are apart by a power of two, but for the largest one.
    constexpr float kApart = 5192296858534827628530496329220096.0f;  // 2^112
    const uint32_t rest = (bits & 0x7c00u) == 0x7c00u ? kInfinity : 0;
    const float magnitude = __fmul_rn(float_of_bits((bits & 0x7fffu) << 13), kApart);
    return float_of_bits(bits_of_float(magnitude) | rest | uint32_t{bits & 0x8000u} << 16);
#else
    return float_of_bits(widened<Lane>(bits));
#endif
  }
  PUTGET_PURE static void widen_pair(uint32_t both, float& first, float& second) {
    first = widen(static_cast<Bits>(both));
    second = widen(static_cast<Bits>(both >> 16));
  }
  PUTGET_PURE static Bits narrow(float value) { return static_cast<Bits>(narrowed<Lane>(bits_of_float(value))); }
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
  template <class L>
  PUTGET_PURE static typename L::Word widened(const typename L::Word& code) {
    using Word = typename L::Word;
    const Word sign = (code & 0x80u) << 24;
    const Word magnitude = code & 0x7fu;
    // Subnormal: mantissa * 2^-9, exact in float32.
    const Word small = L::bits_of(L::to_float(magnitude) * 0.001953125f);
    const Word normal = (magnitude << 20) + (120u << 23);
    return sign | (magnitude == 0x7fu ? L::all(0x7fc00000u) : magnitude < 8u ? small : normal);
  }
  // Round to nearest, ties to even; what is too large becomes the largest value; a NaN becomes 0x7f.
  template <class L>
  PUTGET_PURE static typename L::Word narrowed(const typename L::Word& bits) {
    using Word = typename L::Word;
    const Word sign = (bits >> 24) & 0x80u;
    const Word magnitude = bits & 0x7fffffffu;
    const Word normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u) >> 20;
    // Subnormal, below 2^-6: the sum's last place is 2^-9, so float32 addition rounds as wanted.
    const Word small = L::bits_of(L::of_bits(magnitude) + 16384.0f) - bits_of_float(16384.0f);
    Word code = magnitude < 0x3c800000u ? small : normal;
    code = magnitude >= 0x43e00000u ? L::all(0x7eu) : code;  // from 448 on
    return magnitude > kInfinity ? L::all(0x7fu) : sign | code;
  }
  PUTGET_PURE static float widen(Bits bits) { return float_of_bits(widened<Lane>(bits)); }
  PUTGET_PURE static Bits narrow(float value) { return static_cast<Bits>(narrowed<Lane>(bits_of_float(value))); }
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
#if defined(__CUDACC__)
    PUTGET_UNROLL
    for (uint32_t e = 0; e < kElements; ++e) value[e] = value[e] + other.value[e];
#else
    using L = Lanes<kElements>;
    L::store(value, L::load(value) + L::load(other.value));
#endif
  }
};

template <class Codec, uint32_t kElements>
PUTGET_PURE Sums<kElements> widen(const Pack<Codec, kElements>& pack) {
  Sums<kElements> sums;
#if !defined(__CUDACC__)
  using L = Lanes<kElements>;
  L::store(sums.value, L::of_bits(Codec::template widened<L>(L::load_codes(pack.bits))));
#else
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
#endif
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
