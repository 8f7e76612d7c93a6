// One pass over a row for its statistics, one for its gradient.
#include "common/dtype.hpp"
#include "common/simd.hpp"
#include "token_logprob/api.hpp"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace pyrl {
namespace {

constexpr int kLanes = PYRL_VECTOR_BYTES / 4;
using F = Vector<float>;
using U = Vector<uint32_t>;
using H = Vector<uint16_t, kLanes>;
using B = Vector<uint8_t, kLanes>;

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
constexpr int64_t kBlock = 2048;  // columns between checks of the maximum; read again if it rose
constexpr int64_t kFirst = 256;   // columns whose maximum is the first base
constexpr float kHeadroom = 4;    // powers may reach 2^4 before a block is read again

inline F splat(float x) { return F{} + x; }

// 2^z for z < 126 with a relative error of 1.5e-7, exactly 1 at 0 and exactly 0 below -150.
// `clamped` is z, or some number of at most -126 in place of a lower z. For NaN one of the two is
// NaN.
#ifdef __AVX512F__
inline F larger(F x, F y) { return _mm512_max_ps(x, y); }  // y if one is NaN

inline F exp2(F z, F& clamped) {
  clamped = larger(splat(-200.f), z);
  const F f = _mm512_reduce_ps(clamped, 0x09);  // z - floor(z), exact
  F p = splat(1.86714203e-3f);
  p = p * f + 9.01700499e-3f;
  p = p * f + 5.57999312e-2f;
  p = p * f + 2.40164445e-1f;
  p = p * f + 6.93151312e-1f;
  p = p * f + 1.f;
  return _mm512_scalef_ps(p, clamped);  // by 2^floor(z)
}
#else
inline F larger(F x, F y) { return x > y ? x : y; }

inline F exp2(F z, F& clamped) {
  const F lowest = splat(-126.f), magic = splat(12582912.f);  // 1.5 * 2^23 rounds to integers
  clamped = larger(lowest, z);
  const F n = (clamped + magic) - magic, f = clamped - n;
  F p = splat(1.54035304e-4f);
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.f;
  const U power = bits<U>(clamped + magic) << 23;  // n in the low bits of the sum's mantissa
  const F scaled = bits<F>(bits<U>(p) + power);
  return z < lowest ? F{} : scaled;
}
#endif

// Two vectors, whose lanes together are 2 * kLanes neighbouring elements in any order.
struct Pair {
  F a, b;
};

constexpr int kPair = 2 * kLanes;

// How kPair elements of memory become floats and back. The halves of kSplit types are the even and
// the odd elements of 32-bit words.
struct SimdF32 {
  using Raw = float;
  static constexpr Raw kNone = -kInf;
  static constexpr bool kSplit = false;
  static Pair load(const Raw* from) {
    Pair x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  }
  static void store(Pair x, Raw* to) { __builtin_memcpy(to, &x, sizeof x); }
};

inline U load_words(const uint16_t* from) {
  U words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

struct SimdBF16 {
  using Raw = uint16_t;
  static constexpr Raw kNone = 0xff80;
  static constexpr bool kSplit = true;
  static Pair load(const Raw* from) {
    const U words = load_words(from);
    return {bits<F>(words << 16), bits<F>(words & 0xffff0000u)};
  }
  // In the upper half of each word. Faster than narrow_bf16, since the NaNs made here do not
  // overflow.
  static U rounded(F x) {
    const U u = bits<U>(x);
    return u + 0x7fffu + ((u >> 16) & 1u);
  }
  static void store(Pair x, Raw* to) {
    const U words = (rounded(x.a) >> 16) | (rounded(x.b) & 0xffff0000u);
    __builtin_memcpy(to, &words, sizeof words);
  }
};

struct SimdF16 {
  using Raw = uint16_t;
  static constexpr Raw kNone = 0xfc00;
#ifdef __AVX512F__
  static constexpr bool kSplit = false;
  static Pair load(const Raw* from) {
    const auto* words = reinterpret_cast<const __m256i_u*>(from);
    return {_mm512_cvtph_ps(words[0]), _mm512_cvtph_ps(words[1])};
  }
  static void store(Pair x, Raw* to) {
    auto* words = reinterpret_cast<__m256i_u*>(to);
    words[0] = _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT);
    words[1] = _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static constexpr bool kSplit = true;
  static Pair load(const Raw* from) {
    const U words = load_words(from);
    return {widen_f16<F>(words & 0xffffu), widen_f16<F>(words >> 16)};
  }
  static void store(Pair x, Raw* to) {
    const U words = narrow_f16<U>(x.a) | (narrow_f16<U>(x.b) << 16);
    __builtin_memcpy(to, &words, sizeof words);
  }
#endif
};

template <class V>
inline U lanes_of(const uint8_t* from) {
  V narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, U);
}

// Elements that are not kept are -inf. `keep` is read only if Masked.
template <class T, bool Masked>
inline Pair load(const typename T::Raw* x, const uint8_t* keep) {
  const Pair v = T::load(x);
  if constexpr (!Masked) return v;
  const F none = splat(-kInf);
  if constexpr (T::kSplit) {
    const U both = lanes_of<H>(keep);
    return {(both & 0xffu) != 0 ? v.a : none, (both >> 8) != 0 ? v.b : none};
  } else {
    const U a = lanes_of<B>(keep), b = lanes_of<B>(keep + kLanes);
    return {a != 0 ? v.a : none, b != 0 ? v.b : none};
  }
}

// The last, partial pair of a row: its missing lanes hold -inf.
template <class T, bool Masked>
inline Pair load_part(const typename T::Raw* from, const uint8_t* keep, int64_t count) {
  typename T::Raw lanes[kPair];
  for (int i = 0; i < kPair; ++i) {
    const bool in = i < count && (!Masked || keep[i]);
    lanes[i] = in ? from[i] : T::kNone;
  }
  return T::load(lanes);
}

template <class T>
inline void store_part(Pair x, typename T::Raw* to, int64_t count) {
  typename T::Raw lanes[kPair];
  T::store(x, lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

// Calls body(pair, chain) for `count` elements, in two chains.
template <class T, bool Masked, class Body>
inline void for_each(const typename T::Raw* x, const uint8_t* keep, int64_t count, Body&& body) {
  int64_t i = 0;
  for (; i + 2 * kPair <= count; i += 2 * kPair) {
    body(load<T, Masked>(x + i, keep + i), 0);
    body(load<T, Masked>(x + i + kPair, keep + i + kPair), 1);
  }
  for (; i + kPair <= count; i += kPair) body(load<T, Masked>(x + i, keep + i), 0);
  if (i < count) body(load_part<T, Masked>(x + i, keep + i, count - i), 1);
}

inline float sum(F x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

inline float largest(F x) {
  float m = -kInf;
  for (int i = 0; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Sums of e and e * z, z = (x - base) * rate in units of log 2. `max` may miss a NaN: the sums
// show it.
struct RowStats {
  float max = -kInf, base = -kInf;
  double sum = 0, weighted = 0;

  void rebase(float base_new, float rate) {
    if (base != -kInf) {
      const double shift = (double(base) - base_new) * rate, factor = __builtin_exp2(shift);
      weighted = factor == 0 ? 0 : factor * (weighted + shift * sum);
      sum *= factor;
    }
    base = base_new;
  }
};

template <class T, bool Masked>
float first_max(const typename T::Raw* x, const uint8_t* keep, int64_t count) {
  F top = splat(-kInf);
  for_each<T, Masked>(x, keep, count, [&](Pair v, int) { top = larger(v.a, larger(v.b, top)); });
  return largest(top);
}

template <class T, bool Masked>
RowStats row_stats(const typename T::Raw* x, const uint8_t* keep, int64_t width, float scale) {
  RowStats row;
  const float rate = scale * kLog2e;
  row.base = first_max<T, Masked>(x, keep, width < kFirst ? width : kFirst);
  for (int64_t b = 0; b < width; b += kBlock) {
    const int64_t count = width - b < kBlock ? width - b : kBlock;
    for (;;) {  // twice if powers relative to the base are too large
      const float base = row.base == -kInf ? 0.f : row.base;  // -inf - -inf is not a number
      F s[2] = {}, w[2] = {}, top[2] = {splat(-kInf), splat(-kInf)};
      for_each<T, Masked>(x + b, keep + b, count, [&](Pair v, int chain) {
        F za, zb;
        const F ea = exp2((v.a - base) * rate, za), eb = exp2((v.b - base) * rate, zb);
        top[chain] = larger(v.a, larger(v.b, top[chain]));
        s[chain] += ea + eb;
        w[chain] += ea * za + eb * zb;
      });
      const float max = largest(larger(top[0], top[1]));
      if (max > row.base && (max - row.base) * rate > kHeadroom) {
        row.rebase(max, rate);
        continue;
      }
      row.sum += sum(s[0] + s[1]);
      row.weighted += sum(w[0] + w[1]);
      row.max = max > row.max ? max : row.max;
      break;
    }
  }
  if (row.max > row.base) row.rebase(row.max, rate);
  if (row.weighted != row.weighted) row.sum = row.weighted;  // NaN shows here
  return row;
}

template <class T, bool Masked>
void stats_rows(const LogitsShard& shard, float* stats, int64_t begin, int64_t end) {
  const auto* logits = static_cast<const typename T::Raw*>(shard.logits);
  for (int64_t t = begin; t < end; ++t) {
    const auto* x = logits + t * shard.columns;
    const uint8_t* keep = Masked ? shard.keep + t * shard.columns : nullptr;
    const RowStats row = row_stats<T, Masked>(x, keep, shard.width, shard.scale[t]);
    const int64_t target = shard.targets[t] - shard.first;
    const bool mine = target >= 0 && target < shard.width;
    stats[t] = row.max;
    stats[t + shard.tokens] = float(row.sum);
    stats[t + shard.tokens * 2] = float(row.weighted * double(kLn2));
    stats[t + shard.tokens * 3] =
        mine ? load_part<T, Masked>(x + target, keep + target, 1).a[0] : 0.f;
  }
}

// A NaN whose low bits are 0, so that rounding it to bfloat16 does not overflow.
inline float plain(float x) { return x == x ? x : __builtin_nanf(""); }

template <class T, bool Masked>
void grad_row(const LogitsShard& shard, const RowGrad& g, int64_t t, const typename T::Raw* x,
              const uint8_t* keep, typename T::Raw* out) {
  const float scale = plain(shard.scale[t]), max = plain(g.max[t]), rate = scale * kLog2e;
  const float log2_sum = plain(g.log_sum[t]) * kLog2e, of_logprob = plain(g.grad_logprob[t]);
  const float of_entropy = plain(g.grad_entropy[t]);
  const float constant = -scale * (of_logprob + of_entropy * plain(g.entropy[t]));
  const float slope = -scale * of_entropy * kLn2;
  const auto each = [&](F v) {
    F log2_p;
    const F p = exp2((v - max) * rate - log2_sum, log2_p);
    return p * (log2_p * slope + constant);
  };
  const auto gradient = [&](Pair v) { return Pair{each(v.a), each(v.b)}; };

  const int64_t target = shard.targets[t] - shard.first;
  const bool mine = target >= 0 && target < shard.width && (!Masked || keep[target]);
  Pair chosen = {};  // before `out` is written, which may be `x`
  if (mine) chosen = gradient(load_part<T, false>(x + target, keep, 1));
  chosen.a += scale * of_logprob;

  int64_t i = 0;
  for (; i + kPair <= shard.width; i += kPair)
    T::store(gradient(load<T, Masked>(x + i, keep + i)), out + i);
  if (const int64_t rest = shard.width - i; rest > 0)
    store_part<T>(gradient(load_part<T, Masked>(x + i, keep + i, rest)), out + i, rest);
  if (mine) store_part<T>(chosen, out + target, 1);
}

template <class T, bool Masked>
void grad_rows(const LogitsShard& shard, const RowGrad& g, void* out, int64_t begin, int64_t end) {
  using Raw = typename T::Raw;
  for (int64_t t = begin; t < end; ++t) {
    const auto* x = static_cast<const Raw*>(shard.logits) + t * shard.columns;
    const uint8_t* keep = Masked ? shard.keep + t * shard.columns : nullptr;
    auto* to = static_cast<Raw*>(out) + t * shard.columns;
    const bool dead = g.max[t] == -kInf || (g.grad_logprob[t] == 0 && g.grad_entropy[t] == 0);
    if (!dead) grad_row<T, Masked>(shard, g, t, x, keep, to);
    const int64_t written = dead ? 0 : shard.width;
    __builtin_memset(to + written, 0, (shard.columns - written) * sizeof(Raw));
  }
}

template <class T>
void stats_of(const LogitsShard& shard, float* stats, int64_t begin, int64_t end) {
  return shard.keep ? stats_rows<T, true>(shard, stats, begin, end)
                    : stats_rows<T, false>(shard, stats, begin, end);
}

template <class T>
void grad_of(const LogitsShard& shard, const RowGrad& row, void* out, int64_t begin, int64_t end) {
  return shard.keep ? grad_rows<T, true>(shard, row, out, begin, end)
                    : grad_rows<T, false>(shard, row, out, begin, end);
}

void stats(const LogitsShard& shard, float* stats, int64_t begin, int64_t end) {
  switch (shard.dtype) {
    case DType::f32: return stats_of<SimdF32>(shard, stats, begin, end);
    case DType::bf16: return stats_of<SimdBF16>(shard, stats, begin, end);
    default: return stats_of<SimdF16>(shard, stats, begin, end);
  }
}

void grad(const LogitsShard& shard, const RowGrad& row, void* out, int64_t begin, int64_t end) {
  switch (shard.dtype) {
    case DType::f32: return grad_of<SimdF32>(shard, row, out, begin, end);
    case DType::bf16: return grad_of<SimdBF16>(shard, row, out, begin, end);
    default: return grad_of<SimdF16>(shard, row, out, begin, end);
  }
}

}  // namespace

const TokenLogprobKernels PYRL_KERNELS(token_logprob){stats, grad};

}  // namespace pyrl
