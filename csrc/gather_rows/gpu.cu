#include "common/cuda.hpp"
#include "gather_rows/gpu_thread.hpp"

namespace pyrl {
namespace {

__global__ void __launch_bounds__(kGatherThreads)
    gather_rows_kernel(const __grid_constant__ Gather gather) {
  gather_thread(gather, thread_index());
}

}  // namespace

void gather_rows_cuda(const Field* fields, int count, const int64_t* rows, int64_t num_out,
                      void* stream) {
  each_gather(fields, count, rows, num_out, [&](const Gather& gather) {
    gather_rows_kernel<<<static_cast<unsigned>(gather.blocks), kGatherThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(gather);
    check_launch("gather_rows");
  });
}

}  // namespace pyrl
