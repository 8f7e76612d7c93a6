#pragma once
// A warp computes some whole rows: a lane is one (row, choice), and sums go along a row by shuffles.
// Dense rows are put together in shared memory, where they fit, and leave 16 bytes at a time.
#include <cmath>
#include <type_traits>

#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "replay_probs/api.hpp"

namespace pyrl::replay_probs {

template <class A>
PYRL_DEVICE A load_real(const void* from, DType type, int64_t i) {
  switch (type) {
    case DType::f32: return A(static_cast<const float*>(from)[i]);
    case DType::f64: return A(static_cast<const double*>(from)[i]);
    case DType::f16: return A(F16::widen(static_cast<const uint16_t*>(from)[i]));
    default: return A(BF16::widen(static_cast<const uint16_t*>(from)[i]));
  }
}

PYRL_DEVICE int64_t load_id(const void* from, DType type, int64_t i) {
  switch (type) {
    case DType::u8: return static_cast<const uint8_t*>(from)[i];
    case DType::u16: return static_cast<const uint16_t*>(from)[i];
    case DType::i16: return static_cast<const int16_t*>(from)[i];
    case DType::i32: return static_cast<const int32_t*>(from)[i];
    default: return static_cast<const int64_t*>(from)[i];
  }
}

// The bits of a value of type `to`, which has the size of Word.
template <class Word, class A>
PYRL_DEVICE Word word_of(A value, DType to) {
  if constexpr (sizeof(Word) == 8)
    return bits<Word>(double(value));
  else if constexpr (sizeof(Word) == 4)
    return bits<Word>(float(value));
  else
    return to == DType::f16 ? F16::narrow(float(value)) : BF16::narrow(float(value));
}

// A value in each lane of a warp, on the host; on a GPU a lane has a scalar in its place.
template <class A>
struct WarpValues {
  A lane[32];

  explicit WarpValues(double value = 0) {
    for (A& each : lane) each = A(value);
  }
  template <class Of>
  static WarpValues of(const Of& value) {
    WarpValues v;
    for (int i = 0; i < 32; ++i) v.lane[i] = value(i);
    return v;
  }
  WarpValues operator+(const WarpValues& o) const { return of([&](int i) { return lane[i] + o.lane[i]; }); }
  WarpValues operator-(const WarpValues& o) const { return of([&](int i) { return lane[i] - o.lane[i]; }); }
  WarpValues operator*(const WarpValues& o) const { return of([&](int i) { return lane[i] * o.lane[i]; }); }
  WarpValues operator/(const WarpValues& o) const { return of([&](int i) { return lane[i] / o.lane[i]; }); }
  WarpValues operator-() const { return of([&](int i) { return -lane[i]; }); }
};

// The value of the lane at a distance of a power of two.
template <class A>
PYRL_DEVICE A partner(A v, int distance) {
#ifdef __CUDA_ARCH__
  return __shfl_xor_sync(~0u, v, distance);
#else
  (void)distance;
  return v;  // not called: the host has WarpValues
#endif
}
template <class A>
WarpValues<A> partner(const WarpValues<A>& v, int distance) {
  return WarpValues<A>::of([&](int i) { return v.lane[i ^ distance]; });
}

template <class A>
PYRL_DEVICE A larger(A a, A b) {
  return a > b ? a : b;
}
template <class A>
WarpValues<A> larger(const WarpValues<A>& a, const WarpValues<A>& b) {
  return WarpValues<A>::of([&](int i) { return larger(a.lane[i], b.lane[i]); });
}

template <class A>
PYRL_DEVICE A exponential(A v) {
  return std::exp(v);
}
template <class A>
WarpValues<A> exponential(const WarpValues<A>& v) {
  return WarpValues<A>::of([&](int i) { return std::exp(v.lane[i]); });
}

// The sum over the `width` lanes of a row, in each of them. torch adds up the columns of a row on
// CUDA in this order: those at half the number of lanes first.
template <class V>
PYRL_DEVICE V row_sum(V terms, int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) terms = terms + partner(terms, distance);
  return terms;
}

template <class V>
PYRL_DEVICE V row_softmax(V v, int width) {
  V top = v;
  for (int distance = width / 2; distance > 0; distance /= 2) top = larger(top, partner(top, distance));
  v = exponential(v - top);
  return v / row_sum(v, width);
}

// Whether the scores are divided by their sum; the sum of one would be it.
PYRL_DEVICE bool divides(const ReplayProbsArgs& r) { return r.norm == Norm::sum && r.top_k > 1; }

// The probabilities of scores. Lanes without a choice hold `padding`, which adds nothing.
template <class V>
PYRL_DEVICE V probs_of(const ReplayProbsArgs& r, V v, int width) {
  if (r.norm == Norm::softmax)
    v = row_softmax(v, width);
  else if (divides(r))
    v = v / (row_sum(v, width) + V(1e-20));
  return r.scale == 0 ? v : v * V(r.scale);
}
PYRL_DEVICE double padding(const ReplayProbsArgs& r) { return r.norm == Norm::softmax ? -INFINITY : 0; }

// The gradients of scores from those of the probabilities, which are scaled, and 0 without a choice.
template <class V>
PYRL_DEVICE V grads_of(const ReplayProbsArgs& r, V v, V grad, int width) {
  if (r.norm == Norm::softmax) {
    v = row_softmax(v, width);
    return v * (grad - row_sum(grad * v, width));
  }
  if (!divides(r)) return grad;
  const V sum = row_sum(v, width) + V(1e-20);
  return grad / sum + row_sum(-grad * (v / sum / sum), width);
}

