#include <stdexcept>
#include <string>

#include "gather_rows_device.hpp"

namespace pyrl {
namespace {

__global__ void __launch_bounds__(kGatherThreads)
    gather_rows_kernel(const __grid_constant__ Gather gather) {
  gather_thread(gather, place());
}

}  // namespace

void gather_rows_cuda(const Field* fields, int count, const int64_t* rows, int64_t num_out,
                      void* stream) {
  each_gather(fields, count, rows, num_out, [&](const Gather& gather) {
    gather_rows_kernel<<<static_cast<unsigned>(gather.blocks), kGatherThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(gather);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
      throw std::runtime_error(std::string("gather_rows: ") + cudaGetErrorString(error));
  });
}

}  // namespace pyrl
