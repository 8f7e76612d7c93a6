#pragma once
// What a GPU thread does is written in functions that the host compiler builds too. The .cu file
// wraps them in a kernel; <op>_emulated walks the same grid on the host, so that the arithmetic of
// indices is tested where there is no GPU.
#include <cstdint>

#ifdef __CUDACC__
#define PYRL_DEVICE __host__ __device__ inline
#else
#define PYRL_DEVICE inline
#endif

namespace pyrl {

// A thread's place in a grid of blocks.
struct Place {
  int64_t block, blocks;
  int thread, threads;
};

#ifdef __CUDACC__
__device__ inline Place place() {
  return {int64_t(blockIdx.x), int64_t(gridDim.x), int(threadIdx.x), int(blockDim.x)};
}
#endif

// Runs phase(place) for every thread of a block in turn: one call a phase, as __syncthreads()
// parts phases on a GPU.
template <class Phase>
void each_thread(int64_t block, int64_t blocks, int threads, const Phase& phase) {
  for (int thread = 0; thread < threads; ++thread) phase(Place{block, blocks, thread, threads});
}

}  // namespace pyrl
