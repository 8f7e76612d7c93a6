#pragma once
#include <algorithm>
#include <cstdint>

namespace pyrl {

// Runs body(begin, end) over contiguous parts of [0, count), at most one part a thread and none
// smaller than `grain`. `body` must not throw.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, threads);
  if (parts == 1) return body(int64_t{0}, count);
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part)
    body(count * part / parts, count * (part + 1) / parts);
}

}  // namespace pyrl
