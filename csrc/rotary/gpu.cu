#include "common/cuda.hpp"
#include "rotary/gpu_thread.hpp"

namespace pyrl {
namespace {

template <class T, bool From, bool To>
__global__ void __launch_bounds__(kRotaryThreads) rotary_kernel(const __grid_constant__ RotaryGrid g) {
  rotary_thread<T, From, To>(g, thread_index());
}

struct RotaryLaunch {
  const RotaryGrid& g;
  cudaStream_t stream;

  template <class T, bool From, bool To>
  void run() const {
    rotary_kernel<T, From, To><<<static_cast<unsigned>(g.blocks), kRotaryThreads, 0, stream>>>(g);
  }
};

}  // namespace

void rotary_cuda(const RotaryArgs& args, void* stream) {
  const RotaryGrid g = plan_rotary(args);
  if (g.blocks == 0) return;
  with_rotary(args, RotaryLaunch{g, static_cast<cudaStream_t>(stream)});
  check_launch("rotary");
}

}  // namespace pyrl
