#pragma once
#include <cstdint>

namespace pyrl {

constexpr int64_t kMaxRoutedExperts = 512;  // what a block of a GPU keeps of each fits shared memory

// The tokens of each expert, ascending, experts one after the other: with (t, e) of row m,
//
//   rows[m] = t,  places[m] = t * experts + e,  weights[m] = probs[t, e]
//
// the m of token t are order[t * top_k : (t + 1) * top_k], ascending, starts[t] = t * top_k, and
// counts[e] are an expert's rows. Integers are counted in a fixed order: every call has the same bits.
struct ExpertRowsArgs {
  const uint8_t* map;  // [tokens, experts] 0 or 1, top_k of each row 1
  int64_t tokens, experts, top_k;
  const void* probs;   // [tokens, experts], elements of `word` bytes
  int word;            // 2, 4 or 8
  int64_t* rows;       // [tokens * top_k] written
  int64_t* starts;     // [tokens + 1] written
  int64_t* order;      // [tokens * top_k] written
  int64_t* places;     // [tokens * top_k] written
  void* weights;       // [tokens * top_k] written
  int32_t* counts;     // [experts] written
};

// Throws std::invalid_argument naming the first token that does not have top_k experts.
void expert_rows_cpu(const ExpertRowsArgs& args, int threads);

// int32 elements of `scratch` below.
int64_t expert_rows_scratch(int64_t tokens, int64_t experts);

// The same on `stream` of the current device, in two launches, for up to kMaxRoutedExperts. How many
// experts a token has is not checked, since that would wait for the device: of more the last are not
// written, of fewer what is left is undefined.
void expert_rows_cuda(const ExpertRowsArgs& args, int32_t* scratch, void* stream);

// The gradient of probs from that of weights: out[t, e] = grad[m] at the place of row m, 0 elsewhere.
struct ExpertRowsGradArgs {
  const void* grad;       // [tokens * top_k], elements of `word` bytes
  int word;               // 2, 4 or 8
  const int64_t* order;   // [tokens * top_k]
  const int64_t* places;  // [tokens * top_k]
  int64_t tokens, experts, top_k;
  void* out;              // [tokens, experts] written
};

void expert_rows_grad_cpu(const ExpertRowsGradArgs& args, int threads);
void expert_rows_grad_cuda(const ExpertRowsGradArgs& args, void* stream);

// The grids of the CUDA kernels walked on the host, thread by thread (PYRL_TESTS).
void expert_rows_emulated(const ExpertRowsArgs& args, int32_t* scratch);
void expert_rows_grad_emulated(const ExpertRowsGradArgs& args);

}  // namespace pyrl
