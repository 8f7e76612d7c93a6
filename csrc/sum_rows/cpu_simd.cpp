// Sums rows a block of columns at a time; the compiler vectorises the inner loop.
#include <string.h>

#include "common/dtype.hpp"
#include "common/simd.hpp"
#include "sum_rows/api.hpp"

namespace pyrl {
namespace {

constexpr int64_t kColumns = 1024;  // added at a time: their sums stay in the L1 cache

// Adds one row; nothing aliases, since `acc` is on the stack.
template <class T>
inline void add(typename T::Acc* __restrict acc, const typename T::Raw* __restrict row,
                int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) acc[c] += T::widen(row[c]);
}

template <class T>
void sum_row(const SumRowsArgs& s, const int64_t* order, int64_t count, typename T::Raw* out) {
  using Raw = typename T::Raw;
  const auto* src = static_cast<const char*>(s.src);
  for (int64_t c = 0; c < s.columns; c += kColumns) {
    const int64_t columns = s.columns - c < kColumns ? s.columns - c : kColumns;
    typename T::Acc acc[kColumns];
    const auto* first = reinterpret_cast<const Raw*>(src + order[0] * s.stride) + c;
    for (int64_t i = 0; i < columns; ++i) acc[i] = T::widen(first[i]);
    for (int64_t j = 1; j < count; ++j)
      add<T>(acc, reinterpret_cast<const Raw*>(src + order[j] * s.stride) + c, columns);
    for (int64_t i = 0; i < columns; ++i) out[c + i] = T::narrow(acc[i]);
  }
}

template <class T>
int64_t sum_rows(const SumRowsArgs& s, int64_t begin, int64_t end) {
  using Raw = typename T::Raw;
  const auto* src = static_cast<const char*>(s.src);
  for (int64_t n = begin; n < end; ++n) {
    const int64_t from = s.starts[n], to = s.starts[n + 1];
    if (from < 0 || to < from || to > s.num_in) return n;
    for (int64_t j = from; j < to; ++j)
      if (s.order[j] < 0 || s.order[j] >= s.num_in) return n;
    Raw* out = static_cast<Raw*>(s.out) + n * s.columns;
    const auto* first = reinterpret_cast<const Raw*>(src + (to > from ? s.order[from] * s.stride : 0));
    if (to - from > 1) {
      sum_row<T>(s, s.order + from, to - from, out);
    } else if (s.columns == 1) {  // one scalar per token: no call
      *out = to > from ? *first : Raw(0);
    } else if (to > from) {
      memcpy(out, first, s.columns * sizeof(Raw));
    } else {
      memset(out, 0, s.columns * sizeof(Raw));
    }
  }
  return -1;
}

int64_t run(const SumRowsArgs& s, int64_t begin, int64_t end) {
  switch (s.dtype) {
    case DType::f32: return sum_rows<F32>(s, begin, end);
    case DType::bf16: return sum_rows<BF16>(s, begin, end);
    case DType::f16: return sum_rows<F16>(s, begin, end);
    default: return sum_rows<F64>(s, begin, end);
  }
}

}  // namespace

const SumRows PYRL_KERNELS(sum_rows) = run;

}  // namespace pyrl
