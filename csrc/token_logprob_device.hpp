#pragma once
// What the threads of a block do with one part of one row. The parts of a row are fixed by its
// length alone, so a token's bits do not depend on how many tokens come with it; a thread's share
// of a part follows the 16-byte words of memory, so they do depend on how the row is aligned.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "device.hpp"
#include "token_logprob.hpp"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace pyrl::token_logprob {

constexpr int kThreads = 512;
constexpr int64_t kPart = 1 << 15;  // most columns of a part
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kVanishes = -200.f;  // 2^z is 0 from here on; takes the place of -inf in products

// 16-byte loads a thread has in flight; with a mask more would not fit the registers.
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

PYRL_DEVICE float as_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

PYRL_DEVICE uint32_t as_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

// Element types: the kPerWord elements of a 32-bit word as floats, and back (nearest even).
struct F32 {
  using Raw = float;
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kNone = 0xff800000u;  // -inf
  PYRL_DEVICE static void widen(uint32_t word, float* v) { v[0] = as_float(word); }
  PYRL_DEVICE static uint32_t narrow(const float* v) { return as_bits(v[0]); }
};

struct BF16 {
  using Raw = uint16_t;
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kNone = 0xff80ff80u;
  PYRL_DEVICE static void widen(uint32_t word, float* v) {
    v[0] = as_float(word << 16);
    v[1] = as_float(word & 0xffff0000u);
  }
#ifdef __CUDA_ARCH__
  PYRL_DEVICE static uint32_t narrow(const float* v) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(v[0], v[1]);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
  }
#else
  static uint32_t rounded(float x) {
    const uint32_t u = as_bits(x);
    return x == x ? (u + 0x7fffu + ((u >> 16) & 1u)) >> 16 : 0x7fffu;
  }
  static uint32_t narrow(const float* v) { return rounded(v[0]) | rounded(v[1]) << 16; }
#endif
};

