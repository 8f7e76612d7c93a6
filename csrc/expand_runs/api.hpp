#pragma once
#include <cstdint>

namespace pyrl {

// out = starts[0], starts[0] + 1, ... (lengths[0] numbers), starts[1], ..., then -1 up to `size`;
// a start below 0 makes a run of -1.
//
// starts, lengths [num_runs] int64   read
// out             [size] int64       written
//
// Throws std::invalid_argument naming the first length that is negative or longer than what the
// runs before it left of `size`. Nothing is written then.
void expand_runs_cpu(const int64_t* starts, const int64_t* lengths, int64_t num_runs, int64_t* out,
                     int64_t size, const char* isa, int threads);

// out[i] = base + i * step up to `end`, where the next run begins.
struct IndexRun {
  int64_t base, step, end;
};

// The kernel of one instruction set: writes out[begin, end); out[begin] belongs to *run.
using ExpandRuns = void (*)(const IndexRun* run, int64_t* out, int64_t begin, int64_t end);
extern const ExpandRuns expand_runs_avx512, expand_runs_avx2, expand_runs_portable;

}  // namespace pyrl
