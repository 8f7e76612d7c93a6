// A row at a time, twice: from memory for its sums, then from the cache for what is written.
#include "common/pairs.hpp"
#include "rms_norm/api.hpp"

namespace pyrl {
namespace {

// run(i, count) for every pair of vectors of a row: kPair elements from i, fewer in the last.
template <class Run>
inline void each_pair(int64_t width, const Run& run) {
  int64_t i = 0;
  for (; i + kPair <= width; i += kPair) run(i, kPair);
  if (i < width) run(i, width - i);
}

template <class T>
inline Pair load(const typename T::Raw* from, int64_t count) {
  return count == kPair ? T::load(from) : load_rest<T>(from, count);
}

template <class T>
inline void store(Pair x, typename T::Raw* to, int64_t count) {
  return count == kPair ? T::store(x, to) : store_rest<T>(x, to, count);
}

template <class T>
inline const typename T::Raw* row_of(const RmsNormArgs& s, int64_t n) {
  const int64_t at = s.heads == 1 ? n * s.row : n / s.heads * s.row + n % s.heads * s.head;
  return static_cast<const typename T::Raw*>(s.src) + at;
}

template <class T>
void forward_rows(const RmsNormArgs& s, int64_t begin, int64_t end) {
  using Raw = typename T::Raw;
  const auto* const weight = static_cast<const Raw*>(s.weight);
  for (int64_t n = begin; n < end; ++n) {
    const Raw* const from = row_of<T>(s, n);
    Raw* const to = static_cast<Raw*>(s.out) + n * s.width;
    Pair sum{};
    each_pair(s.width, [&](int64_t i, int64_t count) {
      const Pair x = load<T>(from + i, count);
      sum.a += x.a * x.a;
      sum.b += x.b * x.b;
    });
    const float scale =
        1.f / __builtin_sqrtf(total(sum.a + sum.b) / static_cast<float>(s.width) + s.eps);
    s.scale[n] = scale;
    each_pair(s.width, [&](int64_t i, int64_t count) {
      const Pair x = load<T>(from + i, count), w = load<T>(weight + i, count);
      store<T>({x.a * scale * w.a, x.b * scale * w.b}, to + i, count);
    });
  }
}

// Derivatives of a row. Adds what it contributes to the weight's to `part`.
template <class T>
void grad_row(const RmsNormArgs& s, int64_t n, float* part) {
  using Raw = typename T::Raw;
  const auto at = [&](const void* rows) { return static_cast<const Raw*>(rows) + n * s.width; };
  const Raw *const from = row_of<T>(s, n), *const grad = at(s.grad);
  const Raw* const residual = s.residual_grad ? at(s.residual_grad) : nullptr;
  const auto* const weight = static_cast<const Raw*>(s.weight);
  Raw* const to = static_cast<Raw*>(s.out) + n * s.width;
  const float scale = s.scale[n];
  Pair sum{};
  each_pair(s.width, [&](int64_t i, int64_t count) {
    const Pair g = load<T>(grad + i, count), w = load<T>(weight + i, count);
    Pair x = load<T>(from + i, count), of_weight = SimdF32::load(part + i);
    sum.a += g.a * w.a * x.a;
    sum.b += g.b * w.b * x.b;
    of_weight.a += g.a * (x.a * scale);
    of_weight.b += g.b * (x.b * scale);
    SimdF32::store(of_weight, part + i);
  });
  const float mean = total(sum.a + sum.b) / static_cast<float>(s.width);
  const float slope = scale * scale * scale * mean;
  each_pair(s.width, [&](int64_t i, int64_t count) {
    const Pair g = load<T>(grad + i, count), w = load<T>(weight + i, count);
    const Pair x = load<T>(from + i, count);
    Pair out{g.a * w.a * scale - x.a * slope, g.b * w.b * scale - x.b * slope};
    if (residual) {
      const Pair more = load<T>(residual + i, count);
      out.a += more.a;
      out.b += more.b;
    }
    store<T>(out, to + i, count);
  });
}

template <class T>
void grad_parts(const RmsNormArgs& s, int64_t begin, int64_t end) {
  const int64_t padded = rms_norm_padded(s.width);
  for (int64_t p = begin; p < end; ++p) {
    float* const part = s.parts + p * padded;
    for (int64_t i = 0; i < padded; ++i) part[i] = 0;
    const int64_t last = (p + 1) * kRmsNormRows;
    for (int64_t n = p * kRmsNormRows; n < (last < s.rows ? last : s.rows); ++n)
      grad_row<T>(s, n, part);
  }
}

// The sum of all parts, as a tree, of 32 columns each.
template <class T>
void join_parts(const RmsNormArgs& s, int64_t begin, int64_t end) {
  const int64_t padded = rms_norm_padded(s.width), parts = rms_norm_parts(s.rows);
  auto* const out = static_cast<typename T::Raw*>(s.weight_grad);
  for (int64_t i = begin * 32; i < end * 32 && i < s.width; i += kPair) {
    float* const column = s.parts + i;
    for (int64_t half = 1; half < parts; half *= 2)
      for (int64_t p = 0; p + half < parts; p += 2 * half) {
        Pair left = SimdF32::load(column + p * padded);
        const Pair right = SimdF32::load(column + (p + half) * padded);
        left.a += right.a;
        left.b += right.b;
        SimdF32::store(left, column + p * padded);
      }
    store<T>(SimdF32::load(column), out + i, s.width - i < kPair ? s.width - i : kPair);
  }
}

template <class Run>
void with_type(const RmsNormArgs& s, const Run& run) {
  return s.dtype == DType::f32 ? run(SimdF32()) : run(SimdBF16());
}

void forward(const RmsNormArgs& s, int64_t begin, int64_t end) {
  with_type(s, [&](auto type) { forward_rows<decltype(type)>(s, begin, end); });
}

void backward(const RmsNormArgs& s, int64_t begin, int64_t end) {
  with_type(s, [&](auto type) { grad_parts<decltype(type)>(s, begin, end); });
}

void join(const RmsNormArgs& s, int64_t begin, int64_t end) {
  with_type(s, [&](auto type) { join_parts<decltype(type)>(s, begin, end); });
}

}  // namespace

const RmsNorm PYRL_KERNELS(rms_norm) = {forward, backward, join};

}  // namespace pyrl
