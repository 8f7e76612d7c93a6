#include <stdexcept>
#include <string>

#include "gather_routes_device.hpp"

namespace pyrl {
namespace {

// Blocks of a multiprocessor, for which registers are shared out: where it holds 2048 threads, all.
#if !defined(__CUDA_ARCH__)
#define PYRL_BLOCKS 1
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define PYRL_BLOCKS (2048 / kRoutesThreads)
#else
#define PYRL_BLOCKS 1
#endif

template <class In, class Out>
__global__ void __launch_bounds__(kRoutesThreads, PYRL_BLOCKS)
    gather_routes_kernel(const __grid_constant__ RoutesTask task) {
  __shared__ RoutesShared shared;
  const Place at = place();
  routes_index(task, at, shared);
  __syncthreads();
  routes_load_words(task, at, shared);
  __syncthreads();
  routes_write_units<In, Out>(task, at, shared);
}

}  // namespace

void gather_routes_cuda(const Routes& routes, void* stream) {
  routes_launches(routes, [&](const RoutesTask& task, auto in, auto out) {
    gather_routes_kernel<decltype(in), decltype(out)>
        <<<static_cast<unsigned>(task.blocks()), kRoutesThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(task);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
      throw std::runtime_error(std::string("gather_routes: ") + cudaGetErrorString(error));
  });
}

}  // namespace pyrl
