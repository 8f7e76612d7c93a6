#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

enum class Norm { none, sum, softmax };

constexpr int64_t kMaxTopK = 32;  // torch adds up longer rows in another order
constexpr int64_t kMaxExperts = 1 << 16;

// The probabilities of given experts. With v[j] = scores[m, ids[m, j]] as float (double for f64):
//
//   none     p = v
//   sum      p = v / (sum(v) + 1e-20), p = v if top_k is 1
//   softmax  p = exp(v - max(v)) / sum(exp(v - max(v)))
//   out[m, ids[m, j]] = p[j] * scale, map[m, ids[m, j]] = 1, both 0 elsewhere
//
// With `grad`, the derivative instead: out = sum over p of grad * dp / dscores, 0 at other experts.
// Sums are added in the order of torch's kernels on the same device, so the probabilities have the
// bits of these operations done one by one.
struct ReplayProbsArgs {
  const void* scores;  // [rows, experts], read at ids only
  DType scores_dtype;  // f32, bf16, f16 or f64
  const void* ids;     // [rows, top_k], entries in [0, experts), distinct in a row
  DType ids_dtype;     // an integer type
  int64_t rows, experts, top_k;  // top_k <= kMaxTopK, experts <= kMaxExperts
  Norm norm;
  double scale;       // 0: 1
  const void* grad;   // [rows, experts], read at ids only; null: the forward pass
  DType grad_dtype;   // f32, bf16, f16 or f64
  void* out;          // [rows, experts], written
  DType out_dtype;    // f32, bf16, f16 or f64; with `grad`, that of scores
  uint8_t* map;       // [rows, experts], written, or null
};

// Throws std::out_of_range naming the first entry of ids outside [0, experts); `out` and `map` are
// then undefined. Duplicates in a row are not looked for: the last one's value is written.
void replay_probs_cpu(const ReplayProbsArgs& args, int threads);

// The same on `stream` of the current device. Bounds are not checked, since that would wait for the
// device: an id outside counts as a score of NaN and is not written. Of duplicates one is written.
void replay_probs_cuda(const ReplayProbsArgs& args, void* stream);

// The grid of replay_probs_cuda walked on the host from row `first` on, a multiple of 32
// (PYRL_TESTS).
void replay_probs_emulated(const ReplayProbsArgs& args, int64_t first);

}  // namespace pyrl
