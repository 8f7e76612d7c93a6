#pragma once
#include <cmath>
#include <type_traits>

#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "swiglu/api.hpp"

namespace pyrl {

constexpr int kSwigluThreads = 256;  // per block
constexpr int kSwigluUnroll = 2;     // vectors of gates, and of ups, that a thread reads ahead

// How the grid covers the rows: 2^lanes threads a row, at most a warp, each with every 2^lanes-th
// vector; kSwigluThreads >> lanes rows a block.
struct SwigluGrid {
  SwigluArgs args;
  int64_t vectors;  // in half a row
  int64_t blocks;
  int wide, lanes;  // wide: vectors of 16 bytes, otherwise of one element
};

inline SwigluGrid plan_swiglu(const SwigluArgs& s) {
  const int size = size_of(s.dtype);
  const uintptr_t low = reinterpret_cast<uintptr_t>(s.gate_up) |
                        reinterpret_cast<uintptr_t>(s.grad) | reinterpret_cast<uintptr_t>(s.out) |
                        static_cast<uintptr_t>(s.width * size);
  SwigluGrid g{s, 0, 0, low % 16 == 0, 0};
  g.vectors = g.wide ? s.width * size / 16 : s.width;
  while (g.lanes < 5 && (1 << g.lanes) < g.vectors) ++g.lanes;
  const int64_t rows = kSwigluThreads >> g.lanes;
  g.blocks = (s.rows + rows - 1) / rows;
  return g;
}

struct SwigluLane {
  int64_t row;
  int lane;

  PYRL_DEVICE SwigluLane(const SwigluGrid& g, const ThreadIndex& at)
      : row(at.block * (kSwigluThreads >> g.lanes) + (at.thread >> g.lanes)),
        lane(at.thread & ((1 << g.lanes) - 1)) {}
};

// 16 bytes as numbers, or one element.
template <class T, bool Wide>
struct SwigluVector {
  static constexpr int kCount = 16 / int(sizeof(typename T::Raw));
  struct alignas(16) Memory {
    uint32_t word[4];
  };
  static PYRL_DEVICE void widen(const Memory& from, float (&v)[kCount]) {
    PYRL_UNROLL
    for (int i = 0; i < 4; ++i)
      if constexpr (kCount == 4)
        v[i] = bits<float>(from.word[i]);
      else
        T::widen_pair(from.word[i], v + 2 * i);
  }
  static PYRL_DEVICE Memory narrow(const float (&v)[kCount]) {
    Memory to;
    PYRL_UNROLL
    for (int i = 0; i < 4; ++i)
      if constexpr (kCount == 4)
        to.word[i] = bits<uint32_t>(v[i]);
      else
        to.word[i] = T::narrow_pair(v + 2 * i);
    return to;
  }
};

template <class T>
struct SwigluVector<T, false> {
  static constexpr int kCount = 1;
  struct Memory {
    typename T::Raw x;
  };
  static PYRL_DEVICE void widen(const Memory& from, float (&v)[1]) { v[0] = T::widen(from.x); }
  static PYRL_DEVICE Memory narrow(const float (&v)[1]) { return {T::narrow(v[0])}; }
};

PYRL_DEVICE float swiglu_exp(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  return std::exp(x);
#endif
}

PYRL_DEVICE float swiglu_sigmoid(float x) { return 1.f / (1.f + swiglu_exp(-x)); }

// This thread's vectors of its row.
template <class T, bool Wide>
PYRL_DEVICE void swiglu_forward(const SwigluGrid& g, const ThreadIndex& at) {
  using V = SwigluVector<T, Wide>;
  using Memory = typename V::Memory;
  const SwigluLane own(g, at);
  if (own.row >= g.args.rows) return;
  const auto* gates = static_cast<const Memory*>(g.args.gate_up) + 2 * own.row * g.vectors;
  const auto* ups = gates + g.vectors;
  auto* out = static_cast<Memory*>(g.args.out) + own.row * g.vectors;
  const float weight = g.args.weight ? g.args.weight[own.row] : 1.f;
  for (int64_t v = own.lane; v < g.vectors; v += int64_t(kSwigluUnroll) << g.lanes) {
    Memory gate[kSwigluUnroll], up[kSwigluUnroll];
    PYRL_UNROLL
    for (int u = 0; u < kSwigluUnroll; ++u)
      if (const int64_t i = v + (int64_t(u) << g.lanes); i < g.vectors) {
        gate[u] = gates[i];
        up[u] = ups[i];
      }
    PYRL_UNROLL
    for (int u = 0; u < kSwigluUnroll; ++u) {
      const int64_t i = v + (int64_t(u) << g.lanes);
      if (i >= g.vectors) continue;
      float x[V::kCount], y[V::kCount];
      V::widen(gate[u], x);
      V::widen(up[u], y);
      PYRL_UNROLL
      for (int k = 0; k < V::kCount; ++k) x[k] = x[k] * swiglu_sigmoid(x[k]) * y[k] * weight;
      out[i] = V::narrow(x);
    }
  }
}

// The derivatives of this thread's vectors. Returns its part of the weight's.
template <class T, bool Wide>
PYRL_DEVICE float swiglu_grad(const SwigluGrid& g, const ThreadIndex& at) {
  using V = SwigluVector<T, Wide>;
  using Memory = typename V::Memory;
  const SwigluLane own(g, at);
  if (own.row >= g.args.rows) return 0.f;
  const auto* gates = static_cast<const Memory*>(g.args.gate_up) + 2 * own.row * g.vectors;
  const auto* ups = gates + g.vectors;
  const auto* grads = static_cast<const Memory*>(g.args.grad) + own.row * g.vectors;
  auto* out = static_cast<Memory*>(g.args.out) + 2 * own.row * g.vectors;
  const float weight = g.args.weight ? g.args.weight[own.row] : 1.f;
  float sum = 0;
  for (int64_t v = own.lane; v < g.vectors; v += int64_t(kSwigluUnroll) << g.lanes) {
    Memory gate[kSwigluUnroll], up[kSwigluUnroll], grad[kSwigluUnroll];
    PYRL_UNROLL
    for (int u = 0; u < kSwigluUnroll; ++u)
      if (const int64_t i = v + (int64_t(u) << g.lanes); i < g.vectors) {
        gate[u] = gates[i];
        up[u] = ups[i];
        grad[u] = grads[i];
      }
    PYRL_UNROLL
    for (int u = 0; u < kSwigluUnroll; ++u) {
      const int64_t i = v + (int64_t(u) << g.lanes);
      if (i >= g.vectors) continue;
      float x[V::kCount], y[V::kCount], t[V::kCount];
      V::widen(gate[u], x);
      V::widen(up[u], y);
      V::widen(grad[u], t);
      PYRL_UNROLL
      for (int k = 0; k < V::kCount; ++k) {
        const float s = swiglu_sigmoid(x[k]), silu = x[k] * s, both = t[k] * weight;
        sum += t[k] * (silu * y[k]);
        x[k] = both * y[k] * (s + silu * (1.f - s));
        y[k] = both * silu;
      }
      out[i] = V::narrow(x);
      out[i + g.vectors] = V::narrow(y);
    }
  }
  return sum;
}

// Calls run(type, wide) with the types of a grid.
template <class Run>
void swiglu_types(const SwigluGrid& g, const Run& run) {
  const auto with = [&](auto type) {
    if (g.wide)
      run(type, std::true_type());
    else
      run(type, std::false_type());
  };
  if (g.args.dtype == DType::f32)
    with(F32());
  else
    with(BF16());
}

}  // namespace pyrl
