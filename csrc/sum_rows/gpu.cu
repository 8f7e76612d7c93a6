#include "common/cuda.hpp"
#include "sum_rows/gpu_thread.hpp"

namespace pyrl {
namespace {

constexpr int kBlocksPerSm = 4;

template <class T>
__global__ void __launch_bounds__(kSumThreads, kBlocksPerSm)
    sum_rows_kernel(const __grid_constant__ SumGrid g) {
  __shared__ SumShared shared;
  const ThreadIndex at = thread_index();
  sum_starts(g, at, shared);
  __syncthreads();
  sum_firsts(g, at, shared);
  __syncthreads();
  sum_thread<T>(g, at, shared);
}

}  // namespace

void sum_rows_cuda(const SumRowsArgs& args, void* stream) {
  const SumGrid g = plan_sum(args);
  if (g.blocks == 0) return;
  const auto kernel = args.dtype == DType::f32    ? sum_rows_kernel<F32>
                      : args.dtype == DType::bf16 ? sum_rows_kernel<BF16>
                      : args.dtype == DType::f16  ? sum_rows_kernel<F16>
                                                  : sum_rows_kernel<F64>;
  kernel<<<static_cast<unsigned>(g.blocks), kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(g);
  check_launch("sum_rows");
}

}  // namespace pyrl
