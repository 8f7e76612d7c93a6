#include "common/cuda.hpp"
#include "swiglu/gpu_thread.hpp"

namespace pyrl {
namespace {

template <class T, bool Wide>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_fwd_kernel(const __grid_constant__ SwigluGrid g) {
  swiglu_forward<T, Wide>(g, thread_index());
}

template <class T, bool Wide>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_bwd_kernel(const __grid_constant__ SwigluGrid g) {
  const ThreadIndex at = thread_index();
  float sum = swiglu_grad<T, Wide>(g, at);
  if (!g.args.weight_grad) return;
  for (int half = 1 << g.lanes >> 1; half > 0; half /= 2)
    sum += __shfl_down_sync(0xffffffffu, sum, half, 1 << g.lanes);
  const SwigluLane own(g, at);
  if (own.lane == 0 && own.row < g.args.rows) g.args.weight_grad[own.row] = sum;
}

}  // namespace

void swiglu_cuda(const SwigluArgs& args, void* stream) {
  const SwigluGrid g = plan_swiglu(args);
  if (g.blocks == 0) return;
  swiglu_types(g, [&](auto type, auto wide) {
    using T = decltype(type);
    const auto kernel = args.grad ? swiglu_bwd_kernel<T, decltype(wide)::value>
                                  : swiglu_fwd_kernel<T, decltype(wide)::value>;
    kernel<<<static_cast<unsigned>(g.blocks), kSwigluThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(g);
  });
  check_launch("swiglu");
}

}  // namespace pyrl
