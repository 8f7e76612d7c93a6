#include "expand_runs/api.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {
namespace {

constexpr int64_t kPerThread = 1 << 15;

// The runs with their ends; the last one covers what is left of `size`.
std::vector<IndexRun> table(const int64_t* starts, const int64_t* lengths, int64_t num_runs,
                            int64_t size) {
  std::vector<IndexRun> runs;
  runs.reserve(num_runs + 1);
  int64_t at = 0;
  for (int64_t i = 0; i < num_runs; ++i) {
    if (lengths[i] < 0 || lengths[i] > size - at)
      throw std::invalid_argument("expand_runs: lengths[" + std::to_string(i) + "] is " +
                                  std::to_string(lengths[i]) + ", expected one in [0, " +
                                  std::to_string(size - at) + "], what is left of size " +
                                  std::to_string(size));
    const bool filled = starts[i] < 0;
    const int64_t begin = at;
    at += lengths[i];
    runs.push_back({filled ? -1 : starts[i] - begin, filled ? 0 : 1, at});
  }
  runs.push_back({-1, 0, size});
  return runs;
}

}  // namespace

void expand_runs_cpu(const int64_t* starts, const int64_t* lengths, int64_t num_runs, int64_t* out,
                     int64_t size, const char* isa, int threads) {
  const auto expand = PYRL_PICK(isa, expand_runs);
  const std::vector<IndexRun> runs = table(starts, lengths, num_runs, size);
  want_huge_pages(out, size * int64_t(sizeof *out));
  parallel_for(size, kPerThread, threads, [&](int64_t begin, int64_t end) {
    const auto past = [](int64_t row, const IndexRun& run) { return row < run.end; };
    if (begin < end)
      expand(&*std::upper_bound(runs.begin(), runs.end(), begin, past), out, begin, end);
  });
}

}  // namespace pyrl
