#pragma once
#include <cstdint>

#include "gather_routes.hpp"

namespace pyrl {

enum class Real { f32, bf16, f16, f64 };
enum class Norm { none, sum, softmax };

constexpr int64_t kMaxTopK = 32;  // torch adds longer rows in another order
constexpr int64_t kMaxExperts = 1 << 16;

// The probabilities of given experts, v[j] = scores[m, ids[m, j]] as float (double for f64):
//
//   none     p = v
//   sum      p = v / (sum(v) + 1e-20), p = v if top_k is 1
//   softmax  p = exp(v - max(v)) / sum(exp(v - max(v)))
//   out[m, ids[m, j]] = p[j] * scale, map[m, ids[m, j]] = 1, both 0 elsewhere
//
// With `grad`, the derivative instead: out = sum over p of grad * dp / dscores, 0 at other experts.
// Sums are in the order of torch's own kernels of the same device, so that the probabilities have
// the bits of these operations done one by one.
struct Replay {
  const void* scores;  // [rows, experts] of type `in`, read at ids only
  Real in;
  const void* ids;  // [rows, top_k] of type `id`, entries in [0, experts), distinct in a row
  Int id;
  int64_t rows, experts, top_k;  // top_k <= kMaxTopK, experts <= kMaxExperts
  Norm norm;
  double scale;      // 0: 1
  const void* grad;  // [rows, experts] of type `from`, read at ids only; null: the forward pass
  Real from;
  void* out;  // [rows, experts] of type `to`, the type of scores with `grad`; written
  Real to;
  uint8_t* map;  // [rows, experts] written, or null
};

// Throws std::out_of_range naming the first entry of ids outside [0, experts); `out` and `map` are
// then undefined. An expert twice in a row is not looked for: it gets the last one's value.
void replay_probs_cpu(const Replay& replay, int threads);

// The same on `stream` of the current device. Neither bounds nor duplicates are looked for, as that
// would wait for the device: an id outside reads out of bounds, of duplicates the bits are mixed.
void replay_probs_cuda(const Replay& replay, void* stream);

// What replay_probs_cuda does from row `first` on, a multiple of 32, thread by thread on the host.
void replay_probs_emulated(const Replay& replay, int64_t first);

}  // namespace pyrl
