#include "common/cuda.hpp"
#include "gather_routes/gpu_thread.hpp"

namespace pyrl {
namespace {

constexpr int kBlocksPerSm = 5;  // more threads would have fewer loads in flight

template <class T>
__global__ void __launch_bounds__(kRoutesThreads, kBlocksPerSm)
    gather_routes_kernel(const __grid_constant__ RoutesTask task) {
  __shared__ RoutesShared shared;
  const ThreadIndex at = thread_index();
  routes_index(task, at, shared);
  __syncthreads();
  routes_load_words<T>(task, at, shared);
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
