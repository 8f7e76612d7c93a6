#pragma once
// What the threads of a block do with one part of one row. The parts of a row depend on its length
// alone, so the bits of a token do not depend on how many tokens come with it. A thread's share of a
// part follows the 16-byte words of memory, so they do depend on how the row is aligned.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "token_logprob/api.hpp"

namespace pyrl::token_logprob {

constexpr int kThreads = 128, kLanes = 32;
constexpr int64_t kPart = 1 << 15;  // columns of a part, at most
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kVanishes = -200.f;  // 2^z is 0 from here on; replaces -inf in products

// 16-byte loads in flight per thread; with a mask more would not fit the registers.
template <bool Masked>
constexpr int kUnroll = Masked ? 2 : 4;

PYRL_DEVICE float power(float z) {  // 2^z
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(z));
  return y;
#else
  return exp2f(z);
#endif
}

// The elements of type T in a 32-bit word, as floats and back.
template <class T>
struct Word {
  static constexpr int kCount = 2;
  static constexpr uint32_t kNone = std::is_same_v<T, BF16> ? 0xff80ff80u : 0xfc00fc00u;  // -inf
  static PYRL_DEVICE void widen(uint32_t word, float* v) { T::widen_pair(word, v); }
  static PYRL_DEVICE uint32_t narrow(const float* v) { return T::narrow_pair(v); }
  // The larger of each half, of a NaN and a number the number.
  static PYRL_DEVICE uint32_t max(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    using Pair = std::conditional_t<std::is_same_v<T, BF16>, __nv_bfloat162, __half2>;
    return bits<uint32_t>(__hmax2(bits<Pair>(a), bits<Pair>(b)));
#else
    float x[2], y[2];
    widen(a, x), widen(b, y);
    const float v[2] = {fmaxf(x[0], y[0]), fmaxf(x[1], y[1])};
    return narrow(v);
#endif
  }
};

template <>
struct Word<F32> {
  static constexpr int kCount = 1;
  static constexpr uint32_t kNone = 0xff800000u;
  static PYRL_DEVICE void widen(uint32_t word, float* v) { v[0] = bits<float>(word); }
  static PYRL_DEVICE uint32_t narrow(const float* v) { return bits<uint32_t>(v[0]); }
  static PYRL_DEVICE uint32_t max(uint32_t a, uint32_t b) {
    return bits<uint32_t>(fmaxf(bits<float>(a), bits<float>(b)));
  }
};

struct alignas(16) Vec {
  uint32_t word[4];
};

template <class T>
constexpr int kVec = 4 * Word<T>::kCount;  // elements of a Vec

template <class T>
PYRL_DEVICE void widen(const Vec& from, float* v) {
  for (int i = 0; i < 4; ++i) Word<T>::widen(from.word[i], v + i * Word<T>::kCount);
}

// What becomes of a Vec of T as elements of type O: 16 bytes, or 8 of halves of floats.
template <class O, class T>
struct alignas(16 * Word<T>::kCount / Word<O>::kCount) VecOf {
  uint32_t word[4 * Word<T>::kCount / Word<O>::kCount];
};

template <class O, class T>
PYRL_DEVICE VecOf<O, T> narrow(const float* v) {
  VecOf<O, T> to;
  for (int i = 0; i < kVec<T> / Word<O>::kCount; ++i)
    to.word[i] = Word<O>::narrow(v + i * Word<O>::kCount);
  return to;
}

template <class T>
PYRL_DEVICE float load_one(const typename T::Raw* from) {
  float v[2];
  uint32_t word = 0;
  memcpy(&word, from, sizeof *from);
  Word<T>::widen(word, v);
  return v[0];
}

template <class T>
PYRL_DEVICE void store_one(float x, typename T::Raw* to) {
  const float v[2] = {x, 0};
  const uint32_t word = Word<T>::narrow(v);
  memcpy(to, &word, sizeof *to);
}

