#pragma once
#include <cstdint>

namespace pyrl {

// out = starts[0], starts[0] + 1, ... (lengths[0] numbers), starts[1], ..., then -1 up to `size`;
// a start below 0 gives a run of -1.
//
// starts, lengths [num_runs] int64   read
// out             [size] int64       written
//
// Throws std::invalid_argument naming the first length that is negative or more than the runs
// before it left of `size`; nothing is then written.
void expand_runs_cpu(const int64_t* starts, const int64_t* lengths, int64_t num_runs, int64_t* out,
                     int64_t size, const char* isa, int threads);

// out[i] = base + i * step up to `end`, where the next run begins.
struct Run {
  int64_t base, step, end;
};

// Of one instruction set: writes out[begin, end), of which the first lies in *run.
using ExpandRuns = void (*)(const Run* run, int64_t* out, int64_t begin, int64_t end);
extern const ExpandRuns expand_runs_avx512, expand_runs_avx2, expand_runs_portable;

}  // namespace pyrl
