#pragma once
// Element types of sum_rows: how one becomes the number it is added as, and back (round to nearest
// even). In an unnamed namespace, since sources for several instruction sets include it.
#include <cstring>

#include "device.hpp"

namespace pyrl {
namespace {

template <class To, class From>
PYRL_DEVICE To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

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
  static PYRL_DEVICE Acc widen(Raw x) { return bits<float>(uint32_t(x) << 16); }
  static PYRL_DEVICE Raw narrow(Acc x) {
    const uint32_t u = bits<uint32_t>(x), rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return Raw(x == x ? rounded : 0x7fc0u);
  }
};

struct F16 {
  using Raw = uint16_t;
  using Acc = float;
  static PYRL_DEVICE Acc widen(Raw x) {
    const uint32_t body = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
    const uint32_t finite = bits<uint32_t>(bits<float>(body) * 0x1p112f);  // shifts the exponent
    return bits<float>(((x & 0x7c00u) == 0x7c00u ? body | 0x7f800000u : finite) | sign);
  }
  static PYRL_DEVICE Raw narrow(Acc x) {
    const uint32_t u = bits<uint32_t>(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    const float size = bits<float>(a);
    const uint32_t normal = (a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
    const uint32_t small = bits<uint32_t>(size + 0.5f) - (126u << 23);  // in units of 2^-24
    uint32_t h = size < 0x1p-14f ? small : normal;
    h = size >= 65520.f ? 0x7c00u : h;
    h = x == x ? h : 0x7e00u;
    return Raw(h | sign);
  }
};

}  // namespace
}  // namespace pyrl