PYRL_DEVICE int64_t num_parts(int64_t columns) {
  return columns > kPart ? (columns + kPart - 1) / kPart : 1;
}

// Calls run(element type, whether there is a mask), both as types.
template <class Run>
void dispatch(const LogitsShard& shard, const Run& run) {
  const auto of = [&](auto type) {
    return shard.keep ? run(type, std::true_type{}) : run(type, std::false_type{});
  };
  switch (shard.dtype) {
    case DType::f32: return of(F32{});
    case DType::bf16: return of(BF16{});
    default: return of(F16{});
  }
}

// The same with the type that is written between them.
template <class Run>
void dispatch(const LogitsShard& shard, DType dtype, const Run& run) {
  dispatch(shard, [&](auto type, auto masked) {
    if constexpr (std::is_same_v<decltype(type), F32>) {
      if (dtype == DType::bf16) return run(type, BF16{}, masked);
      if (dtype == DType::f16) return run(type, F16{}, masked);
    }
    run(type, type, masked);
  });
}

// The work of a block: columns [begin, end) of token t. `vectors` Vecs from `middle` on are aligned
// in both input and output; the other columns are handled one by one.
struct Part {
  int64_t t, begin, end, middle;
  int vectors;
};

template <class T, class O = T>
PYRL_DEVICE Part part_of(int64_t block, int64_t columns, int64_t row_columns,
                         const typename T::Raw* from, const typename O::Raw* to) {
  const int64_t parts = num_parts(columns), t = block / parts, p = block % parts;
  const int64_t each = ((columns + parts - 1) / parts + 63) / 64 * 64;
  const int64_t begin = p * each < columns ? p * each : columns;
  const int64_t end = begin + each < columns ? begin + each : columns;
  const auto in = uintptr_t(from + t * row_columns + begin);
  const auto out = uintptr_t(to + t * row_columns + begin);
  const int64_t head = int64_t((16 - in % 16) % 16 / sizeof(typename T::Raw));
  const bool fits = in % sizeof(typename T::Raw) == 0 && head < end - begin &&
                    (out + head * sizeof(typename O::Raw)) % sizeof(VecOf<O, T>) == 0;
  const int64_t middle = fits ? begin + head : end;
  return {t, begin, end, middle, int(end - middle) / kVec<T>};
}

// Calls each(column) for the columns of a part before and after its Vecs.
template <class T, class Each>
PYRL_DEVICE void for_singles(const Part& part, const ThreadIndex& at, const Each& each) {
  for (int64_t c = part.begin + at.thread; c < part.middle; c += at.threads) each(c);
  for (int64_t c = part.middle + int64_t(part.vectors) * kVec<T> + at.thread; c < part.end;
       c += at.threads)
    each(c);
}

// Replaces what is not kept by -inf.
template <class T>
PYRL_DEVICE void drop(Vec& v, const uint8_t* keep) {
  uint32_t bytes[Word<T>::kCount];  // of all kVec elements
  if (uintptr_t(keep) % 4 == 0)
    for (int i = 0; i < Word<T>::kCount; ++i) bytes[i] = reinterpret_cast<const uint32_t*>(keep)[i];
  else
    memcpy(bytes, keep, sizeof bytes);
  for (int i = 0; i < 4; ++i) {
    uint32_t kept = 0;
    for (int k = i * Word<T>::kCount; k < (i + 1) * Word<T>::kCount; ++k)
      if (bytes[k / 4] >> (k % 4 * 8) & 0xffu)
        kept |= Word<T>::kCount == 1 ? 0xffffffffu : 0xffffu << (k % 2 * 16);
    v.word[i] = (v.word[i] & kept) | (Word<T>::kNone & ~kept);
  }
}

