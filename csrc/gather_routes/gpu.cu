#include "common/cuda.hpp"
#include "gather_routes/gpu_thread.hpp"

namespace pyrl {
namespace {

// Blocks per multiprocessor that registers are allotted for: all, where it holds 2048 threads.
#if !defined(__CUDA_ARCH__)
#define PYRL_BLOCKS 1
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define PYRL_BLOCKS (2048 / kRoutesThreads)
#else
#define PYRL_BLOCKS 1
#endif

template <class T>
__global__ void __launch_bounds__(kRoutesThreads, PYRL_BLOCKS)
    gather_routes_kernel(const __grid_constant__ RoutesTask task) {
  __shared__ RoutesShared shared;
  const ThreadIndex at = thread_index();
  routes_index(task, at, shared);
  __syncthreads();
  routes_load_words(task, at, shared);
  __syncthreads();
  routes_write_units<T>(task, at, shared);
}

}  // namespace

void gather_routes_cuda(const GatherRoutesArgs& args, void* stream) {
  routes_launches(args, [&](const RoutesTask& task, auto element) {
    gather_routes_kernel<decltype(element)>
        <<<static_cast<unsigned>(task.blocks()), kRoutesThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(task);
    check_launch("gather_routes");
  });
}

}  // namespace pyrl
