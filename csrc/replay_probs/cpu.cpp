#include "replay_probs/api.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/pages.hpp"
#include "common/parallel.hpp"
#include "replay_probs/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace replay_probs;

constexpr int kTileRows = 32;

// The values of one row of each lane of the vectors A, which are `step` vectors from each other.
template <class A, class Scalar>
struct Slots {
  A *values, *terms;
  int step;

  A& value(int j) const { return values[j * step]; }
  A& term(int j) const { return terms[j * step]; }
  static A all(double value) { return A{} + Scalar(value); }
};

constexpr int64_t kBytesPerThread = 1 << 17;  // below, a second thread costs more than it saves

// Some rows, column after column.
template <class A>
struct alignas(16) Columns {
  A values[kTileRows * kMaxTopK], terms[kTileRows * kMaxTopK], grads[kTileRows * kMaxTopK];
  int32_t ids[kTileRows * kMaxTopK];
};

template <class A, class Scalar>
A partial_sum(const Slots<A, Scalar>& s, int first, int count, int step) {
  A sums[4] = {};
  const int grouped = count / 4 * 4;
  for (int i = 0; i < grouped; ++i) sums[i % 4] += s.term(first + i * step);
  for (int i = grouped; i < count; ++i) sums[0] += s.term(first + i * step);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// The sum of the terms. torch adds up the columns of a row in 32-byte vectors, and these (or the
// elements of a shorter row) in four partial sums.
template <class A, class Scalar>
A sum_of_terms(const Slots<A, Scalar>& s, int count) {
  constexpr int kLanes = 32 / sizeof(Scalar);
  if (count < kLanes) return partial_sum(s, 0, count, 1);
  A sum{};
  for (int i = count / kLanes * kLanes; i < count; ++i) sum += s.term(i);
  for (int lane = 0; lane < kLanes; ++lane) sum += partial_sum(s, lane, count / kLanes, kLanes);
  return sum;
}

template <class A, class Scalar>
A sum_of_values(const Slots<A, Scalar>& s, int count) {
  for (int j = 0; j < count; ++j) s.term(j) = s.value(j);
  return sum_of_terms(s, count) + s.all(1e-20);
}

// values := the probabilities; before, they are the scores. There is no softmax on the CPU.
template <class A, class Scalar>
void probs_row(const ReplayProbsArgs& r, const Slots<A, Scalar>& s) {
  const int count = int(r.top_k);
  if (divides(r)) {
    const A sum = sum_of_values(s, count);
    for (int j = 0; j < count; ++j) s.value(j) /= sum;
  }
  if (r.scale == 0) return;
  const A scale = s.all(r.scale);
  for (int j = 0; j < count; ++j) s.value(j) *= scale;
}

// values := the gradients of the scores; grad(j) are those of the probabilities.
template <class A, class Scalar, class Grad>
void grad_row(const ReplayProbsArgs& r, const Slots<A, Scalar>& s, const Grad& grad) {
  const int count = int(r.top_k);
  if (!divides(r)) {
    for (int j = 0; j < count; ++j) s.value(j) = grad(j);
    return;
  }
  const A sum = sum_of_values(s, count);
  for (int j = 0; j < count; ++j) s.term(j) = -grad(j) * (s.value(j) / sum / sum);
  const A common = sum_of_terms(s, count);
  for (int j = 0; j < count; ++j) s.value(j) = grad(j) / sum + common;
}

// The loops below go along the rows of a tile, which are contiguous. The constants of a call are in
// locals: otherwise the compiler would read them again after every byte written.

// ids[j][row] of `count` rows from `first` on. Returns the first entry outside, or -1.
template <class From>
int64_t load_ids(const ReplayProbsArgs& r, int64_t first, int count, int32_t* ids) {
  const int top_k = int(r.top_k);
  const From* from = static_cast<const From*>(r.ids) + first * top_k;
  const auto outside = [experts = uint64_t(r.experts)](From id) {
    return uint64_t(int64_t(id)) >= experts;
  };
  bool bad = false;
  for (int j = 0; j < top_k; ++j)
    for (int row = 0; row < count; ++row) {
      const From id = from[row * top_k + j];
      bad |= outside(id);
      ids[j * kTileRows + row] = int32_t(id);
    }
  if (!bad) return -1;
  int i = 0;
  while (!outside(from[i])) ++i;
  return first * top_k + i;
}

int64_t load_ids(const ReplayProbsArgs& r, int64_t first, int count, int32_t* ids) {
  switch (r.ids_dtype) {
    case DType::u8: return load_ids<uint8_t>(r, first, count, ids);
    case DType::u16: return load_ids<uint16_t>(r, first, count, ids);
    case DType::i16: return load_ids<int16_t>(r, first, count, ids);
    case DType::i32: return load_ids<int32_t>(r, first, count, ids);
    default: return load_ids<int64_t>(r, first, count, ids);
  }
}

// to[j][row] = from[row, ids[j][row]] of `count` rows from `first` on.
template <DType Type, class A>
void load_at_as(const ReplayProbsArgs& r, const void* from, int64_t first, int count, const int32_t* ids,
                A* to) {
  const int64_t experts = r.experts;
  for (int at = 0, end = int(r.top_k) * kTileRows; at < end; at += kTileRows)
    for (int row = 0; row < count; ++row)
      to[at + row] = load_real<A>(from, Type, (first + row) * experts + ids[at + row]);
}

template <class A>
void load_at(const ReplayProbsArgs& r, const void* from, DType type, int64_t first, int count,
             const int32_t* ids, A* to) {
  const auto run = type == DType::f32    ? load_at_as<DType::f32, A>
                   : type == DType::f64  ? load_at_as<DType::f64, A>
                   : type == DType::bf16 ? load_at_as<DType::bf16, A>
                                        : load_at_as<DType::f16, A>;
  run(r, from, first, count, ids, to);
}

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));