// The kUnroll Vecs of a thread, `threads` apart; those past the end of the part are -inf.
template <class T, bool Masked>
PYRL_DEVICE void load_vecs(const typename T::Raw* middle, const uint8_t* keep, int first,
                           int vectors, int threads, Vec (&v)[kUnroll<Masked>]) {
  for (int u = 0; u < kUnroll<Masked>; ++u) {
    const int i = first + u * threads;
    v[u] = Vec{{Word<T>::kNone, Word<T>::kNone, Word<T>::kNone, Word<T>::kNone}};
    if (i < vectors) {
      v[u] = reinterpret_cast<const Vec*>(middle)[i];
      if constexpr (Masked) drop<T>(v[u], keep + i * kVec<T>);
    }
  }
}

// Sums of e and e * z, z = (x - max) * rate in units of log 2. `max` may miss a NaN: the sums
// show it.
struct State {
  float max, sum, weighted;

  PYRL_DEVICE void raise(float to, float rate) {
    if (max != to && max != -INFINITY) {
      const float shift = fmaxf((max - to) * rate, kVanishes), factor = power(shift);
      weighted = factor * (weighted + shift * sum);
      sum *= factor;
    }
    max = to;
  }
  PYRL_DEVICE void add(float x, float base, float rate) {
    const float z = (x - base) * rate, e = power(z);
    sum += e;
    weighted += e * fmaxf(z, kVanishes);
  }
  PYRL_DEVICE void join(State other, float rate) {
    const float top = fmaxf(max, other.max);
    raise(top, rate);
    other.raise(top, rate);
    sum += other.sum;
    weighted += other.weighted;
  }
};

PYRL_DEVICE float base_of(float max) { return max == -INFINITY ? 0.f : max; }  // -inf - -inf is NaN

// Phase 1: a thread's share of a part of the valid columns.
template <class T, bool Masked>
PYRL_DEVICE State thread_state(const LogitsShard& shard, const ThreadIndex& at) {
  using Raw = typename T::Raw;
  const auto* logits = static_cast<const Raw*>(shard.logits);
  const Part part = part_of<T>(at.block, shard.width, shard.columns, logits, logits);
  const Raw* row = logits + part.t * shard.columns;
  const uint8_t* keep = Masked ? shard.keep + part.t * shard.columns : nullptr;
  const float rate = shard.scale[part.t] * kLog2e;
  State state{-INFINITY, 0, 0};
  for (int i = at.thread; i < part.vectors; i += kUnroll<Masked> * at.threads) {
    Vec v[kUnroll<Masked>];
    load_vecs<T, Masked>(row + part.middle, keep + (Masked ? part.middle : 0), i, part.vectors,
                         at.threads, v);
    uint32_t tops = v[0].word[0];
    for (int u = 0; u < kUnroll<Masked>; ++u)
      for (int w = 0; w < 4; ++w) tops = Word<T>::max(tops, v[u].word[w]);
    float x[kVec<T>], top = state.max;
    Word<T>::widen(tops, x);
    for (int k = 0; k < Word<T>::kCount; ++k) top = fmaxf(top, x[k]);
    if (top > state.max) state.raise(top, rate);
    const float base = base_of(top);
    for (int u = 0; u < kUnroll<Masked>; ++u) {
      if (i + u * at.threads >= part.vectors) continue;
      widen<T>(v[u], x);
      for (int k = 0; k < kVec<T>; ++k) state.add(x[k], base, rate);
    }
  }
  for_singles<T>(part, at, [&](int64_t c) {
    const float x = Masked && !keep[c] ? -INFINITY : load_one<T>(row + c);
    if (x > state.max) state.raise(x, rate);
    state.add(x, base_of(state.max), rate);
  });
  return state;
}

// Phase 2: the states of kLanes neighbours joined in the order of a warp's shuffles, those half the
// number apart first; then, by the first warp, those of the warps.
#ifdef __CUDACC__
__device__ inline State join_lanes(State s, float rate) {
  float top = s.max;
  PYRL_UNROLL
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
  s.raise(top, rate);
  PYRL_UNROLL
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    s.sum += __shfl_xor_sync(~0u, s.sum, apart);
    s.weighted += __shfl_xor_sync(~0u, s.weighted, apart);
  }
  return s;
}
#endif

