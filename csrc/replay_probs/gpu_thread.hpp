#pragma once
// The values of one row, and how a block of threads writes dense rows of them.
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

// The low Count bytes of `chosen`, one flag per byte.
template <int Count>
PYRL_DEVICE void store_map(uint8_t* to, uint64_t chosen) {
  if constexpr (Count == 8)
    *reinterpret_cast<uint64_t*>(to) = chosen;
  else if constexpr (Count == 4)
    *reinterpret_cast<uint32_t*>(to) = uint32_t(chosen);
  else if constexpr (Count == 2)
    *reinterpret_cast<uint16_t*>(to) = uint16_t(chosen);
  else
    *to = uint8_t(chosen);
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
  // neighbours are added.
  template <class A>
  PYRL_DEVICE static A sum(const Slots<A>& s, int count) {
    int threads = 1;
    while (threads * 2 <= count) threads *= 2;
    for (int i = threads; i < count; ++i) s.term(i - threads) += s.term(i);
    for (int apart = 1; apart < threads; apart *= 2)
      for (int i = 0; i < threads; i += 2 * apart) s.term(i) += s.term(i + apart);
    return s.term(0);
  }

  // values := softmax(values). Each of a power of two of lanes has a term or 0; lanes half the
  // number apart are added first.
  template <class A>
  PYRL_DEVICE static void softmax(const Slots<A>& s, int count) {
    int lanes = 1;
    while (lanes < count) lanes *= 2;
    A top = s.value(0);
    for (int j = 1; j < count; ++j) top = s.value(j) > top ? s.value(j) : top;
    for (int j = 0; j < lanes; ++j)
      s.term(j) = j < count ? s.value(j) = std::exp(s.value(j) - top) : A(0);
    for (int apart = lanes / 2; apart > 0; apart /= 2)
      for (int i = 0; i < apart; ++i) s.term(i) += s.term(i + apart);
    const A sum = s.term(0);
    for (int j = 0; j < count; ++j) s.value(j) /= sum;
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

// The rows written at a time, in shared memory on a GPU.
template <class A>
struct alignas(16) Tile {
  A values[kTileRows * kMaxTopK], terms[kTileRows * kMaxTopK];
  int32_t ids[kTileRows * kMaxTopK];
};

PYRL_DEVICE int64_t num_tiles(const ReplayProbsArgs& r) { return (r.rows + kTileRows - 1) / kTileRows; }

// First phase of a tile: one thread per row.
template <class A>
PYRL_DEVICE void tile_values(const ReplayProbsArgs& r, int64_t tile, Tile<A>& shared, ThreadIndex at) {
  const int64_t row = tile * kTileRows + at.thread;
  const int count = int(r.top_k);
  if (at.thread >= kTileRows || row >= r.rows || count == 0) return;
  const Slots<A> s{shared.values + at.thread, shared.terms + at.thread, kTileRows};
  int32_t* const ids = shared.ids + at.thread;
  for (int j = 0; j < count; ++j) {
    const int64_t id = load_id(r.ids, r.ids_dtype, row * count + j);
    ids[j * kTileRows] = int32_t(id);
    s.value(j) = load_real<A>(r.scores, r.scores_dtype, row * r.experts + id);
  }
  if (!r.grad) return probs_row<CudaOrder>(r, s);
  const A scale = s.all(r.scale != 0 ? r.scale : 1);
  grad_row<CudaOrder>(r, s, [&](int j) {
    return load_real<A>(r.grad, r.grad_dtype, row * r.experts + ids[j * kTileRows]) * scale;
  });
}

struct alignas(16) Words {
  uint64_t low, high;
};

// Second phase: each thread assembles Count neighbouring elements as bits and writes them at once.
// Count is 1, or as many as fill 16 bytes if that divides a row.
template <class A, class Word, int Count>
PYRL_DEVICE void tile_write(const ReplayProbsArgs& r, int64_t tile, const Tile<A>& shared, ThreadIndex at) {
  const int64_t first = tile * kTileRows, left = r.rows - first;
  const uint32_t per_row = uint32_t(r.experts) / Count;
  const uint32_t count = uint32_t(left < kTileRows ? left : kTileRows) * per_row;
  for (uint32_t i = at.thread; i < count; i += at.threads) {
    const uint32_t row = i / per_row, expert = i % per_row * Count;
    Words words{0, 0};
    uint64_t chosen = 0;
    for (int j = 0; j < int(r.top_k); ++j) {
      const int slot = j * kTileRows + int(row);
      const uint32_t place = uint32_t(shared.ids[slot]) - expert;
      if (place >= uint32_t(Count)) continue;
      const uint64_t word = word_of<Word>(shared.values[slot], r.out_dtype);
      const uint32_t bit = place * 8 * uint32_t(sizeof(Word));
      (bit < 64 ? words.low : words.high) |= word << (bit % 64);
      chosen |= uint64_t(1) << (8 * place);
    }
    const int64_t element = (first + row) * r.experts + expert;
    Word* const out = static_cast<Word*>(r.out) + element;
    if constexpr (Count == 1)
      *out = Word(words.low);
    else
      *reinterpret_cast<Words*>(out) = words;
    if (r.map) store_map<Count>(r.map + element, chosen);
  }
}

// Calls run.run<A, Word, Count>() with the types of a call: arithmetic, element written, elements
// written at a time (several if rows and addresses are multiples of 16 bytes, and the map's of
// Count).
template <class A, class Word, class Run>
void with_count(const ReplayProbsArgs& r, const Run& run) {
  constexpr int kCount = 16 / sizeof(Word);
  const bool wide = r.experts % kCount == 0 && reinterpret_cast<uintptr_t>(r.out) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(r.map) % kCount == 0;
  if (wide)
    run.template run<A, Word, kCount>();
  else
    run.template run<A, Word, 1>();
}

template <class A, class Run>
void with_word(const ReplayProbsArgs& r, const Run& run) {
  if (r.out_dtype == DType::f64) return with_count<A, uint64_t>(r, run);
  if (r.out_dtype == DType::f32) return with_count<A, uint32_t>(r, run);
  with_count<A, uint16_t>(r, run);
}

template <class Run>
void with_types(const ReplayProbsArgs& r, const Run& run) {
  if (r.scores_dtype == DType::f64) return with_word<double>(r, run);
  with_word<float>(r, run);
}

}  // namespace pyrl::replay_probs
