#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// One rank's columns of the logits of every token. With z = logits * scale (scale = 1 / temperature)
// the probabilities are softmax(z) over the valid columns of all ranks.
struct LogitsShard {
  const void* logits;  // [tokens, columns] of `dtype`, read
  DType dtype;         // f32, bf16 or f16
  int64_t tokens, columns;
  int64_t width;           // columns from `width` on are padding and never read
  const int64_t* targets;  // [tokens] global column
  int64_t first;           // global column of logits[:, 0]
  const float* scale;      // [tokens], positive
  const uint8_t* keep;     // [tokens, columns], where 0 the logit counts as -inf; null: all are kept
};

// stats[0] = m = max(logits)                 -inf in a shard of no columns or only -inf
// stats[1] = sum(e),  e = exp((logits - m) * scale)
// stats[2] = sum(e * (logits - m) * scale)   a logit of -inf adds 0
// stats[3] = logits[target]                  0 if another shard holds it, -inf if it is not kept
//
// stats [4, tokens] written. NaN or +inf among the logits makes stats[1] NaN.
void token_logprob_stats_cpu(const LogitsShard& shard, float* stats, const char* isa, int threads);

// What the gradient needs to know of the whole row, over all shards: [tokens] each.
struct RowGrad {
  const float* max;
  const float* log_sum;  // log(sum(exp((logits - max) * scale)))
  const float* entropy;
  const float* grad_logprob;
  const float* grad_entropy;
};

// out[j] = scale * (grad_logprob * ([j == target] - p[j]) - grad_entropy * p[j] * (log p[j] + entropy))
// with log p = (logits - max) * scale - log_sum.
//
// out [tokens, columns] of the logits' dtype, written; may be `logits` itself. 0 in padding columns
// and in columns that are not kept, the target's included. Rows whose two gradients are 0 and rows
// without a finite logit are 0; their logits are not read.
void token_logprob_grad_cpu(const LogitsShard& shard, const RowGrad& row, void* out, const char* isa,
                            int threads);

// What a token comes to, over all columns of all shards: [tokens] each, written.
//
// logprob = (logits[target] - max) * scale - log_sum     NaN for a target out of range
// entropy = log_sum - sum(e * (logits - max) * scale) / sum(e)
// log_sum = log(sum(e))
//
// A token without a finite logit has log-prob -inf and entropy 0.
struct TokenRows {
  float *logprob, *entropy, *max, *log_sum;
};

// Statistics [4, tokens], or with null the rows: then the shard is the whole vocabulary.
struct StatsOut {
  float* stats;
  TokenRows rows;
};

// The statistics of all shards of `tokens`, in their order.
struct ShardStats {
  const float* stats;  // [shards, 4, tokens] read
  int shards;
  int64_t tokens;
  const int64_t* targets;  // [tokens] global column
  const float* scale;      // [tokens]
  int64_t valid_vocab;     // targets are in [0, valid_vocab)
};

// The same on `stream` of the current device, for any alignment. `scratch` holds
// token_logprob_scratch(tokens, width) floats. A target out of range counts as another shard's. The
// gradient is written as `dtype`: that of the logits, or bf16 or f16 of f32 logits, and then not
// over them.
int64_t token_logprob_scratch(int64_t tokens, int64_t width);
void token_logprob_stats_cuda(const LogitsShard& shard, const StatsOut& out, float* scratch,
                              void* stream);
void token_logprob_combine_cuda(const ShardStats& shards, const TokenRows& rows, void* stream);
void token_logprob_grad_cuda(const LogitsShard& shard, const RowGrad& row, void* out, DType dtype,
                             void* stream);

// The same grids walked on the host (PYRL_TESTS).
void token_logprob_stats_emulated(const LogitsShard& shard, const StatsOut& out, float* scratch);
void token_logprob_combine_emulated(const ShardStats& shards, const TokenRows& rows);
void token_logprob_grad_emulated(const LogitsShard& shard, const RowGrad& row, void* out, DType dtype);

// The kernels of one instruction set, for the tokens in [begin, end).
struct TokenLogprobKernels {
  void (*stats)(const LogitsShard& shard, float* stats, int64_t begin, int64_t end);
  void (*grad)(const LogitsShard& shard, const RowGrad& row, void* out, int64_t begin, int64_t end);
};
extern const TokenLogprobKernels token_logprob_avx512, token_logprob_avx2, token_logprob_portable;

}  // namespace pyrl
