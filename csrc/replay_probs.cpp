#include "replay_probs.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>

#include "parallel.hpp"
#include "replay_probs_device.hpp"

namespace pyrl {
namespace {

constexpr int64_t kTileBytes = 1 << 14;     // zeroed together, written into while in the cache
constexpr int64_t kBytesPerThread = 1 << 17;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// torch adds the columns of a row in 32-byte vectors, and those, or the elements of a shorter row,
// in four partial sums.
struct CpuOrder {
  template <class A>
  static A partial(const A* terms, int count, int step) {
    A sums[4] = {};
    const int grouped = count / 4 * 4;
    for (int i = 0; i < grouped; ++i) sums[i % 4] += terms[i * step];
    for (int i = grouped; i < count; ++i) sums[0] += terms[i * step];
    return sums[0] + sums[1] + sums[2] + sums[3];
  }

  template <class A>
  static A sum(const Slots<A>& s, int count) {
    constexpr int kLanes = 32 / sizeof(A);
    if (count < kLanes) return partial(s.terms, count, 1);
    A sum = 0;
    for (int i = count / kLanes * kLanes; i < count; ++i) sum += s.terms[i];
    for (int lane = 0; lane < kLanes; ++lane)
      sum += partial(s.terms + lane, count / kLanes, kLanes);
    return sum;
  }
};

// Returns the first entry of ids outside the experts, or kNone.
template <class A, class Word>
int64_t replay(const Replay& r, int64_t begin, int64_t end) {
  A values[kMaxTopK], terms[kMaxTopK];
  int32_t ids[kMaxTopK];
  const Slots<A> slots{values, terms, ids, 1};
  const int64_t tile = kTileBytes / (r.experts * int64_t(sizeof(Word)) + 1) + 1;
  for (int64_t m = begin; m < end; m += tile) {
    const int64_t stop = std::min(m + tile, end);
    auto* out = static_cast<Word*>(r.out) + m * r.experts;
    uint8_t* map = r.map ? r.map + m * r.experts : nullptr;
    std::memset(out, 0, (stop - m) * r.experts * sizeof(Word));
    if (map) std::memset(map, 0, (stop - m) * r.experts);
    for (int64_t row = m; row < stop; ++row, out += r.experts) {
      for (int64_t i = row * r.top_k; i < (row + 1) * r.top_k; ++i)
        if (uint64_t(load(r.ids, r.id, i)) >= uint64_t(r.experts)) return i;
      replay_row<CpuOrder>(r, row, slots);
      for (int j = 0; j < int(r.top_k); ++j) out[ids[j]] = word_of<Word>(values[j], r.to);
      if (!map) continue;
      for (int j = 0; j < int(r.top_k); ++j) map[ids[j]] = 1;
      map += r.experts;
    }
  }
  return kNone;
}

template <class A>
int64_t replay_rows(const Replay& r, int64_t begin, int64_t end) {
  return r.to == Real::f64   ? replay<A, uint64_t>(r, begin, end)
         : r.to == Real::f32 ? replay<A, uint32_t>(r, begin, end)
                             : replay<A, uint16_t>(r, begin, end);
}

}  // namespace

void replay_probs_cpu(const Replay& r, int threads) {
  std::atomic<int64_t> bad{kNone};
  const int64_t grain = kBytesPerThread / (r.experts * 5 + 1) + 1;
  parallel_for(r.rows, grain, threads, [&](int64_t begin, int64_t end) {
    const int64_t found = r.in == Real::f64 ? replay_rows<double>(r, begin, end)
                                            : replay_rows<float>(r, begin, end);
    int64_t first = bad.load();
    while (found < first && !bad.compare_exchange_weak(first, found)) {
    }
  });
  if (const int64_t i = bad.load(); i != kNone)
    throw std::out_of_range("replay_probs: ids[" + std::to_string(i / r.top_k) + ", " +
                            std::to_string(i % r.top_k) + "] is " +
                            std::to_string(load(r.ids, r.id, i)) +
                            ", expected an expert in [0, " + std::to_string(r.experts) + ")");
}

}  // namespace pyrl
