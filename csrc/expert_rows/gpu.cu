#include <algorithm>

#include "common/cuda.hpp"
#include "expert_rows/gpu_thread.hpp"

namespace pyrl {
namespace {

using namespace expert_rows;

constexpr int kBlocksPerSm = 4;  // without it ptxas saves registers and spills

__global__ void __launch_bounds__(kThreads) expert_rows_count_kernel(ExpertRowsArgs a, int32_t* counts) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Tile shared(a, memory);
  const ThreadIndex at = thread_index();
  tile_bits(a, at.block, shared, at);
  __syncthreads();
  tile_counts(a, at.block, shared, counts, at);
}

template <class Word>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_rows_kernel(ExpertRowsArgs a, const int32_t* counts) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Tile shared(a, memory);
  const ThreadIndex at = thread_index();
  tile_bits(a, at.block, shared, at);
  tile_sums(a, at.block, shared, counts, at);
  __syncthreads();
  tile_totals(a, at.block, shared, at);
  __syncthreads();
  tile_firsts(a, shared, at);
  __syncthreads();
  tile_order(a, at.block, shared, at);
  tile_rows<Word>(a, at.block, shared, at);
}

template <class Word>
__global__ void __launch_bounds__(kThreads) expert_rows_grad_kernel(ExpertRowsGradArgs a) {
  const ThreadIndex at = thread_index();
  for (int64_t tile = at.block; tile < num_grad_tiles(a); tile += at.blocks) {
    grad_zeros<Word>(a, tile, at);
    __syncthreads();
    grad_places<Word>(a, tile, at);
  }
}

}  // namespace

void expert_rows_cuda(const ExpertRowsArgs& a, int32_t* scratch, void* stream) {
  const auto blocks = static_cast<unsigned>(num_tiles(a.tokens));
  const auto bytes = static_cast<unsigned>(Tile::bytes(a));
  const auto on = static_cast<cudaStream_t>(stream);
  expert_rows_count_kernel<<<blocks, kThreads, bytes, on>>>(a, scratch);
  check_launch("expert_rows");
  with_word(a.word, [&](auto word) {
    expert_rows_kernel<decltype(word)><<<blocks, kThreads, bytes, on>>>(a, scratch);
  });
  check_launch("expert_rows");
}

void expert_rows_grad_cuda(const ExpertRowsGradArgs& a, void* stream) {
  if (a.tokens == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(num_grad_tiles(a), 1 << 20));
  with_word(a.word, [&](auto word) {
    expert_rows_grad_kernel<decltype(word)>
        <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  });
  check_launch("expert_rows_grad");
}

}  // namespace pyrl
