#include <vector>

#include "token_logprob_device.hpp"

namespace pyrl {
namespace {

using namespace token_logprob;

template <class T, bool Masked>
void stats_rows(const Shard& shard, float* stats, State* parts) {
  const int64_t blocks = shard.tokens * num_parts(shard.width);
  std::vector<State> states(kThreads);
  for (int64_t block = 0; block < blocks; ++block) {
    each_thread(block, blocks, kThreads, [&](const Place& at) {
      states[at.thread] = thread_state<T, Masked>(shard, at);
    });
    const float rate = shard.scale[block / num_parts(shard.width)] * kLog2e;
    for (int half = kThreads / 2; half > 0; half /= 2)
      each_thread(block, blocks, kThreads, [&](const Place& at) {
        join_half(states.data(), half, rate, at.thread);
      });
    parts[block] = states[0];
  }
  for (int64_t t = 0; t < shard.tokens; ++t) finish<T>(shard, parts, stats, t);
}

template <class T, bool Masked>
void grad_rows(const Shard& shard, const RowGrad& row, void* out) {
  const int64_t blocks = shard.tokens * num_parts(shard.columns);
  for (int64_t block = 0; block < blocks; ++block)
    each_thread(block, blocks, kThreads,
                [&](const Place& at) { thread_grad<T, Masked>(shard, row, out, at); });
}

}  // namespace

int64_t token_logprob_scratch(int64_t tokens, int64_t width) {
  return tokens * num_parts(width) * int64_t(sizeof(State) / sizeof(float));
}

void token_logprob_stats_emulated(const Shard& shard, float* stats, float* scratch) {
  dispatch(shard, [&](auto type, auto masked) {
    stats_rows<decltype(type), masked>(shard, stats, reinterpret_cast<State*>(scratch));
  });
}

void token_logprob_grad_emulated(const Shard& shard, const RowGrad& row, void* out) {
  dispatch(shard, [&](auto type, auto masked) {
    grad_rows<decltype(type), masked>(shard, row, out);
  });
}

}  // namespace pyrl
