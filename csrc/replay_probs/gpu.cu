#include <algorithm>

#include "common/cuda.hpp"
#include "replay_probs/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace replay_probs;

constexpr int kBlocksPerSm = 8;  // without it ptxas saves registers and spills

template <class A, class Word>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerSm) replay_probs_kernel(ReplayProbsArgs r) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Tile<A> shared(r, memory);
  const ThreadIndex at = thread_index();
  for (int64_t tile = at.block; tile < num_tiles(r); tile += at.blocks) {
    tile_load<A, Word>(r, tile, shared, at);
    __syncthreads();
    tile_values(r, tile, shared, at);
    __syncthreads();
    tile_write<A, Word>(r, tile, shared, at);
    __syncthreads();
  }
}

struct Launch {
  const ReplayProbsArgs& r;
  cudaStream_t stream;

  template <class A, class Word>
  void run() const {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles(r), 1 << 20));
    const auto bytes = static_cast<unsigned>(Tile<A>::bytes(r));
    replay_probs_kernel<A, Word><<<blocks, kBlockThreads, bytes, stream>>>(r);
  }
};

}  // namespace

void replay_probs_cuda(const ReplayProbsArgs& r, void* stream) {
  if (r.rows == 0 || r.experts == 0) return;
  with_types(r, Launch{r, static_cast<cudaStream_t>(stream)});
  check_launch("replay_probs");
}

}  // namespace pyrl
