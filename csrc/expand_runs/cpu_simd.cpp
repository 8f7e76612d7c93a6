// Writes runs of consecutive integers a vector at a time.
#include "common/simd.hpp"
#include "expand_runs/api.hpp"

namespace pyrl {
namespace {

constexpr int kLanes = PYRL_VECTOR_BYTES / 8;
using I = Vector<int64_t>;

inline void store(I x, int64_t* to) { __builtin_memcpy(to, &x, sizeof x); }

void expand(const IndexRun* run, int64_t* out, int64_t begin, int64_t end) {
  I lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  for (int64_t at = begin; at < end; ++run) {
    const int64_t stop = run->end < end ? run->end : end;
    const I stride = I{} + kLanes * run->step;
    I numbers = run->base + (at + lanes) * run->step;
    // A vector may reach into the next runs, which are written after it.
    for (; at < stop && at + kLanes <= end; at += kLanes, numbers += stride)
      store(numbers, out + at);
    for (; at < stop; ++at) out[at] = run->base + at * run->step;
    at = stop;
  }
}

}  // namespace

const ExpandRuns PYRL_KERNELS(expand_runs) = expand;

}  // namespace pyrl
