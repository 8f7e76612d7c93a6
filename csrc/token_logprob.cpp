#include "token_logprob.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

#include "parallel.hpp"

namespace pyrl {
namespace {

const TokenLogprobKernels* find(std::string_view isa) {
#if defined(__x86_64__)
  if ((isa == "avx512" || isa == "auto") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return &token_logprob_avx512;
  if ((isa == "avx2" || isa == "auto") && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    return &token_logprob_avx2;
#endif
  return isa == "portable" || isa == "auto" ? &token_logprob_portable : nullptr;
}

const TokenLogprobKernels& kernels(const char* isa) {
  if (const auto* found = find(isa)) return *found;
  throw std::invalid_argument(std::string("token_logprob: isa is ") + isa +
                              ", expected one that this processor has");
}

int64_t tokens_per_thread(const Shard& shard) { return (1 << 14) / (shard.columns + 1) + 1; }

}  // namespace

bool has_isa(const char* isa) { return find(isa) != nullptr; }

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