constexpr int kWarp = 32, kBlockWarps = 4;
constexpr uint32_t kStageBytes = 8 << 10;  // of shared memory for a warp's rows, at most

// How the rows of a call are dealt to warps.
struct Warps {
  int width;        // lanes of a row: the power of two from top_k on
  uint32_t rows;    // of a warp
  int64_t count;    // warps
  uint32_t out_bytes, map_bytes;  // of a warp's rows in shared memory; multiples of 16
  bool staged;      // they fit there; else zeros, then values, are written to their places

  Warps(const ReplayProbsArgs& r, size_t word) : width(1) {
    while (width < r.top_k) width *= 2;
    rows = uint32_t(kWarp / width);
    count = (r.rows + rows - 1) / rows;
    const auto vectors = [&](int64_t bytes) { return uint32_t((rows * r.experts * bytes + 15) / 16 * 16); };
    out_bytes = vectors(int64_t(word)), map_bytes = r.map ? vectors(1) : 0;
    staged = out_bytes + map_bytes <= kStageBytes;
  }
  uint32_t stage_bytes() const { return staged ? out_bytes + map_bytes : 0; }
};

struct alignas(16) Vector {
  uint64_t low, high;
};

// What a lane of warp `warp` works on.
template <class A, class Word>
struct Lane {
  int64_t first;   // row of the warp
  uint32_t rows;   // that the warp has
  uint32_t row;    // of the lane, from `first`
  int32_t id;      // -1: outside the experts, or no choice
  A value, grad;
  Word* out;       // the warp's rows, in shared memory or where they end
  uint8_t* map;

  PYRL_DEVICE Lane(const ReplayProbsArgs& r, const Warps& w, int64_t warp, int lane, void* stage)
      : first(warp * w.rows), row(uint32_t(lane) / uint32_t(w.width)), value(A(padding(r))), grad(0) {
    rows = uint32_t(r.rows - first < w.rows ? r.rows - first : w.rows);
    const int choice = lane % w.width;
    const bool chosen = row < rows && choice < r.top_k;
    const int64_t found = chosen ? load_id(r.ids, r.ids_dtype, (first + row) * r.top_k + choice) : -1;
    id = found < 0 || found >= r.experts ? -1 : int32_t(found);
    if (chosen) value = A(NAN);
    out = w.staged ? static_cast<Word*>(stage) : static_cast<Word*>(r.out) + first * r.experts;
    map = !r.map ? nullptr : w.staged ? static_cast<uint8_t*>(stage) + w.out_bytes : r.map + first * r.experts;
  }

  PYRL_DEVICE void load(const ReplayProbsArgs& r) {
    if (id < 0) return;
    const int64_t from = (first + row) * r.experts + id;
    value = load_real<A>(r.scores, r.scores_dtype, from);
    if (r.grad) grad = load_real<A>(r.grad, r.grad_dtype, from) * A(r.scale != 0 ? r.scale : 1);
  }
  // Writes a value to its place among zeros.
  PYRL_DEVICE void store(const ReplayProbsArgs& r, A result) const {
    if (id < 0) return;
    const uint32_t to = row * uint32_t(r.experts) + uint32_t(id);
    out[to] = word_of<Word>(result, r.out_dtype);
    if (map) map[to] = 1;
  }
};

// `count` units from `to` on := those from `from` on, or 0 without `from`, by the lanes of a warp;
// whole vectors where `to` is at a multiple of 16. `from` is.
template <class Unit>
PYRL_DEVICE void fill(Unit* to, const Unit* from, uint32_t count, int lane) {
  constexpr uint32_t kUnits = 16 / sizeof(Unit);
  const uint32_t vectors = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? count / kUnits : 0;
  for (uint32_t i = lane; i < vectors; i += kWarp)
    reinterpret_cast<Vector*>(to)[i] = from ? reinterpret_cast<const Vector*>(from)[i] : Vector{0, 0};
  for (uint32_t i = vectors * kUnits + lane; i < count; i += kWarp) to[i] = from ? from[i] : Unit(0);
}

// First phase, while ids are on their way: zeros.
template <class A, class Word>
PYRL_DEVICE void clear_rows(const ReplayProbsArgs& r, const Lane<A, Word>& own, int lane) {
  const uint32_t count = own.rows * uint32_t(r.experts);
  fill<Word>(own.out, nullptr, count, lane);
  if (own.map) fill<uint8_t>(own.map, nullptr, count, lane);
}

// Last phase, once all lanes have stored: rows leave shared memory.
template <class A, class Word>
PYRL_DEVICE void copy_rows(const ReplayProbsArgs& r, const Warps& w, const Lane<A, Word>& own, int lane) {
  if (!w.staged) return;
  const uint32_t count = own.rows * uint32_t(r.experts);
  fill<Word>(static_cast<Word*>(r.out) + own.first * r.experts, own.out, count, lane);
  if (own.map) fill<uint8_t>(r.map + own.first * r.experts, own.map, count, lane);
}

// Calls run.run<A, Word>() with the types of a call: arithmetic, element written.
template <class A, class Run>
void with_word(const ReplayProbsArgs& r, const Run& run) {
  if (r.out_dtype == DType::f64) return run.template run<A, uint64_t>();
  if (r.out_dtype == DType::f32) return run.template run<A, uint32_t>();
  run.template run<A, uint16_t>();
}

template <class Run>
void with_types(const ReplayProbsArgs& r, const Run& run) {
  if (r.scores_dtype == DType::f64) return with_word<double>(r, run);
  with_word<float>(r, run);
}

}  // namespace pyrl::replay_probs
