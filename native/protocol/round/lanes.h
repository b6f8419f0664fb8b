// One element or several at a time: what numeric.h is written over, so that a CPU's vector instructions run the same
// text as a thread of a GPU does. On a CPU by the compiler's vector extensions, for whatever instructions it is told
// of.
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

// One.
struct Lane {
  using Word = uint32_t;
  using Float = float;
  PUTGET_PURE static Word all(uint32_t value) { return value; }
  PUTGET_PURE static Float of_bits(Word bits) { return float_of_bits(bits); }
  PUTGET_PURE static Word bits_of(Float value) { return bits_of_float(value); }
  PUTGET_PURE static Float to_float(Word number) { return static_cast<float>(number); }
};

#if !defined(__CUDACC__)

// So many: a power of two. A comparison gives a mask, so that `?:` chooses in each lane.
template <uint32_t kLanes>
struct Lanes {
  template <class Type>
  struct Of {
    typedef Type Vector __attribute__((vector_size(kLanes * sizeof(Type))));
  };
  using Word = typename Of<uint32_t>::Vector;
  using Float = typename Of<float>::Vector;

  static Word all(uint32_t value) { return Word{} + value; }
  static Float of_bits(const Word& bits) { return reinterpret_cast<Float>(bits); }
  static Word bits_of(const Float& value) { return reinterpret_cast<Word>(value); }
  static Float to_float(const Word& number) { return __builtin_convertvector(number, Float); }

  static Float load(const float* from) {
    Float value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  static void store(float* to, const Float& value) { __builtin_memcpy(to, &value, sizeof(value)); }
  // Codes are unsigned integers of any size.
  template <class Bits>
  static Word load_codes(const Bits* from) {
    typename Of<Bits>::Vector codes;
    __builtin_memcpy(&codes, from, sizeof(codes));
    return __builtin_convertvector(codes, Word);
  }
  template <class Bits>
  static void store_codes(Bits* to, const Word& words) {
    const auto codes = __builtin_convertvector(words, typename Of<Bits>::Vector);
    __builtin_memcpy(to, &codes, sizeof(codes));
  }

  // The largest one of all lanes.
  static uint32_t largest(const Word& words) {
    if constexpr (kLanes == 1) {
      return words[0];
    } else {
      using Half = Lanes<kLanes / 2>;
      typename Half::Word half[2];
      __builtin_memcpy(half, &words, sizeof(words));
      return Half::largest(half[0] > half[1] ? half[0] : half[1]);
    }
  }
};

#endif

}  // namespace putget
