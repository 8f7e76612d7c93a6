#include "sum_rows/api.hpp"

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {

constexpr int64_t kBytesPerThread = 1 << 16;  // below this a second thread costs more than it saves

int64_t sum_rows_cpu(const SumRowsArgs& args, const char* isa, int threads) {
  const auto run = PYRL_PICK(isa, sum_rows);
  const int64_t bytes = args.columns * (args.dtype == DType::f64 ? 8 : 4) + 16;
  want_huge_pages(args.out, args.num_out * args.columns * size_of(args.dtype));
  return parallel_find(args.num_out, kBytesPerThread / bytes + 1, threads,
                       [&](int64_t begin, int64_t end) { return run(args, begin, end); });
}

int64_t invert_rows_cpu(const int64_t* rows, int64_t num_in, int64_t num_out, int64_t* starts,
                        int64_t* order) {
  std::fill_n(starts, num_out + 1, 0);
  for (int64_t m = 0; m < num_in; ++m) {
    if (rows[m] < -1 || rows[m] >= num_out) return m;
    if (rows[m] >= 0) ++starts[rows[m] + 1];
  }
  for (int64_t n = 0; n < num_out; ++n) starts[n + 1] += starts[n];
  const int64_t used = starts[num_out];
  for (int64_t m = 0; m < num_in; ++m)
    if (rows[m] >= 0) order[starts[rows[m]]++] = m;  // a start becomes its end: the next start
  std::copy_backward(starts, starts + num_out, starts + num_out + 1);
  starts[0] = 0;
  std::fill(order + used, order + num_in, -1);
  return -1;
}

}  // namespace pyrl
