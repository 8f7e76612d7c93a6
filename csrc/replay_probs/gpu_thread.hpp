#pragma once
// The values of one row, and how a block of threads writes dense rows of them: zeros first, while
// what the values are made of is on its way, then the values.
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

// The values of one row, `step` elements apart, so that those of neighbouring rows are neighbours. A
// may be a vector of Scalar, with a row in each lane.
template <class A, class Scalar = A>
struct Slots {
  A *values, *terms;
  int step;

  PYRL_DEVICE A& value(int j) const { return values[j * step]; }
  PYRL_DEVICE A& term(int j) const { return terms[j * step]; }
  PYRL_DEVICE static A all(double value) { return A{} + Scalar(value); }
};

// How torch adds up the columns of a row on CUDA; both functions overwrite the terms.
struct CudaOrder {
  static constexpr bool kSoftmax = true;

  // A reduction: the terms are dealt to the largest power of two of threads up to `count`, then
  // threads half the number apart are added.
  template <class A>
  PYRL_DEVICE static A sum(const Slots<A>& s, int count) {
    int threads = 1;
    while (threads * 2 <= count) threads *= 2;
    for (int i = threads; i < count; ++i) s.term(i - threads) += s.term(i);
    return tree(s, threads);
  }

  // values := softmax(values). Each of a power of two of lanes has a term or 0, added in that order.
  template <class A>
  PYRL_DEVICE static void softmax(const Slots<A>& s, int count) {
    int lanes = 1;
    while (lanes < count) lanes *= 2;
    A top = s.value(0);
    for (int j = 1; j < count; ++j) top = s.value(j) > top ? s.value(j) : top;
    for (int j = 0; j < lanes; ++j)
      s.term(j) = j < count ? s.value(j) = std::exp(s.value(j) - top) : A(0);
    const A sum = tree(s, lanes);
    for (int j = 0; j < count; ++j) s.value(j) /= sum;
  }

 private:
  template <class A>
  PYRL_DEVICE static A tree(const Slots<A>& s, int lanes) {
    for (int apart = lanes / 2; apart > 0; apart /= 2)
      for (int i = 0; i < apart; ++i) s.term(i) += s.term(i + apart);
    return s.term(0);
  }
};

template <class Order, class A, class Scalar>
PYRL_DEVICE A sum_of_values(const Slots<A, Scalar>& s, int count) {
  for (int j = 0; j < count; ++j) s.term(j) = s.value(j);
  return Order::sum(s, count) + s.all(1e-20);
}

// values := the probabilities; before, they are the scores.
template <class Order, class A, class Scalar>
PYRL_DEVICE void probs_row(const ReplayProbsArgs& r, const Slots<A, Scalar>& s) {
  const int count = int(r.top_k);
  if (r.norm == Norm::softmax) {
    if constexpr (Order::kSoftmax) Order::softmax(s, count);
  } else if (r.norm == Norm::sum && count > 1) {
    const A sum = sum_of_values<Order>(s, count);
    for (int j = 0; j < count; ++j) s.value(j) /= sum;
  }
  if (r.scale == 0) return;
  const A scale = s.all(r.scale);
  for (int j = 0; j < count; ++j) s.value(j) *= scale;
}

// values := the gradients of the scores; grad(j) are those of the probabilities.
template <class Order, class A, class Scalar, class Grad>
PYRL_DEVICE void grad_row(const ReplayProbsArgs& r, const Slots<A, Scalar>& s, const Grad& grad) {
  const int count = int(r.top_k);
  if (r.norm == Norm::softmax) {
    if constexpr (Order::kSoftmax) {
      Order::softmax(s, count);
      for (int j = 0; j < count; ++j) s.term(j) = grad(j) * s.value(j);
      const A mean = Order::sum(s, count);
      for (int j = 0; j < count; ++j) s.value(j) *= grad(j) - mean;
    }
  } else if (r.norm == Norm::sum && count > 1) {
    const A sum = sum_of_values<Order>(s, count);
    for (int j = 0; j < count; ++j) s.term(j) = -grad(j) * (s.value(j) / sum / sum);
    const A common = Order::sum(s, count);
    for (int j = 0; j < count; ++j) s.value(j) = grad(j) / sum + common;
  } else {
    for (int j = 0; j < count; ++j) s.value(j) = grad(j);
  }
}

constexpr int kTileRows = 32, kBlockThreads = 128;
constexpr int kStep = kTileRows + 1;  // between the columns of a tile: neighbours in other banks

PYRL_DEVICE int64_t num_tiles(const ReplayProbsArgs& r) { return (r.rows + kTileRows - 1) / kTileRows; }

// What a block knows of its rows, column after column, in shared memory on a GPU.
template <class A>
struct Tile {
  A *values, *terms, *grads;  // grads: only with a gradient
  int32_t* ids;               // -1: outside the experts

  PYRL_DEVICE Tile(const ReplayProbsArgs& r, void* memory) {
    const int64_t each = r.top_k * kStep;
    values = static_cast<A*>(memory), grads = values + each, terms = r.grad ? grads + each : grads;
    ids = reinterpret_cast<int32_t*>(terms + term_columns(r) * kStep);
  }
  // A softmax takes a power of two of terms.
  static PYRL_DEVICE int64_t term_columns(const ReplayProbsArgs& r) {
    int64_t columns = 1;
    while (columns < r.top_k) columns *= 2;
    return columns;
  }
  static int64_t bytes(const ReplayProbsArgs& r) {
    const int64_t columns = r.top_k * (r.grad ? 2 : 1) + term_columns(r);
    return kStep * int64_t(columns * sizeof(A) + r.top_k * sizeof(int32_t));
  }
};

