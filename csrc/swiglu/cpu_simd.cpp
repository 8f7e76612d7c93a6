// A row at a time, two vectors at a time; the rest of a row goes through a buffer.
#include "common/pairs.hpp"
#include "swiglu/api.hpp"

namespace pyrl {
namespace {

inline F splat(float x) { return F{} + x; }

// e^x to 1e-7 for x in [-87, 88]: 2^n * e^f with f in [-log(2) / 2, log(2) / 2].
inline F exp_within(F x) {
  const F magic = splat(12582912.f);  // 1.5 * 2^23 rounds to integers
  const F shifted = x * 1.44269504f + magic, n = shifted - magic;
  const F f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log(2), high part and low
  F p = splat(1.98756915e-4f);
  p = p * f + 1.39819995e-3f;
  p = p * f + 8.33345191e-3f;
  p = p * f + 4.16657959e-2f;
  p = p * f + 1.66666655e-1f;
  p = p * f + 5.00000012e-1f;
  p = (p * f) * f + f + 1.f;
  return bits<F>(bits<U>(p) + (bits<U>(shifted) << 23));  // n is in the low bits
}

struct Sigmoid {
  F s, rest;  // 1 / (1 + e^-x), and 1 less that
};

inline Sigmoid sigmoid(F x) {
  const F low = splat(-87.f), high = splat(87.f);
  F z = x > low ? x : low;  // NaN: it shows in what is multiplied by x
  z = z < high ? z : high;
  const F e = exp_within(-z), s = 1.f / (1.f + e);
  return {s, e * s};
}

inline F value(F gate, F up, float weight) { return gate * sigmoid(gate).s * up * weight; }

inline Pair value(Pair gate, Pair up, float weight) {
  return {value(gate.a, up.a, weight), value(gate.b, up.b, weight)};
}

template <class T>
void forward_row(const typename T::Raw* gate, const typename T::Raw* up, float weight,
                 typename T::Raw* out, int64_t width) {
  int64_t i = 0;
  for (; i + kPair <= width; i += kPair)
    T::store(value(T::load(gate + i), T::load(up + i), weight), out + i);
  if (const int64_t rest = width - i; rest > 0)
    store_rest<T>(value(load_rest<T>(gate + i, rest), load_rest<T>(up + i, rest), weight), out + i,
                  rest);
}

// The derivatives of gate and up in place of them. Returns that of the weight.
inline F derive(F& gate, F& up, F grad, float weight) {
  const auto [s, rest] = sigmoid(gate);
  const F silu = gate * s, t = grad * weight, product = silu * up;
  gate = t * up * (s + silu * rest);
  up = t * silu;
  return grad * product;
}

template <class T>
float grad_row(const typename T::Raw* gate, const typename T::Raw* up, float weight,
               const typename T::Raw* grad, typename T::Raw* gate_out, typename T::Raw* up_out,
               int64_t width) {
  F sum_a{}, sum_b{};
  const auto both = [&](Pair& g, Pair& u, Pair y) {
    sum_a += derive(g.a, u.a, y.a, weight);
    sum_b += derive(g.b, u.b, y.b, weight);
  };
  int64_t i = 0;
  for (; i + kPair <= width; i += kPair) {
    Pair g = T::load(gate + i), u = T::load(up + i);
    both(g, u, T::load(grad + i));
    T::store(g, gate_out + i);
    T::store(u, up_out + i);
  }
  if (const int64_t rest = width - i; rest > 0) {
    Pair g = load_rest<T>(gate + i, rest), u = load_rest<T>(up + i, rest);
    both(g, u, load_rest<T>(grad + i, rest));
    store_rest<T>(g, gate_out + i, rest);
    store_rest<T>(u, up_out + i, rest);
  }
  return total(sum_a + sum_b);
}

template <class T>
void rows(const SwigluArgs& s, int64_t begin, int64_t end) {
  using Raw = typename T::Raw;
  const int64_t width = s.width;
  const auto* const gate_up = static_cast<const Raw*>(s.gate_up);
  const auto* const grad = static_cast<const Raw*>(s.grad);
  auto* const out = static_cast<Raw*>(s.out);
  for (int64_t n = begin; n < end; ++n) {
    const Raw *gate = gate_up + 2 * n * width, *up = gate + width;
    const float weight = s.weight ? s.weight[n] : 1.f;
    if (!grad) {
      forward_row<T>(gate, up, weight, out + n * width, width);
      continue;
    }
    Raw* const to = out + 2 * n * width;
    const float total = grad_row<T>(gate, up, weight, grad + n * width, to, to + width, width);
    if (s.weight_grad) s.weight_grad[n] = total;
  }
}

void run(const SwigluArgs& s, int64_t begin, int64_t end) {
  return s.dtype == DType::f32 ? rows<SimdF32>(s, begin, end) : rows<SimdBF16>(s, begin, end);
}

}  // namespace

const Swiglu PYRL_KERNELS(swiglu) = run;

}  // namespace pyrl
