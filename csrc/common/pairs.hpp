#pragma once
// Rows of float32 or bfloat16 for sources named cpu_simd.cpp, two vectors at a time; the rest of a
// row goes through a buffer.
#include "common/dtype.hpp"
#include "common/simd.hpp"

namespace pyrl {
namespace {

constexpr int kLanes = PYRL_VECTOR_BYTES / 4;
constexpr int kPair = 2 * kLanes;
using F = Vector<float>;
using U = Vector<uint32_t>;

// Two vectors: kPair neighbouring elements in any order.
struct Pair {
  F a, b;
};

struct SimdF32 {
  using Raw = float;
  static Pair load(const Raw* from) {
    Pair x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  }
  static void store(Pair x, Raw* to) { __builtin_memcpy(to, &x, sizeof x); }
};

struct SimdBF16 {  // even elements, odd elements
  using Raw = uint16_t;
  static Pair load(const Raw* from) {
    U words;
    __builtin_memcpy(&words, from, sizeof words);
    return {bits<F>(words << 16), bits<F>(words & 0xffff0000u)};
  }
  static void store(Pair x, Raw* to) {
    const U words = narrow_bf16<U>(x.a) | (narrow_bf16<U>(x.b) << 16);
    __builtin_memcpy(to, &words, sizeof words);
  }
};

template <class T>
inline Pair load_rest(const typename T::Raw* from, int64_t count) {
  typename T::Raw lanes[kPair] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return T::load(lanes);
}

template <class T>
inline void store_rest(Pair x, typename T::Raw* to, int64_t count) {
  typename T::Raw lanes[kPair];
  T::store(x, lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

inline float total(F x) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

}  // namespace
}  // namespace pyrl
