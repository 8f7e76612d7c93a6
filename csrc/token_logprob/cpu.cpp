#include "token_logprob/api.hpp"

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"
#include "token_logprob/gpu_thread.hpp"

namespace pyrl {
namespace {

int64_t tokens_per_thread(const LogitsShard& shard) { return (1 << 14) / (shard.columns + 1) + 1; }

}  // namespace

int64_t token_logprob_scratch(int64_t tokens, int64_t width) {
  using namespace token_logprob;
  return tokens * num_parts(width) * int64_t(sizeof(State) / sizeof(float));
}

void token_logprob_stats_cpu(const LogitsShard& shard, float* stats, const char* isa,
                             int threads) {
  const auto& kernels = PYRL_PICK(isa, token_logprob);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { kernels.stats(shard, stats, begin, end); });
}

void token_logprob_grad_cpu(const LogitsShard& shard, const RowGrad& row, void* out,
                            const char* isa, int threads) {
  const auto& kernels = PYRL_PICK(isa, token_logprob);
  const int64_t bytes = shard.tokens * shard.columns * size_of(shard.dtype);
  if (out != shard.logits) want_huge_pages(out, bytes);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { kernels.grad(shard, row, out, begin, end); });
}

}  // namespace pyrl
