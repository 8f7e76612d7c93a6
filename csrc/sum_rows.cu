#include <stdexcept>
#include <string>

#include "sum_rows_device.hpp"

namespace pyrl {
namespace {

template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_rows_kernel(const __grid_constant__ SumGrid g) {
  sum_thread<T>(g, place());
}

}  // namespace

void sum_rows_cuda(const Sum& sum, void* stream) {
  const SumGrid g = plan_sum(sum);
  if (g.blocks == 0) return;
  const auto kernel = sum.type == Number::f32    ? sum_rows_kernel<F32>
                      : sum.type == Number::bf16 ? sum_rows_kernel<BF16>
                      : sum.type == Number::f16  ? sum_rows_kernel<F16>
                                                 : sum_rows_kernel<F64>;
  kernel<<<static_cast<unsigned>(g.blocks), kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(g);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("sum_rows: ") + cudaGetErrorString(error));
}

}  // namespace pyrl
