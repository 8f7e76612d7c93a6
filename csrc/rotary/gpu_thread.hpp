#pragma once
#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "rotary/api.hpp"

namespace pyrl {

constexpr int kRotaryThreads = 256;  // per block

// How the grid covers the outputs. A thread turns the pairs of two vectors, or copies a vector; the
// threads of a row take the heads of both parts in turn.
struct RotaryGrid {
  RotaryArgs args;
  int64_t pairs;       // units of a head that turn
  int64_t units[2];    // of a head
  int64_t first, row;  // units of the first part in a row, and of both
  int64_t blocks;
  bool wide;  // vectors of 16 bytes, otherwise of one element
};

inline RotaryGrid plan_rotary(const RotaryArgs& r) {
  RotaryGrid g{r, 0, {0, 0}, 0, 0, 0, false};
  const int64_t size = size_of(r.dtype);
  uintptr_t low = reinterpret_cast<uintptr_t>(r.turns) | uintptr_t(r.turned / 2 * size);
  for (const RotaryPart& p : r.parts)
    low |= reinterpret_cast<uintptr_t>(p.src) | reinterpret_cast<uintptr_t>(p.out) |
           uintptr_t(p.row * size) | uintptr_t(p.head * size) | uintptr_t(p.width * size);
  g.wide = low % 16 == 0;
  const int64_t vector = g.wide ? 16 / size : 1;
  g.pairs = r.turned / 2 / vector;
  for (int i = 0; i < 2; ++i) g.units[i] = g.pairs + (r.parts[i].width - r.turned) / vector;
  g.first = g.units[0] * r.parts[0].heads;
  g.row = g.first + g.units[1] * r.parts[1].heads;
  g.blocks = (r.rows * g.row + kRotaryThreads - 1) / kRotaryThreads;
  return g;
}

template <class T, int Width>
struct alignas(Width * sizeof(typename T::Raw)) RotaryVector {
  typename T::Raw x[Width];
};

template <class T, int Width, bool From, bool To>
PYRL_DEVICE void rotary_unit(const RotaryGrid& g, int64_t t, int64_t unit) {
  using Acc = typename T::Acc;
  using Vector = RotaryVector<T, Width>;
  const RotaryArgs& r = g.args;
  const bool second = unit >= g.first;
  const RotaryPart& part = r.parts[second];
  const auto local = uint32_t(second ? unit - g.first : unit), units = uint32_t(g.units[second]);
  const uint32_t h = local / units, u = local - h * units;
  const auto* src = static_cast<const typename T::Raw*>(part.src) + t * part.row + h * part.head;
  auto* out = static_cast<typename T::Raw*>(part.out) + (t * part.heads + h) * part.width;
  const int64_t plain = part.width - r.turned, half = r.turned / 2;
  if (u >= g.pairs) {
    const int64_t at = (u - g.pairs) * int64_t(Width) + (r.last ? 0 : r.turned);
    *reinterpret_cast<Vector*>(out + at) = *reinterpret_cast<const Vector*>(src + at);
    return;
  }
  src += r.last ? plain : 0;
  out += r.last ? plain : 0;
  const int64_t j = u * int64_t(Width);
  const Vector low = *reinterpret_cast<const Vector*>(src + (From ? 2 * j : j));
  const Vector high = *reinterpret_cast<const Vector*>(src + (From ? 2 * j + Width : j + half));
  const Acc* turns = static_cast<const Acc*>(r.turns) + t * r.turned + j;
  Vector x, y;
  PYRL_UNROLL
  for (int i = 0; i < Width; ++i) {
    const auto at = [&](int k) { return k < Width ? low.x[k] : high.x[k - Width]; };
    const Acc a = T::widen(From ? at(2 * i) : low.x[i]), b = T::widen(From ? at(2 * i + 1) : high.x[i]);
    const Acc c = turns[i], s = r.back ? -turns[half + i] : turns[half + i];
    const auto left = T::narrow(a * c - b * s), right = T::narrow(b * c + a * s);
    if (To) {
      (2 * i < Width ? x.x[2 * i] : y.x[2 * i - Width]) = left;
      (2 * i + 1 < Width ? x.x[2 * i + 1] : y.x[2 * i + 1 - Width]) = right;
    } else {
      x.x[i] = left;
      y.x[i] = right;
    }
  }
  *reinterpret_cast<Vector*>(out + (To ? 2 * j : j)) = x;
  *reinterpret_cast<Vector*>(out + (To ? 2 * j + Width : j + half)) = y;
}

template <class T, int Width, bool From, bool To>
PYRL_DEVICE void rotary_at(const RotaryGrid& g, ThreadIndex at) {
  const int64_t n = at.block * kRotaryThreads + at.thread;
  if (n >= g.args.rows * g.row) return;
  const int64_t t = n >> 32 ? n / g.row : uint32_t(n) / uint32_t(g.row);
  rotary_unit<T, Width, From, To>(g, t, n - t * g.row);
}

template <class T, bool From, bool To>
PYRL_DEVICE void rotary_thread(const RotaryGrid& g, ThreadIndex at) {
  if (g.wide)
    rotary_at<T, 16 / int(sizeof(typename T::Raw)), From, To>(g, at);
  else
    rotary_at<T, 1, From, To>(g, at);
}

// Calls walk.template run<T, From, To>() for the call's dtype and places of pairs.
template <class T, class Walk>
void with_pairs(const RotaryArgs& r, const Walk& walk) {
  if (r.src_neighbours)
    r.out_neighbours ? walk.template run<T, true, true>() : walk.template run<T, true, false>();
  else
    r.out_neighbours ? walk.template run<T, false, true>() : walk.template run<T, false, false>();
}

template <class Walk>
void with_rotary(const RotaryArgs& r, const Walk& walk) {
  switch (r.dtype) {
    case DType::f32: return with_pairs<F32>(r, walk);
    case DType::bf16: return with_pairs<BF16>(r, walk);
    case DType::f16: return with_pairs<F16>(r, walk);
    default: return with_pairs<F64>(r, walk);
  }
}

}  // namespace pyrl