// The same on the host; kLanes states, overwritten.
inline State join_lanes(State* s, float rate) {
  float top = s[0].max;
  for (int i = 1; i < kLanes; ++i) top = fmaxf(top, s[i].max);
  for (int i = 0; i < kLanes; ++i) s[i].raise(top, rate);
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) {
      s[i].sum += s[i + apart].sum;
      s[i].weighted += s[i + apart].weighted;
    }
  return s[0];
}

// What a row comes to: its log-prob, entropy, maximum and log-sum, [tokens] each.
PYRL_DEVICE void conclude(const TokenRows& rows, int64_t t, float top, float sum, float weighted,
                          float target, float scale, bool inside) {
  const float log_sum = logf(sum);
  const float logprob = sum == 0 ? -INFINITY : (target - base_of(top)) * scale - log_sum;
  rows.logprob[t] = inside ? logprob : NAN;
  rows.entropy[t] = sum == 0 ? 0 : log_sum - weighted / sum;
  rows.max[t] = top;
  rows.log_sum[t] = log_sum;
}

// The target's logit, and whether the target is a valid column of this shard. `target`: of token t.
struct Chosen {
  float logit;
  bool inside;
};
template <class T>
PYRL_DEVICE Chosen chosen_of(const LogitsShard& shard, int64_t t, int64_t target) {
  target -= shard.first;
  const int64_t at = t * shard.columns + target;
  const bool inside = target >= 0 && target < shard.width;
  const bool kept = inside && (!shard.keep || shard.keep[at]);
  const auto* logits = static_cast<const typename T::Raw*>(shard.logits);
  return {kept ? load_one<T>(logits + at) : inside ? -INFINITY : 0.f, inside};
}

// The end of token t with the state of all its columns here: into `stats`, or into `rows` if that is
// the whole vocabulary.
PYRL_DEVICE void finish(const LogitsShard& shard, State row, Chosen chosen, const StatsOut& out, int64_t t) {
  if (row.weighted != row.weighted) row.sum = row.weighted;  // NaN shows
  row.weighted *= kLn2;
  if (!out.stats)
    return conclude(out.rows, t, row.max, row.sum, row.weighted, chosen.logit, shard.scale[t], chosen.inside);
  const float found[4] = {row.max, row.sum, row.weighted, chosen.logit};
  for (int i = 0; i < 4; ++i) out.stats[t + shard.tokens * i] = found[i];
}

// Joins the parts of token t in order, `parts` [tokens * num_parts(width)], and finishes it.
template <class T>
PYRL_DEVICE void finish_parts(const LogitsShard& shard, const State* parts, const StatsOut& out,
                              int64_t t) {
  const int64_t count = num_parts(shard.width);
  const float rate = shard.scale[t] * kLog2e;
  State row = parts[t * count];
  for (int64_t p = 1; p < count; ++p) row.join(parts[t * count + p], rate);
  finish(shard, row, chosen_of<T>(shard, t, shard.targets[t]), out, t);
}

// Token t of statistics of several shards.
PYRL_DEVICE void combine(const ShardStats& s, const TokenRows& rows, int64_t t) {
  const float scale = s.scale[t];
  const auto at = [&](int shard, int i) { return s.stats[(int64_t(shard) * 4 + i) * s.tokens + t]; };
  float top = -INFINITY, sum = 0, weighted = 0, target = 0;
  for (int r = 0; r < s.shards; ++r) top = fmaxf(top, at(r, 0));
  for (int r = 0; r < s.shards; ++r) {
    float shift = (at(r, 0) - base_of(top)) * scale;
    const float factor = expf(shift);
    if (factor == 0) shift = 0;  // 0 * -inf
    sum += factor * at(r, 1);
    weighted += factor * (at(r, 2) + shift * at(r, 1));
    target += at(r, 3);
  }
  const bool inside = s.targets[t] >= 0 && s.targets[t] < s.valid_vocab;
  conclude(rows, t, top, sum, weighted, target, scale, inside);
}

