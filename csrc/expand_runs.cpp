#include "expand_runs.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.hpp"
#include "parallel.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace pyrl {
namespace {

constexpr int64_t kPerThread = 1 << 15;

// The runs by where they end, the last one being what is left of `size`.
std::vector<Run> table(const int64_t* starts, const int64_t* lengths, int64_t num_runs,
                       int64_t size) {
  std::vector<Run> runs;
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

// Memory that the process has not touched yet costs far more in page faults than in writing it, so
// ask for large pages; memory that it has is left as it is.
void ask_for_large_pages([[maybe_unused]] int64_t* out, [[maybe_unused]] int64_t size) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(out);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + 8 * size) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

void expand_runs_cpu(const int64_t* starts, const int64_t* lengths, int64_t num_runs, int64_t* out,
                     int64_t size, const char* isa, int threads) {
  const auto expand = pick(isa, expand_runs_portable, PYRL_X86(expand_runs_avx2),
                           PYRL_X86(expand_runs_avx512));
  const std::vector<Run> runs = table(starts, lengths, num_runs, size);
  ask_for_large_pages(out, size);
  parallel_for(size, kPerThread, threads, [&](int64_t begin, int64_t end) {
    const auto past = [](int64_t row, const Run& run) { return row < run.end; };
    if (begin < end)
      expand(&*std::upper_bound(runs.begin(), runs.end(), begin, past), out, begin, end);
  });
}

}  // namespace pyrl
