#pragma once
// One row's values, and how a block of threads writes dense rows of them.
#include <cmath>
#include <cstring>

#include "device.hpp"
#include "replay_probs.hpp"

namespace pyrl {

template <class To, class From>
PYRL_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

PYRL_DEVICE float from_f16(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7fffu) << 13;
  const float wide = bits_as<float>(magnitude) * 0x1p112f;  // exponents are off by 127 - 15
  const uint32_t bits =
      (half & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : bits_as<uint32_t>(wide);
  return bits_as<float>(bits | uint32_t(half & 0x8000u) << 16);
}

// Round to nearest, ties to even, as all conversions here.
PYRL_DEVICE uint16_t to_f16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x47800000u)  // 2^16, infinity or NaN
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  else if (magnitude < 0x38800000u)  // subnormal: the sum's last bit is worth 2^-24
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  else
    half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return uint16_t(half | (bits >> 16 & 0x8000u));
}

PYRL_DEVICE uint16_t to_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <class A>
PYRL_DEVICE A load(const void* from, Real type, int64_t i) {
  switch (type) {
    case Real::f32: return A(static_cast<const float*>(from)[i]);
    case Real::f64: return A(static_cast<const double*>(from)[i]);
    case Real::f16: return A(from_f16(static_cast<const uint16_t*>(from)[i]));
    default: return A(bits_as<float>(uint32_t(static_cast<const uint16_t*>(from)[i]) << 16));
  }
}

PYRL_DEVICE int64_t load(const void* from, Int type, int64_t i) {
  switch (type) {
    case Int::u8: return static_cast<const uint8_t*>(from)[i];
    case Int::u16: return static_cast<const uint16_t*>(from)[i];
    case Int::i16: return static_cast<const int16_t*>(from)[i];
    case Int::i32: return static_cast<const int32_t*>(from)[i];
    default: return static_cast<const int64_t*>(from)[i];
  }
}

// The low Count bytes of `chosen`, a byte a flag.
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
PYRL_DEVICE Word word_of(A value, Real to) {
  if constexpr (sizeof(Word) == 8)
    return bits_as<Word>(double(value));
  else if constexpr (sizeof(Word) == 4)
    return bits_as<Word>(float(value));
  else
    return to == Real::f16 ? to_f16(float(value)) : to_bf16(float(value));
}

// A row's values, one every `step` elements: those of neighbouring rows are neighbours. A may be a
// vector of Scalar, with a row in each lane.
template <class A, class Scalar = A>
struct Slots {
  A *values, *terms;
  int step;

  PYRL_DEVICE A& value(int j) const { return values[j * step]; }
  PYRL_DEVICE A& term(int j) const { return terms[j * step]; }
  PYRL_DEVICE static A all(double value) { return A{} + Scalar(value); }
};

// How torch adds the columns of a row on CUDA; both overwrite the terms.
struct CudaOrder {
  static constexpr bool kSoftmax = true;

  // A reduction: as many threads as the largest power of two up to count take the terms in turn,
  // then neighbours are added.
  template <class A>
  PYRL_DEVICE static A sum(const Slots<A>& s, int count) {
    int threads = 1;
    while (threads * 2 <= count) threads *= 2;
    for (int i = threads; i < count; ++i) s.term(i - threads) += s.term(i);
    for (int apart = 1; apart < threads; apart *= 2)
      for (int i = 0; i < threads; i += 2 * apart) s.term(i) += s.term(i + apart);
    return s.term(0);
  }

