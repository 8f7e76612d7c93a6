#pragma once
#include <cstddef>
#include <cstdint>

namespace pyrl {

// One tensor whose rows are gathered: out[m, :] = rows[m] >= 0 ? src[rows[m], :] : fill
struct Field {
  const std::byte* src;   // rows of `row_bytes`, `stride` bytes apart; read
  int64_t stride;         // any number of bytes, 0 included
  std::byte* out;         // [num_out, row_bytes] written; must not alias src or fill
  int64_t row_bytes;
  const std::byte* fill;  // [row_bytes] written where an entry is -1; null: `pattern`, repeated
  uint64_t pattern;       // one element of 1, 2, 4 or 8 bytes, repeated to 8 bytes
};

// Gathers the same rows of `count` fields of num_src rows each.
//
// rows [num_out] int64, entries in [-1, num_src)
//
// Returns the first m whose entry is outside (`out` is then undefined), or -1.
int64_t gather_rows_cpu(const Field* fields, int count, int64_t num_src, const int64_t* rows,
                        int64_t num_out, int threads);

// The same on `stream` of the current device, up to 32 fields per launch. Bounds are not checked,
// since that would wait for the device: an entry below -1 counts as -1, one at or past num_src
// reads out of bounds.
void gather_rows_cuda(const Field* fields, int count, const int64_t* rows, int64_t num_out,
                      void* stream);

// The grid of gather_rows_cuda walked on the host, thread by thread (PYRL_TESTS).
void gather_rows_emulated(const Field* fields, int count, const int64_t* rows, int64_t num_out);

}  // namespace pyrl
