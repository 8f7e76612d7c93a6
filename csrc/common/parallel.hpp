#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace pyrl {

// Calls body(begin, end) on contiguous parts of [0, count): at most one part per thread, none
// smaller than `grain`. `body` must not throw.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, threads);
  if (parts == 1) return body(int64_t{0}, count);
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part)
    body(count * part / parts, count * (part + 1) / parts);
}

// parallel_for with a body that returns the first index at which it failed, or -1. Returns the
// lowest such index of all parts, or -1.
template <class Body>
int64_t parallel_find(int64_t count, int64_t grain, int threads, const Body& body) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> lowest{kNone};
  parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    const int64_t failed = body(begin, end);
    int64_t known = lowest.load();
    while (failed >= 0 && failed < known && !lowest.compare_exchange_weak(known, failed)) {
    }
  });
  const int64_t first = lowest.load();
  return first == kNone ? -1 : first;
}

}  // namespace pyrl
