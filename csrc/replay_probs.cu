#include <algorithm>
#include <stdexcept>
#include <string>

#include "replay_probs_device.hpp"

namespace pyrl {
namespace {

constexpr int kBlocksPerSm = 8;  // left to itself, ptxas saves registers and spills

template <class A, class Word, int Count>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerSm) replay_probs_kernel(Replay r) {
  __shared__ Tile<A> shared;
  const Place at = place();
  for (int64_t tile = at.block; tile < num_tiles(r); tile += at.blocks) {
    tile_values(r, tile, shared, at);
    __syncthreads();
    tile_write<A, Word, Count>(r, tile, shared, at);
    __syncthreads();
  }
}

struct Launch {
  const Replay& r;
  cudaStream_t stream;

  template <class A, class Word, int Count>
  void run() const {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_tiles(r), 1 << 20));
    replay_probs_kernel<A, Word, Count><<<blocks, kBlockThreads, 0, stream>>>(r);
  }
};

}  // namespace

void replay_probs_cuda(const Replay& r, void* stream) {
  if (r.rows == 0 || r.experts == 0) return;
  with_types(r, Launch{r, static_cast<cudaStream_t>(stream)});
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("replay_probs: ") + cudaGetErrorString(error));
}

}  // namespace pyrl
