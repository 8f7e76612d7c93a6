#include <algorithm>

#include "common/cuda.hpp"
#include "replay_probs/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace replay_probs;

template <class A>
constexpr int kBlocksPerSm = sizeof(A) == 8 ? 8 : 12;  // more would spill

template <class A, class Word>
__global__ void __launch_bounds__(kBlockWarps* kWarp, kBlocksPerSm<A>)
    replay_probs_kernel(const ReplayProbsArgs r, const Warps w) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ThreadIndex at = thread_index();
  const int lane = at.thread % kWarp, warp_of_block = at.thread / kWarp;
  void* stage = memory + warp_of_block * (w.staged ? w.out_bytes + w.map_bytes : 0);
  for (int64_t warp = at.block * kBlockWarps + warp_of_block; warp < w.count; warp += at.blocks * kBlockWarps) {
    Lane<A, Word> own(r, w, warp, lane, stage);
    clear_rows(r, own, lane);
    own.load(r);
    const A result = r.grad ? grads_of(r, own.value, own.grad, w.width) : probs_of(r, own.value, w.width);
    __syncwarp();
    own.store(r, result);
    __syncwarp();
    copy_rows(r, w, own, lane);
    __syncwarp();
  }
}

struct Launch {
  const ReplayProbsArgs& r;
  cudaStream_t stream;

  template <class A, class Word>
  void run() const {
    const Warps w(r, sizeof(Word));
    const int64_t blocks = (w.count + kBlockWarps - 1) / kBlockWarps;
    replay_probs_kernel<A, Word><<<static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20)),
                                   kBlockWarps * kWarp, kBlockWarps * w.stage_bytes(), stream>>>(r, w);
  }
};

}  // namespace

void replay_probs_cuda(const ReplayProbsArgs& r, void* stream) {
  if (r.rows == 0 || r.experts == 0) return;
  with_types(r, Launch{r, static_cast<cudaStream_t>(stream)});
  check_launch("replay_probs");
}

}  // namespace pyrl
