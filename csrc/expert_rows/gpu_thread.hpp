#pragma once
// A block has a tile of tokens. The first launch counts the rows of each tile and expert; in the second
// every block adds up what comes before its own, and then knows where each of its rows goes. The map of
// a tile becomes bits, a word of 32 tokens an expert: how many before a token is a count of bits.
#include <cstdint>

#include "common/thread.hpp"
#include "expert_rows/api.hpp"

namespace pyrl::expert_rows {

constexpr int kThreads = 256;  // per block, and tokens of a tile
constexpr int kWords = kThreads / 32;

// Tiles of all tokens, and of one more: starts has an entry behind the last.
PYRL_DEVICE int64_t num_tiles(int64_t tokens) { return tokens / kThreads + 1; }

PYRL_DEVICE int popcount(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Threads that add up an expert's tiles, each some of them.
PYRL_DEVICE int num_parts(const ExpertRowsArgs& a) {
  return a.experts < kThreads ? kThreads / int(a.experts) : 1;
}

// What a block keeps in shared memory, experts side by side.
struct Tile {
  uint32_t* bits;  // [kWords, experts] of 32 tokens each
  int32_t* first;  // [kWords, experts]: tokens of a word go to rows from here on
  int32_t *before, *total;  // [parts, experts] rows of tiles before, and of all

  PYRL_DEVICE Tile(const ExpertRowsArgs& a, void* memory) {
    const int experts = int(a.experts);
    bits = static_cast<uint32_t*>(memory);
    first = reinterpret_cast<int32_t*>(bits + kWords * experts);
    before = first + kWords * experts;
    total = before + num_parts(a) * experts;
  }
  static PYRL_DEVICE int64_t bytes(const ExpertRowsArgs& a) {
    return 8 * (kWords + num_parts(a)) * a.experts;
  }
};

// Both launches: threads of neighbouring experts read neighbours.
PYRL_DEVICE void tile_bits(const ExpertRowsArgs& a, int64_t tile, const Tile& s, ThreadIndex at) {
  const int experts = int(a.experts);
  for (int task = at.thread; task < kWords * experts; task += at.threads) {
    const int64_t token = tile * kThreads + task / experts * 32;
    const int64_t left = a.tokens - token, count = left < 32 ? left : 32;
    const uint8_t* from = a.map + token * experts + task % experts;
    uint32_t word = 0;
    if (count == 32) {
      PYRL_UNROLL
      for (int i = 0; i < 32; ++i) word |= uint32_t(from[i * experts] != 0) << i;
    } else {
      for (int i = 0; i < int(count); ++i) word |= uint32_t(from[i * experts] != 0) << i;
    }
    s.bits[task] = word;
  }
}

PYRL_DEVICE void tile_counts(const ExpertRowsArgs& a, int64_t tile, const Tile& s, int32_t* counts,
                             ThreadIndex at) {
  const int experts = int(a.experts);
  for (int e = at.thread; e < experts; e += at.threads) {
    int sum = 0;
    for (int w = 0; w < kWords; ++w) sum += popcount(s.bits[w * experts + e]);
    counts[tile * experts + e] = sum;
  }
}

// Rows of each expert in a part's tiles; the parts of an expert take turns.
PYRL_DEVICE void tile_sums(const ExpertRowsArgs& a, int64_t tile, const Tile& s, const int32_t* counts,
                           ThreadIndex at) {
  const int experts = int(a.experts), parts = num_parts(a);
  const int64_t tiles = num_tiles(a.tokens);
  for (int task = at.thread; task < parts * experts; task += at.threads) {
    int before = 0, total = 0;
    const int32_t* from = counts + task % experts;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
    for (int64_t i = task / experts; i < tiles; i += parts) {
      const int own = from[i * experts];
      total += own;
      before += i < tile ? own : 0;
    }
    s.before[task] = before, s.total[task] = total;
  }
}

// One sum an expert, in place of its first part.
PYRL_DEVICE void tile_totals(const ExpertRowsArgs& a, int64_t tile, const Tile& s, ThreadIndex at) {
  const int experts = int(a.experts), parts = num_parts(a);
  for (int e = at.thread; e < experts; e += at.threads) {
    for (int p = 1; p < parts; ++p) {
      s.before[e] += s.before[p * experts + e];
      s.total[e] += s.total[p * experts + e];
    }
    if (tile == 0) a.counts[e] = s.total[e];
  }
}

PYRL_DEVICE void tile_firsts(const ExpertRowsArgs& a, const Tile& s, ThreadIndex at) {
  const int experts = int(a.experts);
  for (int e = at.thread; e < experts; e += at.threads) {
    int first = s.before[e];
    for (int i = 0; i < e; ++i) first += s.total[i];
    for (int w = 0; w < kWords; ++w) {
      s.first[w * experts + e] = first;
      first += popcount(s.bits[w * experts + e]);
    }
  }
}

// A thread a token: where its rows are.
PYRL_DEVICE void tile_order(const ExpertRowsArgs& a, int64_t tile, const Tile& s, ThreadIndex at) {
  const int64_t t = tile * kThreads + at.thread, size = a.tokens * a.top_k;
  if (t <= a.tokens) a.starts[t] = t * a.top_k;
  if (t >= a.tokens) return;
  const int experts = int(a.experts), w = at.thread / 32 * experts, lane = at.thread % 32;
  int64_t* order = a.order + t * a.top_k;
  int64_t* const end = order + a.top_k;
  for (int e = 0; e < experts; ++e) {
    const uint32_t word = s.bits[w + e];
    if (!(word >> lane & 1) || order == end) continue;
    const int64_t m = s.first[w + e] + popcount(word & ((1u << lane) - 1));
    *order++ = m < size ? m : size - 1;
  }
}

// A thread 32 tokens of an expert: its rows are one after the other.
template <class Word>
PYRL_DEVICE void tile_rows(const ExpertRowsArgs& a, int64_t tile, const Tile& s, ThreadIndex at) {
  const int experts = int(a.experts);
  const int64_t size = a.tokens * a.top_k;
  for (int task = at.thread; task < kWords * experts; task += at.threads) {
    int64_t m = s.first[task];
    const int64_t token = tile * kThreads + task / experts * 32, e = task % experts;
    for (uint32_t word = s.bits[task]; word && m < size; word &= word - 1, ++m) {
      const int64_t t = token + popcount(~word & (word - 1));  // its lowest bit
      const int64_t place = t * experts + e;
      a.rows[m] = t;
      a.places[m] = place;
      static_cast<Word*>(a.weights)[m] = static_cast<const Word*>(a.probs)[place];
    }
  }
}

constexpr int kGradRows = 32;

PYRL_DEVICE int64_t num_grad_tiles(const ExpertRowsGradArgs& a) {
  return (a.tokens + kGradRows - 1) / kGradRows;
}

struct GradRows {
  int64_t first, rows;

  PYRL_DEVICE GradRows(const ExpertRowsGradArgs& a, int64_t tile) : first(tile * kGradRows) {
    rows = a.tokens - first < kGradRows ? a.tokens - first : kGradRows;
  }
};

// Zeros first, then the gradients take their places among them.
template <class Word>
PYRL_DEVICE void grad_zeros(const ExpertRowsGradArgs& a, int64_t tile, ThreadIndex at) {
  struct alignas(16) Vector {
    uint64_t low, high;
  };
  const GradRows g(a, tile);
  Word* to = static_cast<Word*>(a.out) + g.first * a.experts;
  const auto count = uint32_t(g.rows * a.experts);
  constexpr uint32_t kEach = 16 / sizeof(Word);
  const uint32_t whole = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? count / kEach : 0;
  for (uint32_t i = at.thread; i < whole; i += at.threads) reinterpret_cast<Vector*>(to)[i] = {0, 0};
  for (uint32_t i = whole * kEach + at.thread; i < count; i += at.threads) to[i] = 0;
}

template <class Word>
PYRL_DEVICE void grad_places(const ExpertRowsGradArgs& a, int64_t tile, ThreadIndex at) {
  const GradRows g(a, tile);
  for (int64_t i = at.thread; i < g.rows * a.top_k; i += at.threads) {
    const int64_t m = a.order[g.first * a.top_k + i];
    static_cast<Word*>(a.out)[a.places[m]] = static_cast<const Word*>(a.grad)[m];
  }
}

// Calls run(Word{}) with the type of an element.
template <class Run>
void with_word(int bytes, const Run& run) {
  if (bytes == 2) return run(uint16_t{});
  if (bytes == 4) return run(uint32_t{});
  run(uint64_t{});
}

}  // namespace pyrl::expert_rows
