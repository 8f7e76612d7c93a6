#pragma once
#include <cstdint>

namespace pyrl {

enum class Int { u8, u16, i16, i32, i64 };

// out[i, m, j] = rows[m] >= 0 ? routes[rows[m], layers[i], j] : (m * top_k + j) % num_experts
//
// A padding row gets top_k distinct experts, spread over all of them by the output row m.
struct Routes {
  const void* routes;  // [num_src, num_slots, top_k] of type `in`, read
  Int in;              // u8, u16, i16 or i32
  int64_t row_bytes;   // from one row of routes to the next; within a row it is contiguous
  int64_t num_src, num_slots, top_k;
  const int64_t* rows;  // [num_out], entries in [-1, num_src)
  int64_t num_out;
  const int64_t* layers;  // [num_layers] on the host, entries in [0, num_slots)
  int64_t num_layers;
  int64_t num_experts;  // at least top_k
  void* out;            // [num_layers, num_out, top_k] of type `to`, written; must not alias
  Int to;               // i32, i64 or the same as `in`
};

// Throws std::out_of_range naming the first bad entry of `layers`, std::invalid_argument for types.
void check_routes(const Routes& routes);

// Throws std::out_of_range naming the first bad entry of layers or rows; `out` is then undefined.
void gather_routes_cpu(const Routes& routes, const char* isa, int threads);

// Enqueued on `stream`: one launch for every 256 layers. Slots are below 2^15, a tuple of top_k has
// at most 16 KB. `rows` is not checked; it and `out` are on the device, `routes` is there or in
// pinned host memory.
void gather_routes_cuda(const Routes& routes, void* stream);

// The same grid walked on the host, all of it in host memory.
void gather_routes_emulated(const Routes& routes);

// The kernel of one instruction set, for the output rows in [begin, end); `stream` writes past the
// caches.
struct GatherRoutesKernels {
  void (*run)(const Routes& routes, bool stream, int64_t begin, int64_t end);
};
extern const GatherRoutesKernels gather_routes_avx512, gather_routes_avx2, gather_routes_portable;

}  // namespace pyrl
