#include "common/cuda.hpp"
#include "latent_keys/gpu_thread.hpp"

namespace pyrl {
namespace {

template <class T>
__global__ void __launch_bounds__(kKeysThreads) latent_keys_kernel(const __grid_constant__ KeysGrid g) {
  keys_thread<T>(g, thread_index());
}

}  // namespace

void latent_keys_cuda(const LatentKeysArgs& args, void* stream) {
  const KeysGrid g = plan_keys(args);
  if (g.blocks == 0) return;
  const auto kernel = args.dtype == DType::f32    ? latent_keys_kernel<F32>
                      : args.dtype == DType::bf16 ? latent_keys_kernel<BF16>
                      : args.dtype == DType::f16  ? latent_keys_kernel<F16>
                                                  : latent_keys_kernel<F64>;
  kernel<<<static_cast<unsigned>(g.blocks), kKeysThreads, 0, static_cast<cudaStream_t>(stream)>>>(g);
  check_launch("latent_keys");
}

}  // namespace pyrl
