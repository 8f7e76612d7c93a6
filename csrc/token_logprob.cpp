#include "token_logprob.hpp"

#include "isa.hpp"
#include "parallel.hpp"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pyrl {
namespace {

const TokenLogprobKernels& kernels(const char* isa) {
  return pick(isa, token_logprob_portable, PYRL_X86(token_logprob_avx2),
              PYRL_X86(token_logprob_avx512));
}

int64_t tokens_per_thread(const Shard& shard) { return (1 << 14) / (shard.columns + 1) + 1; }

// A large buffer comes without memory behind it: to be given that a huge page at a time takes a
// tenth of what single pages do, which take several times what the kernel does.
void want_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t from = (uintptr_t(memory) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t to = (uintptr_t(memory) + uintptr_t(bytes)) / kHuge * kHuge;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

}  // namespace

void token_logprob_stats_cpu(const Shard& shard, float* stats, const char* isa, int threads) {
  const auto& chosen = kernels(isa);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { chosen.stats(shard, stats, begin, end); });
}

void token_logprob_grad_cpu(const Shard& shard, const RowGrad& row, void* out, const char* isa,
                            int threads) {
  const auto& chosen = kernels(isa);
  const int64_t bytes = shard.tokens * shard.columns * (shard.dtype == Float::f32 ? 4 : 2);
  if (out != shard.logits) want_huge_pages(out, bytes);
  parallel_for(shard.tokens, tokens_per_thread(shard), threads,
               [&](int64_t begin, int64_t end) { chosen.grad(shard, row, out, begin, end); });
}

}  // namespace pyrl
