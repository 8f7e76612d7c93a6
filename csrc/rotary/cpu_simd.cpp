// Turns a head at a time; the compiler vectorises the loop over its pairs.
#include <string.h>

#include "common/dtype.hpp"
#include "common/simd.hpp"
#include "rotary/api.hpp"

namespace pyrl {
namespace {

template <class T, bool From, bool To>
inline void turn(const typename T::Raw* __restrict src, typename T::Raw* __restrict out,
                 const typename T::Acc* __restrict turns, int64_t half, typename T::Acc sign) {
  for (int64_t j = 0; j < half; ++j) {
    const auto a = T::widen(src[From ? 2 * j : j]), b = T::widen(src[From ? 2 * j + 1 : j + half]);
    const auto c = turns[j], s = turns[half + j] * sign;
    out[To ? 2 * j : j] = T::narrow(a * c - b * s);
    out[To ? 2 * j + 1 : j + half] = T::narrow(b * c + a * s);
  }
}

template <class T, bool From, bool To>
void turn_rows(const RotaryArgs& r, int64_t begin, int64_t end) {
  using Raw = typename T::Raw;
  using Acc = typename T::Acc;
  const Acc sign = r.back ? -1 : 1;
  for (int64_t t = begin; t < end; ++t) {
    const Acc* turns = static_cast<const Acc*>(r.turns) + t * r.turned;
    for (const RotaryPart& part : r.parts) {
      const int64_t plain = part.width - r.turned, at = r.last ? plain : 0;
      for (int64_t h = 0; h < part.heads; ++h) {
        const Raw* src = static_cast<const Raw*>(part.src) + t * part.row + h * part.head;
        Raw* out = static_cast<Raw*>(part.out) + (t * part.heads + h) * part.width;
        const int64_t rest = r.last ? 0 : r.turned;
        if (plain) memcpy(out + rest, src + rest, plain * sizeof(Raw));
        turn<T, From, To>(src + at, out + at, turns, r.turned / 2, sign);
      }
    }
  }
}

template <class T>
void turn_pairs(const RotaryArgs& r, int64_t begin, int64_t end) {
  if (r.src_neighbours)
    (r.out_neighbours ? turn_rows<T, true, true> : turn_rows<T, true, false>)(r, begin, end);
  else
    (r.out_neighbours ? turn_rows<T, false, true> : turn_rows<T, false, false>)(r, begin, end);
}

void run(const RotaryArgs& r, int64_t begin, int64_t end) {
  switch (r.dtype) {
    case DType::f32: return turn_pairs<F32>(r, begin, end);
    case DType::bf16: return turn_pairs<BF16>(r, begin, end);
    case DType::f16: return turn_pairs<F16>(r, begin, end);
    default: return turn_pairs<F64>(r, begin, end);
  }
}

}  // namespace

const Rotary PYRL_KERNELS(rotary) = run;

}  // namespace pyrl
