#include "common/cuda.hpp"
#include "token_logprob/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace token_logprob;

constexpr int kBlocksPerSm = 8;
constexpr int kRowThreads = 128;  // a token each

template <class T, bool Masked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    token_logprob_stats_kernel(const LogitsShard shard, State* parts, const StatsOut out) {
  __shared__ State warps[kThreads / kLanes];
  __shared__ Chosen chosen;
  const ThreadIndex at = thread_index();
  const int warp = at.thread / kLanes, lane = at.thread % kLanes;
  const int64_t count = num_parts(shard.width), t = at.block / count;
  const int64_t target = shard.targets[t];  // read early: the last steps wait for it
  const float rate = shard.scale[t] * kLog2e;
  State state = thread_state<T, Masked>(shard, at);
  if (count == 1 && at.thread == kThreads - kLanes) chosen = chosen_of<T>(shard, t, target);
  state = join_lanes(state, rate);
  if (lane == 0) warps[warp] = state;
  __syncthreads();
  if (warp != 0) return;
  state = join_lanes(lane < kThreads / kLanes ? warps[lane] : State{-INFINITY, 0, 0}, rate);
  if (lane != 0) return;
  if (count == 1)
    finish(shard, state, chosen, out, t);
  else
    parts[at.block] = state;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    token_logprob_finish_kernel(const LogitsShard shard, const State* parts, const StatsOut out) {
  const ThreadIndex at = thread_index();
  const int64_t t = at.block * at.threads + at.thread;
  if (t < shard.tokens) finish_parts<T>(shard, parts, out, t);
}

__global__ void __launch_bounds__(kRowThreads)
    token_logprob_combine_kernel(const ShardStats shards, const TokenRows rows) {
  const ThreadIndex at = thread_index();
  const int64_t t = at.block * at.threads + at.thread;
  if (t < shards.tokens) combine(shards, rows, t);
}

template <class T, class O, bool Masked>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    token_logprob_grad_kernel(const LogitsShard shard, const RowGrad row, void* out) {
  thread_grad<T, O, Masked>(shard, row, out, thread_index());
}

unsigned row_blocks(int64_t tokens) {
  return static_cast<unsigned>((tokens + kRowThreads - 1) / kRowThreads);
}

}  // namespace

void token_logprob_stats_cuda(const LogitsShard& shard, const StatsOut& out, float* scratch,
                              void* stream) {
  if (shard.tokens == 0) return;
  const int64_t count = num_parts(shard.width);
  const auto blocks = static_cast<unsigned>(shard.tokens * count);
  auto* parts = reinterpret_cast<State*>(scratch);
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch(shard, [&](auto type, auto masked) {
    using T = decltype(type);
    token_logprob_stats_kernel<T, decltype(masked)::value>
        <<<blocks, kThreads, 0, on>>>(shard, parts, out);
    if (count > 1)
      token_logprob_finish_kernel<T>
          <<<row_blocks(shard.tokens), kRowThreads, 0, on>>>(shard, parts, out);
  });
  check_launch("token_logprob");
}

void token_logprob_combine_cuda(const ShardStats& shards, const TokenRows& rows, void* stream) {
  if (shards.tokens == 0) return;
  token_logprob_combine_kernel<<<row_blocks(shards.tokens), kRowThreads, 0,
                                 static_cast<cudaStream_t>(stream)>>>(shards, rows);
  check_launch("token_logprob");
}

void token_logprob_grad_cuda(const LogitsShard& shard, const RowGrad& row, void* out, DType dtype,
                             void* stream) {
  if (shard.tokens == 0 || shard.columns == 0) return;
  const auto blocks = static_cast<unsigned>(shard.tokens * num_parts(shard.columns));
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch(shard, dtype, [&](auto type, auto to, auto masked) {
    token_logprob_grad_kernel<decltype(type), decltype(to), decltype(masked)::value>
        <<<blocks, kThreads, 0, on>>>(shard, row, out);
  });
  check_launch("token_logprob");
}

}  // namespace pyrl