// The rows of a tile, and the (row, choice) pairs that the threads share.
struct TileRows {
  int64_t first;
  uint32_t rows, pairs;

  PYRL_DEVICE TileRows(const ReplayProbsArgs& r, int64_t tile) : first(tile * kTileRows) {
    rows = uint32_t(r.rows - first < kTileRows ? r.rows - first : kTileRows);
    pairs = rows * uint32_t(r.top_k);
  }
};

// The first `bytes` bytes from `to` on := 0, by all threads; whole vectors where `to` is at a
// multiple of 16.
PYRL_DEVICE void zero(void* to, uint32_t bytes, ThreadIndex at) {
  struct alignas(16) Vector {
    uint64_t low, high;
  };
  const uint32_t whole = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? bytes / 16 : 0;
  for (uint32_t i = at.thread; i < whole; i += at.threads) static_cast<Vector*>(to)[i] = {0, 0};
  for (uint32_t i = whole * 16 + at.thread; i < bytes; i += at.threads)
    static_cast<uint8_t*>(to)[i] = 0;
}

PYRL_DEVICE int tile_slot(const ReplayProbsArgs& r, uint32_t pair) {
  const uint32_t row = pair / uint32_t(r.top_k);
  return int((pair - row * uint32_t(r.top_k)) * kStep + row);
}

// First phase of a tile: zeros are written; ids, scores and gradients are read, one pair a thread.
template <class A, class Word>
PYRL_DEVICE void tile_load(const ReplayProbsArgs& r, int64_t tile, const Tile<A>& shared, ThreadIndex at) {
  constexpr int kBatch = 2;  // pairs of a thread that are read at once
  const TileRows t(r, tile);
  const auto experts = uint32_t(r.experts);
  const A scale = A(r.scale != 0 ? r.scale : 1);
  for (uint32_t begin = at.thread; begin < t.pairs || begin == uint32_t(at.thread);
       begin += kBatch * at.threads) {
    int64_t id[kBatch];
    A value[kBatch], grad[kBatch];
    PYRL_UNROLL
    for (int n = 0; n < kBatch; ++n) {
      const uint32_t pair = begin + n * at.threads;
      id[n] = pair < t.pairs ? load_id(r.ids, r.ids_dtype, t.first * r.top_k + pair) : -1;
    }
    if (begin == uint32_t(at.thread)) {  // while the first ids are on their way
      zero(static_cast<Word*>(r.out) + t.first * r.experts, t.rows * experts * uint32_t(sizeof(Word)), at);
      if (r.map) zero(r.map + t.first * r.experts, t.rows * experts, at);
    }
    PYRL_UNROLL
    for (int n = 0; n < kBatch; ++n) {
      const uint32_t pair = begin + n * at.threads;
      value[n] = A(NAN), grad[n] = A(0);
      if (id[n] >= r.experts) id[n] = -1;
      if (id[n] < 0) continue;
      const int64_t from = (t.first + pair / uint32_t(r.top_k)) * r.experts + id[n];
      value[n] = load_real<A>(r.scores, r.scores_dtype, from);
      if (r.grad) grad[n] = load_real<A>(r.grad, r.grad_dtype, from) * scale;
    }
    PYRL_UNROLL
    for (int n = 0; n < kBatch; ++n) {
      const uint32_t pair = begin + n * at.threads;
      if (pair >= t.pairs) continue;
      const int slot = tile_slot(r, pair);
      shared.ids[slot] = id[n] < 0 ? -1 : int32_t(id[n]);
      shared.values[slot] = value[n];
      if (r.grad) shared.grads[slot] = grad[n];
    }
  }
}

// Second phase: one thread a row.
template <class A>
PYRL_DEVICE void tile_values(const ReplayProbsArgs& r, int64_t tile, const Tile<A>& shared, ThreadIndex at) {
  if (uint32_t(at.thread) >= TileRows(r, tile).rows || r.top_k == 0) return;
  const Slots<A> s{shared.values + at.thread, shared.terms + at.thread, kStep};
  if (!r.grad) return probs_row<CudaOrder>(r, s);
  const A* const grads = shared.grads + at.thread;  // rounded with the scale before anything else
  grad_row<CudaOrder>(r, s, [=](int j) { return grads[j * kStep]; });
}

// Third phase: the values take their places among the zeros.
template <class A, class Word>
PYRL_DEVICE void tile_write(const ReplayProbsArgs& r, int64_t tile, const Tile<A>& shared, ThreadIndex at) {
  const TileRows t(r, tile);
  for (uint32_t pair = at.thread; pair < t.pairs; pair += at.threads) {
    const int slot = tile_slot(r, pair);
    if (shared.ids[slot] < 0) continue;
    const int64_t to = (t.first + pair / uint32_t(r.top_k)) * r.experts + shared.ids[slot];
    static_cast<Word*>(r.out)[to] = word_of<Word>(shared.values[slot], r.out_dtype);
    if (r.map) r.map[to] = 1;
  }
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
