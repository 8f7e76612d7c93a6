#pragma once
#include <cstddef>
#include <cstdint>

namespace pyrl {

// out[i, :] = rows[i] >= 0 ? src[rows[i], :] : fill[:]        (a row is `row_bytes` bytes)
//
// src   [num_src, row_bytes]   read
// rows  [num_out] int64        entries in [-1, num_src)
// fill  [row_bytes]            the row written where an entry is -1
// out   [num_out, row_bytes]   written; must not alias src or fill
//
// Throws std::out_of_range naming the first entry outside [-1, num_src); `out` is then undefined.
void gather_rows_cpu(const std::byte* src, int64_t num_src, const int64_t* rows,
                     const std::byte* fill, std::byte* out, int64_t num_out, int64_t row_bytes,
                     int threads);

// The same on `stream` of the current device, for any row_bytes and alignment. Bounds are not
// checked, as that would wait for the device: an entry below -1 acts as -1, one at or past num_src
// reads out of bounds.
void gather_rows_cuda(const std::byte* src, const int64_t* rows, const std::byte* fill,
                      std::byte* out, int64_t num_out, int64_t row_bytes, void* stream);

}  // namespace pyrl
