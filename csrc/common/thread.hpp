#pragma once
// The body of a GPU thread is an ordinary function that the host compiler builds too. gpu.cu wraps
// it in a kernel; emulate.cpp walks the same grid on the host, so that the index arithmetic is
// tested on machines without a GPU.
#include <cstdint>

#ifdef __CUDACC__
#define PYRL_DEVICE __host__ __device__ inline
#else
#define PYRL_DEVICE inline
#endif

#ifdef __CUDA_ARCH__  // an array indexed by a loop stays in registers only if the loop is unrolled
#define PYRL_UNROLL _Pragma("unroll")
#define PYRL_NO_UNROLL _Pragma("unroll 1")
#else
#define PYRL_UNROLL
#define PYRL_NO_UNROLL
#endif

namespace pyrl {

// Position of a thread in a one-dimensional grid of blocks.
struct ThreadIndex {
  int64_t block, blocks;
  int thread, threads;
};

#ifdef __CUDACC__
__device__ inline ThreadIndex thread_index() {
  return {int64_t(blockIdx.x), int64_t(gridDim.x), int(threadIdx.x), int(blockDim.x)};
}
#endif

// Calls phase(index) for every thread of a block in turn: one call per phase, as __syncthreads()
// separates phases on a GPU.
template <class Phase>
void each_thread(int64_t block, int64_t blocks, int threads, const Phase& phase) {
  for (int thread = 0; thread < threads; ++thread)
    phase(ThreadIndex{block, blocks, thread, threads});
}

}  // namespace pyrl
