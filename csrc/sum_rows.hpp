#pragma once
#include <cstddef>
#include <cstdint>

namespace pyrl {

enum class Number { f32, bf16, f16, f64 };

// out[n, :] = sum of src[m, :] over the m in order[starts[n] .. starts[n + 1]), in that order, in
// fp32 (fp64 for f64), rounded once; 0 if there is none, a copy if there is one.
struct Sum {
  const void* src;  // [num_in, columns] of type `type`, rows `stride` bytes apart; read
  Number type;
  int64_t num_in, columns, stride;
  const int64_t* starts;  // [num_out + 1] ascending, in [0, num_in]
  const int64_t* order;   // [num_in]
  int64_t num_out;
  void* out;  // [num_out, columns] written; must not alias src
};

// Returns the first n whose entries are no rows of src, `out` is then undefined; -1 if none.
int64_t sum_rows_cpu(const Sum& sum, const char* isa, int threads);

// The same on `stream` of the current device, where entries are not checked.
void sum_rows_cuda(const Sum& sum, void* stream);

// What sum_rows_cuda does, block after block and thread after thread on the host.
void sum_rows_emulated(const Sum& sum);

// order[starts[n] .. starts[n + 1]) = the m with rows[m] == n, ascending; the rest of order is -1.
//
// rows [num_in] int64 in [-1, num_out), starts [num_out + 1], order [num_in]
//
// Returns the first m whose entry is outside, -1 if there is none.
int64_t invert_rows_cpu(const int64_t* rows, int64_t num_in, int64_t num_out, int64_t* starts,
                        int64_t* order);

// The kernels of one instruction set, for n in [begin, end): one for each Number.
struct SumRowsKernels {
  int64_t (*run[4])(const Sum& sum, int64_t begin, int64_t end);
};
extern const SumRowsKernels sum_rows_avx512, sum_rows_avx2, sum_rows_portable;

}  // namespace pyrl