  // values := softmax(values): every lane of a power of two has a term or 0, those half of the
  // lanes apart are added first.
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

// values := the probabilities, of values that are scores.
template <class Order, class A, class Scalar>
PYRL_DEVICE void probs_row(const Replay& r, const Slots<A, Scalar>& s) {
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

// values := the gradients of the scores, given grad(j), those of the probabilities.
template <class Order, class A, class Scalar, class Grad>
PYRL_DEVICE void grad_row(const Replay& r, const Slots<A, Scalar>& s, const Grad& grad) {
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

// The rows that are written at a time; on a GPU the threads of a block share it.
template <class A>
struct alignas(16) Tile {
  A values[kTileRows * kMaxTopK], terms[kTileRows * kMaxTopK];
  int32_t ids[kTileRows * kMaxTopK];
};

PYRL_DEVICE int64_t num_tiles(const Replay& r) { return (r.rows + kTileRows - 1) / kTileRows; }

// First phase of a tile: a thread a row.
template <class A>
PYRL_DEVICE void tile_values(const Replay& r, int64_t tile, Tile<A>& shared, Place at) {
  const int64_t row = tile * kTileRows + at.thread;
  const int count = int(r.top_k);
  if (at.thread >= kTileRows || row >= r.rows || count == 0) return;
  const Slots<A> s{shared.values + at.thread, shared.terms + at.thread, kTileRows};
  int32_t* const ids = shared.ids + at.thread;
  for (int j = 0; j < count; ++j) {
    const int64_t id = load(r.ids, r.id, row * count + j);
    ids[j * kTileRows] = int32_t(id);
    s.value(j) = load<A>(r.scores, r.in, row * r.experts + id);
  }
  if (!r.grad) return probs_row<CudaOrder>(r, s);
  const A scale = s.all(r.scale != 0 ? r.scale : 1);
  grad_row<CudaOrder>(r, s, [&](int j) {
    return load<A>(r.grad, r.from, row * r.experts + ids[j * kTileRows]) * scale;
  });
}

struct alignas(16) Bits {
  uint64_t low, high;
};

// Second phase: all threads, each writes Count neighbouring elements at a time, which are assembled
// as bits. Count is 1, or as many as fill 16 bytes where that divides a row.
template <class A, class Word, int Count>
PYRL_DEVICE void tile_write(const Replay& r, int64_t tile, const Tile<A>& shared, Place at) {
  const int64_t first = tile * kTileRows, left = r.rows - first;
  const uint32_t per_row = uint32_t(r.experts) / Count;
  const uint32_t count = uint32_t(left < kTileRows ? left : kTileRows) * per_row;
  for (uint32_t i = at.thread; i < count; i += at.threads) {
    const uint32_t row = i / per_row, expert = i % per_row * Count;
    Bits words{0, 0};
    uint64_t chosen = 0;
    for (int j = 0; j < int(r.top_k); ++j) {
      const int slot = j * kTileRows + int(row);
      const uint32_t place = uint32_t(shared.ids[slot]) - expert;
      if (place >= uint32_t(Count)) continue;
      const uint64_t word = word_of<Word>(shared.values[slot], r.to);
      const uint32_t bit = place * 8 * uint32_t(sizeof(Word));
      (bit < 64 ? words.low : words.high) |= word << (bit % 64);
      chosen |= uint64_t(1) << (8 * place);
    }
    const int64_t element = (first + row) * r.experts + expert;
    Word* const out = static_cast<Word*>(r.out) + element;
    if constexpr (Count == 1)
      *out = Word(words.low);
    else
      *reinterpret_cast<Bits*>(out) = words;
    if (r.map) store_map<Count>(r.map + element, chosen);
  }
}

// Calls run.run<A, Word, Count>() with the types of a call: arithmetic, element written, elements
// written at a time (several where rows and addresses are multiples of 16 bytes, and of the map's).
template <class A, class Word, class Run>
void with_count(const Replay& r, const Run& run) {
  constexpr int kCount = 16 / sizeof(Word);
  const bool wide = r.experts % kCount == 0 && reinterpret_cast<uintptr_t>(r.out) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(r.map) % kCount == 0;
  if (wide)
    run.template run<A, Word, kCount>();
  else
    run.template run<A, Word, 1>();
}

template <class A, class Run>
void with_word(const Replay& r, const Run& run) {
  if (r.to == Real::f64) return with_count<A, uint64_t>(r, run);
  if (r.to == Real::f32) return with_count<A, uint32_t>(r, run);
  with_count<A, uint16_t>(r, run);
}

template <class Run>
void with_types(const Replay& r, const Run& run) {
  if (r.in == Real::f64) return with_word<double>(r, run);
  with_word<float>(r, run);
}

}  // namespace pyrl