// The gradient of one row as a function of a logit.
struct Slope {
  float max, rate, log2_sum, constant, slope, chosen;
  int64_t target;  // column of the target that is kept, or -1
  bool dead;

  PYRL_DEVICE Slope(const LogitsShard& shard, const RowGrad& g, int64_t t) {
    const float scale = shard.scale[t];
    max = g.max[t], rate = scale * kLog2e, log2_sum = g.log_sum[t] * kLog2e;
    constant = -scale * (g.grad_logprob[t] + g.grad_entropy[t] * g.entropy[t]);
    slope = -scale * g.grad_entropy[t] * kLn2;
    chosen = scale * g.grad_logprob[t];
    target = shard.targets[t] - shard.first;
    const bool mine = target >= 0 && target < shard.width;
    if (!mine || (shard.keep && !shard.keep[t * shard.columns + target])) target = -1;
    dead = max == -INFINITY || (g.grad_logprob[t] == 0 && g.grad_entropy[t] == 0);
  }
  PYRL_DEVICE float operator()(float x) const {
    const float z = (x - max) * rate - log2_sum, p = power(z);
    return p * (fmaxf(z, kVanishes) * slope + constant);
  }
  // The gradients of the kVec logits from column c on.
  template <class T, class O>
  PYRL_DEVICE VecOf<O, T> apply(const Vec& v, int64_t c, int64_t width) const {
    float x[kVec<T>];
    widen<T>(v, x);
    for (int k = 0; k < kVec<T>; ++k) x[k] = (*this)(x[k]);
    if (c <= target && target < c + kVec<T>)
      for (int k = 0; k < kVec<T>; ++k) x[k] += c + k == target ? chosen : 0.f;
    if (c + kVec<T> > width)
      for (int k = 0; k < kVec<T>; ++k) x[k] = c + k < width ? x[k] : 0.f;
    return narrow<O, T>(x);
  }
};

// A thread's share of a part of the columns, padding and rows without gradient included.
template <class T, class O, bool Masked>
PYRL_DEVICE void thread_grad(const LogitsShard& shard, const RowGrad& g, void* out, const ThreadIndex& at) {
  using Raw = typename T::Raw;
  const auto* logits = static_cast<const Raw*>(shard.logits);
  auto* to = static_cast<typename O::Raw*>(out);
  const Part part = part_of<T, O>(at.block, shard.columns, shard.columns, logits, to);
  const int64_t first = part.t * shard.columns;
  const Raw* row = logits + first;
  const uint8_t* keep = Masked ? shard.keep + first : nullptr;
  const Slope slope(shard, g, part.t);
  to += first;
  auto* words = reinterpret_cast<VecOf<O, T>*>(to + part.middle);
  if (slope.dead) {
    for (int i = at.thread; i < part.vectors; i += at.threads) words[i] = VecOf<O, T>{};
    return for_singles<T>(part, at, [&](int64_t c) { store_one<O>(0.f, to + c); });
  }
  for (int i = at.thread; i < part.vectors; i += kUnroll<Masked> * at.threads) {
    Vec v[kUnroll<Masked>];
    load_vecs<T, Masked>(row + part.middle, keep + (Masked ? part.middle : 0), i, part.vectors,
                         at.threads, v);
    for (int u = 0; u < kUnroll<Masked>; ++u) {
      const int vec = i + u * at.threads;
      if (vec >= part.vectors) continue;
      words[vec] = slope.apply<T, O>(v[u], part.middle + int64_t(vec) * kVec<T>, shard.width);
    }
  }
  for_singles<T>(part, at, [&](int64_t c) {
    float x = 0;
    if (c < shard.width && !(Masked && !keep[c]))
      x = slope(load_one<T>(row + c)) + (c == slope.target ? slope.chosen : 0.f);
    store_one<O>(x, to + c);
  });
}

}  // namespace pyrl::token_logprob