struct F16 {
  using Raw = uint16_t;
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kNone = 0xfc00fc00u;
#ifdef __CUDA_ARCH__
  PYRL_DEVICE static void widen(uint32_t word, float* v) {
    __half2 both;
    memcpy(&both, &word, sizeof word);
    v[0] = __low2float(both);
    v[1] = __high2float(both);
  }
  PYRL_DEVICE static uint32_t narrow(const float* v) {
    const __half2 both = __floats2half2_rn(v[0], v[1]);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
  }
#else
  static float wide(uint32_t h) {
    const uint32_t body = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    const uint32_t finite = as_bits(as_float(body) * 0x1p112f);
    return as_float(((h & 0x7c00u) == 0x7c00u ? body | 0x7f800000u : finite) | sign);
  }
  static uint32_t rounded(float x) {
    const uint32_t u = as_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    const float size = as_float(a);
    if (!(size == size)) return 0x7fffu;
    if (size >= 65520.f) return sign | 0x7c00u;
    if (size < 0x1p-14f) return sign | (as_bits(size + 0.5f) - (126u << 23));
    return sign | (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  }
  static void widen(uint32_t word, float* v) {
    v[0] = wide(word & 0xffffu);
    v[1] = wide(word >> 16);
  }
  static uint32_t narrow(const float* v) { return rounded(v[0]) | rounded(v[1]) << 16; }
#endif
};

struct alignas(16) Vec {
  uint32_t word[4];
};

template <class T>
constexpr int kVec = 4 * T::kPerWord;  // elements of a Vec

template <class T>
PYRL_DEVICE void widen(const Vec& from, float* v) {
  for (int i = 0; i < 4; ++i) T::widen(from.word[i], v + i * T::kPerWord);
}

template <class T>
PYRL_DEVICE Vec narrow(const float* v) {
  Vec to;
  for (int i = 0; i < 4; ++i) to.word[i] = T::narrow(v + i * T::kPerWord);
  return to;
}

template <class T>
PYRL_DEVICE float load_one(const typename T::Raw* from) {
  float v[2];
  uint32_t word = 0;
  memcpy(&word, from, sizeof *from);
  T::widen(word, v);
  return v[0];
}

template <class T>
PYRL_DEVICE void store_one(float x, typename T::Raw* to) {
  const float v[2] = {x, 0};
  const uint32_t word = T::narrow(v);
  memcpy(to, &word, sizeof *to);
}

PYRL_DEVICE int64_t num_parts(int64_t columns) {
  return columns > kPart ? (columns + kPart - 1) / kPart : 1;
}

// run(element type, whether there is a mask), both as types.
template <class Run>
void dispatch(const Shard& shard, const Run& run) {
  const auto of = [&](auto type) {
    return shard.keep ? run(type, std::true_type{}) : run(type, std::false_type{});
  };
  switch (shard.dtype) {
    case Float::f32: return of(F32{});
    case Float::bf16: return of(BF16{});
    case Float::f16: return of(F16{});
  }
}

// Where a block works: columns [begin, end) of token t, of which `vectors` Vecs from `middle` on
// lie on 16-byte boundaries, of the output too; the rest goes one by one.
struct Part {
  int64_t t, begin, end, middle, vectors;
};

template <class T>
PYRL_DEVICE Part part_of(int64_t block, int64_t columns, int64_t row_columns,
                         const typename T::Raw* from, const typename T::Raw* to) {
  const int64_t parts = num_parts(columns), t = block / parts, p = block % parts;
  const int64_t each = ((columns + parts - 1) / parts + 63) / 64 * 64;
  const int64_t begin = p * each < columns ? p * each : columns;
  const int64_t end = begin + each < columns ? begin + each : columns;
  const auto in = uintptr_t(from + t * row_columns + begin);
  const auto out = uintptr_t(to + t * row_columns + begin);
  const int64_t head = int64_t((16 - in % 16) % 16 / sizeof(typename T::Raw));
  const bool fits = in % sizeof(typename T::Raw) == 0 && in % 16 == out % 16 && head < end - begin;
  const int64_t middle = fits ? begin + head : end;
  return {t, begin, end, middle, (end - middle) / kVec<T>};
}

// The single columns of a part, those before and behind its Vecs: each(column).
template <class T, class Each>
PYRL_DEVICE void for_singles(const Part& part, const Place& at, const Each& each) {
  for (int64_t c = part.begin + at.thread; c < part.middle; c += at.threads) each(c);
  for (int64_t c = part.middle + part.vectors * kVec<T> + at.thread; c < part.end; c += at.threads)
    each(c);
}

// -inf takes the place of what is not kept.
template <class T>
PYRL_DEVICE void drop(Vec& v, const uint8_t* keep) {
  uint32_t bytes[T::kPerWord];  // of all kVec elements
  if (uintptr_t(keep) % 4 == 0)
    for (int i = 0; i < T::kPerWord; ++i) bytes[i] = reinterpret_cast<const uint32_t*>(keep)[i];
  else
    memcpy(bytes, keep, sizeof bytes);
  for (int i = 0; i < 4; ++i) {
    uint32_t kept = 0;
    for (int k = i * T::kPerWord; k < (i + 1) * T::kPerWord; ++k)
      if (bytes[k / 4] >> (k % 4 * 8) & 0xffu)
        kept |= T::kPerWord == 1 ? 0xffffffffu : 0xffffu << (k % 2 * 16);
    v.word[i] = (v.word[i] & kept) | (T::kNone & ~kept);
  }
}

// The kUnroll Vecs of a thread, `threads` apart; those past the end of the part are -inf.
template <class T, bool Masked>
PYRL_DEVICE void load_vecs(const typename T::Raw* middle, const uint8_t* keep, int64_t first,
                           int64_t vectors, int threads, Vec (&v)[kUnroll<Masked>]) {
  for (int u = 0; u < kUnroll<Masked>; ++u) {
    const int64_t i = first + int64_t(u) * threads;
    v[u] = Vec{{T::kNone, T::kNone, T::kNone, T::kNone}};
    if (i < vectors) {
      v[u] = reinterpret_cast<const Vec*>(middle)[i];
      if constexpr (Masked) drop<T>(v[u], keep + i * kVec<T>);
    }
  }
}

// Sums of e and e * z, z = (x - max) * rate in units of log 2. A NaN may be passed over by `max`:
// the sums show it.
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
PYRL_DEVICE State thread_state(const Shard& shard, const Place& at) {
  using Raw = typename T::Raw;
  const auto* logits = static_cast<const Raw*>(shard.logits);
  const Part part = part_of<T>(at.block, shard.width, shard.columns, logits, logits);
  const Raw* row = logits + part.t * shard.columns;
  const uint8_t* keep = Masked ? shard.keep + part.t * shard.columns : nullptr;
  const float rate = shard.scale[part.t] * kLog2e;
  State state{-INFINITY, 0, 0};
  for (int64_t i = at.thread; i < part.vectors; i += int64_t(kUnroll<Masked>) * at.threads) {
    Vec v[kUnroll<Masked>];
    load_vecs<T, Masked>(row + part.middle, keep + (Masked ? part.middle : 0), i, part.vectors,
                         at.threads, v);
    float x[kVec<T>], top = state.max;
    for (int u = 0; u < kUnroll<Masked>; ++u) {
      widen<T>(v[u], x);
      for (int k = 0; k < kVec<T>; ++k) top = fmaxf(top, x[k]);
    }
    if (top > state.max) state.raise(top, rate);
    const float base = base_of(top);
    for (int u = 0; u < kUnroll<Masked>; ++u) {
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

// Phase 2, for half = threads / 2, threads / 4, ... 1: a tree over the threads of a block.
PYRL_DEVICE void join_half(State* states, int half, float rate, int thread) {
  if (thread < half) states[thread].join(states[thread + half], rate);
}

// Afterwards: the parts of token t in order, `parts` [tokens * num_parts(width)], to `stats`.
template <class T>
PYRL_DEVICE void finish(const Shard& shard, const State* parts, float* stats, int64_t t) {
  const int64_t count = num_parts(shard.width);
  const float rate = shard.scale[t] * kLog2e;
  State row = parts[t * count];
  for (int64_t p = 1; p < count; ++p) row.join(parts[t * count + p], rate);
  const int64_t target = shard.targets[t] - shard.first, at = t * shard.columns + target;
  const bool mine = target >= 0 && target < shard.width;
  const bool kept = mine && (!shard.keep || shard.keep[at]);
  stats[t] = row.max;
  stats[t + shard.tokens] = row.weighted == row.weighted ? row.sum : row.weighted;  // NaN shows
  stats[t + shard.tokens * 2] = row.weighted * kLn2;
  const auto* logits = static_cast<const typename T::Raw*>(shard.logits);
  stats[t + shard.tokens * 3] = kept ? load_one<T>(logits + at) : mine ? -INFINITY : 0.f;
}

// The gradient of one row, as a function of a logit.
struct Slope {
  float max, rate, log2_sum, constant, slope, chosen;
  int64_t target;  // column of the target that is kept, or -1
  bool dead;

  PYRL_DEVICE Slope(const Shard& shard, const RowGrad& g, int64_t t) {
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
  // kVec logits from column c on, and their gradients in their place.
  template <class T>
  PYRL_DEVICE void apply(Vec& v, int64_t c, int64_t width) const {
    float x[kVec<T>];
    widen<T>(v, x);
    for (int k = 0; k < kVec<T>; ++k) x[k] = (*this)(x[k]);
    if (c <= target && target < c + kVec<T>)
      for (int k = 0; k < kVec<T>; ++k) x[k] += c + k == target ? chosen : 0.f;
    if (c + kVec<T> > width)
      for (int k = 0; k < kVec<T>; ++k) x[k] = c + k < width ? x[k] : 0.f;
    v = narrow<T>(x);
  }
};

// A thread's share of a part of the columns, padding and rows without gradient included.
template <class T, bool Masked>
PYRL_DEVICE void thread_grad(const Shard& shard, const RowGrad& g, void* out, const Place& at) {
  using Raw = typename T::Raw;
  const auto* logits = static_cast<const Raw*>(shard.logits);
  auto* to = static_cast<Raw*>(out);
  const Part part = part_of<T>(at.block, shard.columns, shard.columns, logits, to);
  const int64_t first = part.t * shard.columns;
  const Raw* row = logits + first;
  const uint8_t* keep = Masked ? shard.keep + first : nullptr;
  const Slope slope(shard, g, part.t);
  to += first;
  auto* words = reinterpret_cast<Vec*>(to + part.middle);
  if (slope.dead) {
    for (int64_t i = at.thread; i < part.vectors; i += at.threads) words[i] = Vec{};
    return for_singles<T>(part, at, [&](int64_t c) { store_one<T>(0.f, to + c); });
  }
  for (int64_t i = at.thread; i < part.vectors; i += int64_t(kUnroll<Masked>) * at.threads) {
    Vec v[kUnroll<Masked>];
    load_vecs<T, Masked>(row + part.middle, keep + (Masked ? part.middle : 0), i, part.vectors,
                         at.threads, v);
    for (int u = 0; u < kUnroll<Masked>; ++u) {
      const int64_t vec = i + int64_t(u) * at.threads;
      if (vec >= part.vectors) continue;
      slope.apply<T>(v[u], part.middle + vec * kVec<T>, shard.width);
      words[vec] = v[u];
    }
  }
  for_singles<T>(part, at, [&](int64_t c) {
    float x = 0;
    if (c < shard.width && !(Masked && !keep[c]))
      x = slope(load_one<T>(row + c)) + (c == slope.target ? slope.chosen : 0.f);
    store_one<T>(x, to + c);
  });
}

}  // namespace pyrl::token_logprob
