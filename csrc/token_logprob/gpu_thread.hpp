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

constexpr int kThreads = 512;
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
};

template <>
struct Word<F32> {
  static constexpr int kCount = 1;
  static constexpr uint32_t kNone = 0xff800000u;
  static PYRL_DEVICE void widen(uint32_t word, float* v) { v[0] = bits<float>(word); }
  static PYRL_DEVICE uint32_t narrow(const float* v) { return bits<uint32_t>(v[0]); }
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

template <class T>
PYRL_DEVICE Vec narrow(const float* v) {
  Vec to;
  for (int i = 0; i < 4; ++i) to.word[i] = Word<T>::narrow(v + i * Word<T>::kCount);
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

// The work of a block: columns [begin, end) of token t. `vectors` Vecs from `middle` on are aligned
// to 16 bytes in both input and output; the other columns are handled one by one.
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

// Calls each(column) for the columns of a part before and after its Vecs.
template <class T, class Each>
PYRL_DEVICE void for_singles(const Part& part, const ThreadIndex& at, const Each& each) {
  for (int64_t c = part.begin + at.thread; c < part.middle; c += at.threads) each(c);
  for (int64_t c = part.middle + part.vectors * kVec<T> + at.thread; c < part.end; c += at.threads)
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
PYRL_DEVICE void load_vecs(const typename T::Raw* middle, const uint8_t* keep, int64_t first,
                           int64_t vectors, int threads, Vec (&v)[kUnroll<Masked>]) {
  for (int u = 0; u < kUnroll<Masked>; ++u) {
    const int64_t i = first + int64_t(u) * threads;
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

// Afterwards: joins the parts of token t in order, `parts` [tokens * num_parts(width)], into `stats`.
template <class T>
PYRL_DEVICE void finish(const LogitsShard& shard, const State* parts, float* stats, int64_t t) {
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
  // Replaces the kVec logits from column c on by their gradients.
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
PYRL_DEVICE void thread_grad(const LogitsShard& shard, const RowGrad& g, void* out, const ThreadIndex& at) {
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
