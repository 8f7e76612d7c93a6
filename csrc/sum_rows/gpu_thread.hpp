#pragma once
#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "sum_rows/api.hpp"

namespace pyrl {

constexpr int kSumThreads = 256;  // per block
constexpr int kSumUnroll = 4;     // rows per thread: all first terms are read before one is written

// How the grid covers out. One block writes 2^lanes vectors of each of
// kSumUnroll * (kSumThreads >> lanes) rows, neighbouring vectors by neighbouring threads.
struct SumGrid {
  SumRowsArgs args;
  int64_t vectors;  // in a row
  int64_t blocks;
  uint32_t across;  // blocks side by side in a row
  int wide, lanes;  // wide: vectors of 16 bytes, otherwise of one element
};

inline SumGrid plan_sum(const SumRowsArgs& s) {
  const int size = size_of(s.dtype);
  const uintptr_t low = reinterpret_cast<uintptr_t>(s.src) | reinterpret_cast<uintptr_t>(s.out) |
                         static_cast<uintptr_t>(s.columns * size) |
                         static_cast<uintptr_t>(s.stride);
  SumGrid g{s, 0, 0, 0, low % 16 == 0, 0};
  g.vectors = g.wide ? s.columns * size / 16 : s.columns;
  while (g.lanes < 5 && (1 << g.lanes) < g.vectors) ++g.lanes;
  while ((2 << g.lanes) <= kSumThreads && g.vectors % (2 << g.lanes) == 0) ++g.lanes;
  g.across = uint32_t((g.vectors + (1 << g.lanes) - 1) >> g.lanes);
  const int64_t rows = kSumUnroll * (kSumThreads >> g.lanes);
  g.blocks = g.vectors == 0 ? 0 : g.across * ((s.num_out + rows - 1) / rows);
  return g;
}

template <class T, int Width>
struct alignas(Width * sizeof(typename T::Raw)) SumVector {
  typename T::Raw x[Width];
};

template <class T, int Width>
PYRL_DEVICE SumVector<T, Width> sum_term(const SumRowsArgs& s, int64_t m, int64_t v) {
  const char* row = static_cast<const char*>(s.src) + m * s.stride;
  return reinterpret_cast<const SumVector<T, Width>*>(row)[v];
}

template <class T, int Width>
PYRL_DEVICE void sum_tile(const SumGrid& g, ThreadIndex at) {
  const SumRowsArgs& s = g.args;
  const auto block = uint32_t(at.block), down = g.across == 1 ? block : block / g.across;
  const int64_t v =
      (int64_t(block - down * g.across) << g.lanes) + (at.thread & ((1 << g.lanes) - 1));
  if (v >= g.vectors) return;
  const int step = kSumThreads >> g.lanes;
  const int64_t first = int64_t(down) * kSumUnroll * step + (at.thread >> g.lanes);
  int64_t from[kSumUnroll], to[kSumUnroll];
  SumVector<T, Width> value[kSumUnroll];
  PYRL_UNROLL
  for (int u = 0; u < kSumUnroll; ++u) {
    const int64_t n = first + u * step;
    from[u] = n < s.num_out ? s.starts[n] : 0;
    to[u] = n < s.num_out ? s.starts[n + 1] : 0;
  }
  PYRL_UNROLL
  for (int u = 0; u < kSumUnroll; ++u)
    value[u] = from[u] < to[u] ? sum_term<T, Width>(s, s.order[from[u]], v)
                               : SumVector<T, Width>{};
  PYRL_UNROLL
  for (int u = 0; u < kSumUnroll; ++u) {
    const int64_t n = first + u * step;
    if (n >= s.num_out) continue;
    if (to[u] - from[u] > 1) {
      typename T::Acc acc[Width];
      for (int i = 0; i < Width; ++i) acc[i] = T::widen(value[u].x[i]);
      for (int64_t j = from[u] + 1; j < to[u]; ++j) {
        const auto term = sum_term<T, Width>(s, s.order[j], v);
        for (int i = 0; i < Width; ++i) acc[i] += T::widen(term.x[i]);
      }
      for (int i = 0; i < Width; ++i) value[u].x[i] = T::narrow(acc[i]);
    }
    auto* row = static_cast<typename T::Raw*>(s.out) + n * s.columns;
    reinterpret_cast<SumVector<T, Width>*>(row)[v] = value[u];
  }
}

template <class T>
PYRL_DEVICE void sum_thread(const SumGrid& g, ThreadIndex at) {
  if (g.wide)
    sum_tile<T, 16 / int(sizeof(typename T::Raw))>(g, at);
  else
    sum_tile<T, 1>(g, at);
}

}  // namespace pyrl
