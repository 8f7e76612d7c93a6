#pragma once
#include <cstddef>
#include <cstdint>

namespace pyrl {

// One tensor of which rows are gathered: out[m, :] = rows[m] >= 0 ? src[rows[m], :] : fill
struct Field {
  const std::byte* src;   // rows of `row_bytes`, the next one `stride` bytes on; read
  int64_t stride;         // any, also 0
  std::byte* out;         // [num_out, row_bytes] written; must not alias src or fill
  int64_t row_bytes;
  const std::byte* fill;  // [row_bytes] written where an entry is -1; null: `pattern`, repeated
  uint64_t pattern;       // bytes of an element of 1, 2, 4 or 8, repeated to 8
};

// Gathers the same rows of `count` fields of num_src rows each.
//
// rows [num_out] int64, entries in [-1, num_src)
//
// Returns the first m whose entry is outside, `out` is then undefined; -1 if there is none.
int64_t gather_rows_cpu(const Field* fields, int count, int64_t num_src, const int64_t* rows,
                        int64_t num_out, int threads);

// The same on `stream` of the current device, up to 32 fields a launch. Bounds are not checked, as
// that would wait for the device: an entry below -1 acts as -1, one at or past num_src reads out of
// bounds.
void gather_rows_cuda(const Field* fields, int count, const int64_t* rows, int64_t num_out,
                      void* stream);

// What gather_rows_cuda does, block after block and thread after thread on the host.
void gather_rows_emulated(const Field* fields, int count, const int64_t* rows, int64_t num_out);

}  // namespace pyrl
