#pragma once
#include "common/thread.hpp"
#include "gather_rows/api.hpp"

namespace pyrl {

constexpr int kGatherFields = 32;    // per launch: their descriptions are kernel parameters
constexpr int kGatherThreads = 256;  // per block
constexpr int kGatherUnroll = 4;     // rows per thread, all read before the first is written

struct alignas(16) Word16 {
  uint64_t low, high;
};

// How blocks share a field. One block moves a tile: 2^lanes words of each of
// kGatherUnroll * (kGatherThreads >> lanes) rows, neighbouring words by neighbouring threads.
struct GatherPart {
  Field field;
  int64_t words;  // of 2^word bytes in a row
  int64_t first;  // its first block
  uint32_t across;  // tiles side by side in a row
  int16_t word, lanes;
};

struct Gather {
  const int64_t* rows;
  int64_t num_out, blocks;
  int count;
  GatherPart part[kGatherFields];
};

inline int64_t up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

// The widest word that divides the row and every address: a view may start anywhere.
inline int word_of(const Field& f) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(f.src) | reinterpret_cast<uintptr_t>(f.fill) |
                         reinterpret_cast<uintptr_t>(f.out) | static_cast<uintptr_t>(f.row_bytes) |
                         static_cast<uintptr_t>(f.stride);
  int word = 0;
  while (word < 4 && (bits >> word & 1) == 0) ++word;
  return word;
}

// The launch for `count` fields, at most kGatherFields.
inline Gather plan_gather(const Field* fields, int count, const int64_t* rows, int64_t num_out) {
  Gather g{rows, num_out, 0, 0, {}};
  for (int f = 0; f < count; ++f) {
    if (fields[f].row_bytes == 0) continue;
    const int word = word_of(fields[f]);
    const int64_t words = fields[f].row_bytes >> word;
    int lanes = 0;  // the fewest that hold a row, up to a warp; then the most without idle threads
    while (lanes < 5 && (1 << lanes) < words) ++lanes;
    while ((2 << lanes) <= kGatherThreads && words % (2 << lanes) == 0) ++lanes;
    const int64_t across = up(words, 1 << lanes);
    g.part[g.count++] = {fields[f], words, g.blocks, uint32_t(across), int16_t(word),
                         int16_t(lanes)};
    g.blocks += across * up(num_out, kGatherUnroll * (kGatherThreads >> lanes));
  }
  return g;
}

// Word `w` of a row: of the source, of the fill, or of the pattern.
template <class Word>
PYRL_DEVICE Word read_word(const Field& f, int64_t row, int64_t w) {
  const std::byte* from = row < 0 ? f.fill : f.src + row * f.stride;
  if (from) return reinterpret_cast<const Word*>(from)[w];
  if constexpr (sizeof(Word) == 16) {
    return {f.pattern, f.pattern};
  } else {
    return Word(f.pattern >> (8 * (w * sizeof(Word) % 8)));
  }
}

template <class Word>
PYRL_DEVICE void gather_tile(const Gather& g, const GatherPart& p, uint32_t tile, int thread) {
  const Field& f = p.field;
  const uint32_t down = p.across == 1 ? tile : tile / p.across;
  const int64_t w = (int64_t(tile - down * p.across) << p.lanes) + (thread & ((1 << p.lanes) - 1));
  if (w >= p.words) return;
  const int step = kGatherThreads >> p.lanes;
  const int64_t first = int64_t(down) * kGatherUnroll * step + (thread >> p.lanes);
  int64_t row[kGatherUnroll];
  Word value[kGatherUnroll];
  PYRL_UNROLL
  for (int u = 0; u < kGatherUnroll; ++u) {
    const int64_t m = first + u * step;
    row[u] = m < g.num_out ? g.rows[m] : -1;
  }
  PYRL_UNROLL
  for (int u = 0; u < kGatherUnroll; ++u)
    value[u] = read_word<Word>(f, row[u], w);
  PYRL_UNROLL
  for (int u = 0; u < kGatherUnroll; ++u) {
    const int64_t m = first + u * step;
    if (m < g.num_out) reinterpret_cast<Word*>(f.out + m * f.row_bytes)[w] = value[u];
  }
}

PYRL_DEVICE void gather_thread(const Gather& g, ThreadIndex at) {
  int k = 0;
  while (k + 1 < g.count && at.block >= g.part[k + 1].first) ++k;
  const GatherPart& p = g.part[k];
  const auto tile = uint32_t(at.block - p.first);
  switch (p.word) {
    case 4: return gather_tile<Word16>(g, p, tile, at.thread);
    case 3: return gather_tile<uint64_t>(g, p, tile, at.thread);
    case 2: return gather_tile<uint32_t>(g, p, tile, at.thread);
    case 1: return gather_tile<uint16_t>(g, p, tile, at.thread);
    default: return gather_tile<uint8_t>(g, p, tile, at.thread);
  }
}

// Calls launch(gather) for every kGatherFields fields.
template <class Launch>
void each_gather(const Field* fields, int count, const int64_t* rows, int64_t num_out,
                 const Launch& launch) {
  for (int f = 0; f < count; f += kGatherFields) {
    const int some = count - f < kGatherFields ? count - f : kGatherFields;
    const Gather gather = plan_gather(fields + f, some, rows, num_out);
    if (gather.blocks > 0) launch(gather);
  }
}

}  // namespace pyrl
