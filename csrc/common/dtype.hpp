#pragma once
// The one table of element types, and how a floating-point element becomes the number it is
// computed with and back (round to nearest, ties to even).
#include <cstdint>
#include <cstring>

#include "common/thread.hpp"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#ifndef PYRL_ISA  // of the sources that are compiled once
#define PYRL_ISA base
#endif

namespace pyrl {

enum class DType { u8, u16, i16, i32, i64, bf16, f16, f32, f64 };

PYRL_DEVICE constexpr int size_of(DType type) {
  return type == DType::u8 ? 1
         : type == DType::i32 || type == DType::f32 ? 4
         : type == DType::i64 || type == DType::f64 ? 8
                                                    : 2;
}

// Sources for several instruction sets include this: a namespace each keeps their copies apart.
inline namespace PYRL_ISA {

template <class To, class From>
PYRL_DEVICE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The conversions of halves are written for scalars and for the compiler's vector types: F is
// float or a vector of them, U the unsigned integer of its size. Halves are in the low 16 bits.
template <class F, class U>
PYRL_DEVICE F widen_bf16(U half) {
  return bits<F>(half << 16);
}

template <class U, class F>
PYRL_DEVICE U narrow_bf16(F x) {
  const U u = bits<U>(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = U{} + 0x7fc0u;
  return x == x ? rounded : nan;
}

template <class F, class U>
PYRL_DEVICE F widen_f16(U half) {
  const U body = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  const U finite = bits<U>(bits<F>(body) * 0x1p112f);  // moves the exponent, also of subnormals
  const U special = body | 0x7f800000u;
  return bits<F>(((half & 0x7c00u) == 0x7c00u ? special : finite) | sign);
}

template <class U, class F>
PYRL_DEVICE U narrow_f16(F x) {
  const U u = bits<U>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const F size = bits<F>(magnitude), smallest = F{} + 0x1p-14f, largest = F{} + 65520.f;
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U subnormal = bits<U>(size + 0.5f) - (126u << 23);  // the adder rounds to units of 2^-24
  const U inf = U{} + 0x7c00u, nan = U{} + 0x7e00u;
  U half = size < smallest ? subnormal : normal;
  half = size >= largest ? inf : half;
  half = x == x ? half : nan;
  return half | sign;
}

// Element types: Raw is the element in memory, Acc the type it is computed in. A pair is two
// neighbouring halves in a 32-bit word; on a GPU the hardware converts both at once.
template <class Float>
struct Same {
  using Raw = Float;
  using Acc = Float;
  static PYRL_DEVICE Acc widen(Raw x) { return x; }
  static PYRL_DEVICE Raw narrow(Acc x) { return x; }
};

using F32 = Same<float>;
using F64 = Same<double>;

struct BF16 {
  using Raw = uint16_t;
  using Acc = float;
  static PYRL_DEVICE Acc widen(Raw x) { return widen_bf16<float>(uint32_t(x)); }
  static PYRL_DEVICE Raw narrow(Acc x) { return Raw(narrow_bf16<uint32_t>(x)); }
  static PYRL_DEVICE void widen_pair(uint32_t word, float* v) {
    v[0] = bits<float>(word << 16);
    v[1] = bits<float>(word & 0xffff0000u);
  }
  static PYRL_DEVICE uint32_t narrow_pair(const float* v) {
#ifdef __CUDA_ARCH__
    return bits<uint32_t>(__floats2bfloat162_rn(v[0], v[1]));
#else
    return narrow(v[0]) | uint32_t(narrow(v[1])) << 16;
#endif
  }
};

struct F16 {
  using Raw = uint16_t;
  using Acc = float;
  static PYRL_DEVICE Acc widen(Raw x) { return widen_f16<float>(uint32_t(x)); }
  static PYRL_DEVICE Raw narrow(Acc x) { return Raw(narrow_f16<uint32_t>(x)); }
  static PYRL_DEVICE void widen_pair(uint32_t word, float* v) {
#ifdef __CUDA_ARCH__
    const __half2 both = bits<__half2>(word);
    v[0] = __low2float(both);
    v[1] = __high2float(both);
#else
    v[0] = widen(Raw(word));
    v[1] = widen(Raw(word >> 16));
#endif
  }
  static PYRL_DEVICE uint32_t narrow_pair(const float* v) {
#ifdef __CUDA_ARCH__
    return bits<uint32_t>(__floats2half2_rn(v[0], v[1]));
#else
    return narrow(v[0]) | uint32_t(narrow(v[1])) << 16;
#endif
  }
};

}  // namespace PYRL_ISA
}  // namespace pyrl
