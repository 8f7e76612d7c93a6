#include "common/cuda.hpp"
#include "token_logprob/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace token_logprob;

template <class T, bool Masked>
__global__ void __launch_bounds__(kThreads, 2)
    token_logprob_stats_kernel(const LogitsShard shard, State* parts) {
  __shared__ State states[kThreads];
  const ThreadIndex at = thread_index();
  states[at.thread] = thread_state<T, Masked>(shard, at);
  const float rate = shard.scale[at.block / num_parts(shard.width)] * kLog2e;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    join_half(states, half, rate, at.thread);
  }
  if (at.thread == 0) parts[at.block] = states[0];
}

template <class T>
__global__ void token_logprob_finish_kernel(const LogitsShard shard, const State* parts, float* stats) {
  const ThreadIndex at = thread_index();
  const int64_t t = at.block * at.threads + at.thread;
  if (t < shard.tokens) finish<T>(shard, parts, stats, t);
}

template <class T, bool Masked>
__global__ void __launch_bounds__(kThreads, 2)
    token_logprob_grad_kernel(const LogitsShard shard, const RowGrad row, void* out) {
  thread_grad<T, Masked>(shard, row, out, thread_index());
}

}  // namespace

void token_logprob_stats_cuda(const LogitsShard& shard, float* stats, float* scratch, void* stream) {
  if (shard.tokens == 0) return;
  constexpr int kFinish = 128;
  const auto blocks = static_cast<unsigned>(shard.tokens * num_parts(shard.width));
  const auto finish_blocks = static_cast<unsigned>((shard.tokens + kFinish - 1) / kFinish);
  auto* parts = reinterpret_cast<State*>(scratch);
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch(shard, [&](auto type, auto masked) {
    using T = decltype(type);
    token_logprob_stats_kernel<T, decltype(masked)::value><<<blocks, kThreads, 0, on>>>(shard, parts);
    token_logprob_finish_kernel<T><<<finish_blocks, kFinish, 0, on>>>(shard, parts, stats);
  });
  check_launch("token_logprob");
}

void token_logprob_grad_cuda(const LogitsShard& shard, const RowGrad& row, void* out, void* stream) {
  if (shard.tokens == 0 || shard.columns == 0) return;
  const auto blocks = static_cast<unsigned>(shard.tokens * num_parts(shard.columns));
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch(shard, [&](auto type, auto masked) {
    token_logprob_grad_kernel<decltype(type), decltype(masked)::value>
        <<<blocks, kThreads, 0, on>>>(shard, row, out);
  });
  check_launch("token_logprob");
}

}  // namespace pyrl
