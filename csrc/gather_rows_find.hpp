#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "parallel.hpp"

namespace pyrl {

// parallel_for over a body that returns the first index at which it failed, or -1: the first of
// all parts, or -1.
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
  const int64_t found = lowest.load();
  return found == kNone ? -1 : found;
}

}  // namespace pyrl
