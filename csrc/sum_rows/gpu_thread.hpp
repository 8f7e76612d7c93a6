#pragma once
#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "sum_rows/api.hpp"

namespace pyrl {

// A thread of sum_rows, in three phases separated by __syncthreads(): a block reads where the terms of
// its rows begin, then which row of src each first term is, then the terms themselves. So what
// depends on each other is read once a block, not once a row.
constexpr int kSumThreads = 256;  // per block
constexpr int kSumUnroll = 4;     // rows per thread: all first terms are read before one is written
constexpr int kSumRows = 32;      // of a block, at least
constexpr int kSumMost = kSumUnroll * kSumThreads;  // and at most

// How the grid covers out. One block writes 2^lanes vectors of each of `rows` rows, neighbouring
// vectors by neighbouring threads.
struct SumGrid {
  SumRowsArgs args;
  int64_t vectors;  // in a row
  int64_t blocks;
  uint32_t across;  // blocks side by side in a row
  int wide, lanes;  // wide: vectors of 16 bytes, otherwise of one element
  int rows;         // of a block
};

struct SumShared {
  int64_t starts[kSumMost + 1];
  int64_t first[kSumMost];  // row of src; where there is none, not written
};

inline SumGrid plan_sum(const SumRowsArgs& s) {
  const int size = size_of(s.dtype);
  const uintptr_t low = reinterpret_cast<uintptr_t>(s.src) | reinterpret_cast<uintptr_t>(s.out) |
                         static_cast<uintptr_t>(s.columns * size) |
                         static_cast<uintptr_t>(s.stride);
  SumGrid g{s, 0, 0, 0, low % 16 == 0, 0, 0};
  g.vectors = g.wide ? s.columns * size / 16 : s.columns;
  while (g.lanes < 5 && (1 << g.lanes) < g.vectors) ++g.lanes;
  while ((2 << g.lanes) <= kSumThreads && g.vectors % (2 << g.lanes) == 0) ++g.lanes;
  g.across = uint32_t((g.vectors + (1 << g.lanes) - 1) >> g.lanes);
  const int at_once = kSumUnroll * (kSumThreads >> g.lanes);
  g.rows = at_once < kSumRows ? kSumRows : at_once;
  g.blocks = g.vectors == 0 ? 0 : g.across * ((s.num_out + g.rows - 1) / g.rows);
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

// The rows of a block.
struct SumTile {
  int64_t first;  // row of out
  uint32_t block;
  int count;

  PYRL_DEVICE SumTile(const SumGrid& g, ThreadIndex at) {
    const auto index = uint32_t(at.block), down = g.across == 1 ? index : index / g.across;
    block = index - down * g.across;
    first = int64_t(down) * g.rows;
    count = g.args.num_out - first < g.rows ? int(g.args.num_out - first) : g.rows;
  }
};

PYRL_DEVICE void sum_starts(const SumGrid& g, ThreadIndex at, SumShared& shared) {
  const SumTile tile(g, at);
  for (int r = at.thread; r <= tile.count; r += at.threads)
    shared.starts[r] = g.args.starts[tile.first + r];
}

PYRL_DEVICE void sum_firsts(const SumGrid& g, ThreadIndex at, SumShared& shared) {
  const SumTile tile(g, at);
  for (int r = at.thread; r < tile.count; r += at.threads)
    if (shared.starts[r] < shared.starts[r + 1]) shared.first[r] = g.args.order[shared.starts[r]];
}

template <class T, int Width>
PYRL_DEVICE void sum_tile(const SumGrid& g, ThreadIndex at, const SumShared& shared) {
  const SumRowsArgs& s = g.args;
  const SumTile tile(g, at);
  const int64_t v = (int64_t(tile.block) << g.lanes) + (at.thread & ((1 << g.lanes) - 1));
  if (v >= g.vectors) return;
  const int step = kSumThreads >> g.lanes;
  for (int begin = at.thread >> g.lanes; begin < tile.count; begin += kSumUnroll * step) {
    SumVector<T, Width> value[kSumUnroll];
    PYRL_UNROLL
    for (int u = 0; u < kSumUnroll; ++u) {
      const int r = begin + u * step;
      value[u] = r < tile.count && shared.starts[r] < shared.starts[r + 1]
                     ? sum_term<T, Width>(s, shared.first[r], v)
                     : SumVector<T, Width>{};
    }
    PYRL_UNROLL
    for (int u = 0; u < kSumUnroll; ++u) {
      const int r = begin + u * step;
      if (r >= tile.count) continue;
      const int64_t from = shared.starts[r] + 1, to = shared.starts[r + 1];
      if (from < to) {
        typename T::Acc acc[Width];
        for (int i = 0; i < Width; ++i) acc[i] = T::widen(value[u].x[i]);
        PYRL_NO_UNROLL
        for (int64_t j = from; j < to; ++j) {
          const auto term = sum_term<T, Width>(s, s.order[j], v);
          for (int i = 0; i < Width; ++i) acc[i] += T::widen(term.x[i]);
        }
        for (int i = 0; i < Width; ++i) value[u].x[i] = T::narrow(acc[i]);
      }
      auto* row = static_cast<typename T::Raw*>(s.out) + (tile.first + r) * s.columns;
      reinterpret_cast<SumVector<T, Width>*>(row)[v] = value[u];
    }
  }
}

template <class T>
PYRL_DEVICE void sum_thread(const SumGrid& g, ThreadIndex at, const SumShared& shared) {
  if (g.wide)
    sum_tile<T, 16 / int(sizeof(typename T::Raw))>(g, at, shared);
  else
    sum_tile<T, 1>(g, at, shared);
}

}  // namespace pyrl
