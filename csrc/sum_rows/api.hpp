#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// out[n, :] = sum of src[m, :] over the m in order[starts[n] .. starts[n + 1]), added in that order
// in fp32 (fp64 for f64) and rounded once. No m: 0. One m: a copy.
struct SumRowsArgs {
  const void* src;  // [num_in, columns] of `dtype`, rows `stride` bytes apart; read
  DType dtype;      // f32, bf16, f16 or f64
  int64_t num_in, columns, stride;
  const int64_t* starts;  // [num_out + 1] ascending, in [0, num_in]
  const int64_t* order;   // [num_in]
  int64_t num_out;
  void* out;  // [num_out, columns] written; must not alias src
};

// Returns the first n whose entries are not rows of src (`out` is then undefined), or -1.
int64_t sum_rows_cpu(const SumRowsArgs& args, const char* isa, int threads);

// The same on `stream` of the current device. Entries are not checked.
void sum_rows_cuda(const SumRowsArgs& args, void* stream);

// The grid of sum_rows_cuda walked on the host, thread by thread (PYRL_TESTS).
void sum_rows_emulated(const SumRowsArgs& args);

// order[starts[n] .. starts[n + 1]) = the m with rows[m] == n, ascending; the rest of order is -1.
//
// rows [num_in] int64 in [-1, num_out), starts [num_out + 1], order [num_in]
//
// Returns the first m whose entry is outside, or -1.
int64_t invert_rows_cpu(const int64_t* rows, int64_t num_in, int64_t num_out, int64_t* starts,
                        int64_t* order);

// The kernel of one instruction set, for n in [begin, end).
using SumRows = int64_t (*)(const SumRowsArgs& args, int64_t begin, int64_t end);
extern const SumRows sum_rows_avx512, sum_rows_avx2, sum_rows_portable;

}  // namespace pyrl