// The probabilities (or gradients) of a tile, some rows at a time: a vector holds one element of
// each.
template <class A>
void compute(const ReplayProbsArgs& r, Columns<A>& tile) {
  using Rows = std::conditional_t<std::is_same_v<A, float>, Floats, Doubles>;
  constexpr int kStep = kTileRows * sizeof(A) / sizeof(Rows);
  const Rows scale = Slots<Rows, A>::all(r.scale != 0 ? r.scale : 1);
  for (int i = 0; i < kStep; ++i) {
    const Slots<Rows, A> s{reinterpret_cast<Rows*>(tile.values) + i,
                           reinterpret_cast<Rows*>(tile.terms) + i, kStep};
    const Rows* grad = reinterpret_cast<Rows*>(tile.grads) + i;
    if (r.grad)
      grad_row(r, s, [=](int j) { return grad[j * kStep] * scale; });
    else
      probs_row(r, s);
  }
}

template <class A, class Word>
void write(const ReplayProbsArgs& r, int64_t first, int count, const Columns<A>& tile) {
  const int64_t experts = r.experts;
  const int end = int(r.top_k) * kTileRows;
  const DType to = r.out_dtype;
  auto* const out = static_cast<Word*>(r.out) + first * experts;
  std::memset(out, 0, count * experts * sizeof(Word));
  for (int at = 0; at < end; at += kTileRows)
    for (int row = 0; row < count; ++row)
      out[row * experts + tile.ids[at + row]] = word_of<Word>(tile.values[at + row], to);
  if (!r.map) return;
  uint8_t* const map = r.map + first * experts;
  std::memset(map, 0, count * experts);
  for (int at = 0; at < end; at += kTileRows)
    for (int row = 0; row < count; ++row) map[row * experts + tile.ids[at + row]] = 1;
}

// Returns the first entry of ids outside the experts, or -1.
template <class A, class Word>
int64_t replay(const ReplayProbsArgs& r, int64_t begin, int64_t end) {
  Columns<A> tile{};
  for (int64_t first = begin; first < end; first += kTileRows) {
    const int count = int(std::min<int64_t>(kTileRows, end - first));
    const int64_t bad = load_ids(r, first, count, tile.ids);
    if (bad >= 0) return bad;
    load_at(r, r.scores, r.scores_dtype, first, count, tile.ids, tile.values);
    if (r.grad) load_at(r, r.grad, r.grad_dtype, first, count, tile.ids, tile.grads);
    compute(r, tile);
    write<A, Word>(r, first, count, tile);
  }
  return -1;
}

template <class A>
int64_t replay_rows(const ReplayProbsArgs& r, int64_t begin, int64_t end) {
  return r.out_dtype == DType::f64   ? replay<A, uint64_t>(r, begin, end)
         : r.out_dtype == DType::f32 ? replay<A, uint32_t>(r, begin, end)
                             : replay<A, uint16_t>(r, begin, end);
}

}  // namespace

void replay_probs_cpu(const ReplayProbsArgs& r, int threads) {
  const int64_t grain = kBytesPerThread / (r.experts * 5 + 1) + 1;
  want_huge_pages(r.out, r.rows * r.experts * size_of(r.out_dtype));
  if (r.map) want_huge_pages(r.map, r.rows * r.experts);
  const int64_t bad = parallel_find(r.rows, grain, threads, [&](int64_t begin, int64_t end) {
    return r.scores_dtype == DType::f64 ? replay_rows<double>(r, begin, end)
                                        : replay_rows<float>(r, begin, end);
  });
  if (bad >= 0)
    throw std::out_of_range("replay_probs: ids[" + std::to_string(bad / r.top_k) + ", " +
                            std::to_string(bad % r.top_k) + "] is " +
                            std::to_string(load_id(r.ids, r.ids_dtype, bad)) +
                            ", expected an expert in [0, " + std::to_string(r.experts) + ")");
}

}  // namespace pyrl
