#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// out[i, m, j] = rows[m] >= 0 ? routes[rows[m], layers[i], j] : (m * top_k + j) % num_experts
//
// A padding row gets top_k distinct experts; the output row m spreads them over all experts.
struct GatherRoutesArgs {
  const void* routes;  // [num_src, num_slots, top_k] of `dtype`, read
  DType dtype;         // u8 or u16
  int64_t row_bytes;   // between rows of routes; within a row it is contiguous
  int64_t num_src, num_slots, top_k;
  const int64_t* rows;  // [num_out], entries in [-1, num_src)
  int64_t num_out;
  const int64_t* layers;  // [num_layers] on the host, entries in [0, num_slots)
  int64_t num_layers;
  int64_t num_experts;  // at least top_k, at most what `dtype` counts
  void* out;            // [num_layers, num_out, top_k] of `dtype`, written; must not alias
};

// Throws std::out_of_range naming the first bad entry of `layers`, std::invalid_argument for another
// dtype.
void check_routes(const GatherRoutesArgs& args);

// Throws std::out_of_range naming the first bad entry of layers or rows; `out` is then undefined.
void gather_routes_cpu(const GatherRoutesArgs& args, const char* isa, int threads);

// Enqueued on `stream`, one launch per 256 layers. Slots are below 2^15, and a tuple of top_k has at
// most 16 KiB. `rows` is not checked; `routes`, `rows` and `out` are on the device.
void gather_routes_cuda(const GatherRoutesArgs& args, void* stream);

// The grid of gather_routes_cuda walked on the host, in host memory (PYRL_TESTS).
void gather_routes_emulated(const GatherRoutesArgs& args);

// The kernel of one instruction set, for the output rows in [begin, end). `stream`: write past the
// caches.
using GatherRoutes = void (*)(const GatherRoutesArgs& args, bool stream, int64_t begin,
                              int64_t end);
extern const GatherRoutes gather_routes_avx512, gather_routes_avx2, gather_routes_portable;

}  // namespace pyrl
