#include "token_logprob.hpp"

#include "isa.hpp"
#include "parallel.hpp"

namespace pyrl {
namespace {

const TokenLogprobKernels& kernels(const char* isa) {
  return pick(isa, token_logprob_portable, PYRL_X86(token_logprob_avx2),
              PYRL_X86(token_logprob_avx512));
}

int64_t tokens_per_thread(const Shard& shard) { return (1 << 14) / (shard.columns + 1) + 1; }

}  // namespace

void token_logprob_stats_cpu(const Shard& shard, float* stats, const char* isa, int threads) {
  const auto& chosen = kernels(isa);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { chosen.stats(shard, stats, begin, end); });
}

void token_logprob_grad_cpu(const Shard& shard, const RowGrad& row, void* out, const char* isa,
                            int threads) {
  const auto& chosen = kernels(isa);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { chosen.grad(shard, row, out, begin, end); });
}

}  // namespace pyrl
