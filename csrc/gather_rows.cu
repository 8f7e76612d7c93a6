#include <algorithm>
#include <stdexcept>
#include <string>

#include "gather_rows.hpp"

namespace pyrl {
namespace {

// `lanes` neighbouring threads move one row as words; a block moves 256 / lanes rows at a time.
template <class Word>
__global__ void gather_rows_kernel(const Word* __restrict__ src, const int64_t* __restrict__ rows,
                                   const Word* __restrict__ fill, Word* __restrict__ out,
                                   int64_t num_out, int64_t words, int lanes) {
  const int per_block = blockDim.x / lanes;
  const int lane = threadIdx.x % lanes;
  const int64_t step = int64_t(gridDim.x) * per_block;
  for (int64_t i = int64_t(blockIdx.x) * per_block + threadIdx.x / lanes; i < num_out; i += step) {
    const int64_t row = rows[i];
    const Word* from = row < 0 ? fill : src + row * words;
    for (int64_t w = lane; w < words; w += lanes) out[i * words + w] = from[w];
  }
}

template <class Word>
void launch(const std::byte* src, const int64_t* rows, const std::byte* fill, std::byte* out,
            int64_t num_out, int64_t row_bytes, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t words = row_bytes / int64_t(sizeof(Word));
  int lanes = 1;
  while (lanes < words && lanes < kThreads) lanes *= 2;
  const int64_t per_block = kThreads / lanes;
  const int64_t blocks = std::min<int64_t>((num_out + per_block - 1) / per_block, 1 << 20);
  gather_rows_kernel<Word><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      reinterpret_cast<const Word*>(src), rows, reinterpret_cast<const Word*>(fill),
      reinterpret_cast<Word*>(out), num_out, words, lanes);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("gather_rows: ") + cudaGetErrorString(error));
}

}  // namespace

void gather_rows_cuda(const std::byte* src, const int64_t* rows, const std::byte* fill,
                      std::byte* out, int64_t num_out, int64_t row_bytes, void* stream) {
  if (num_out == 0 || row_bytes == 0) return;
  // The widest word that divides the row and every address: a view may start anywhere.
  const uintptr_t bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(fill) |
                         reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes);
  const auto run = bits % 16 == 0  ? launch<uint4>
                   : bits % 8 == 0 ? launch<uint2>
                   : bits % 4 == 0 ? launch<uint32_t>
                   : bits % 2 == 0 ? launch<uint16_t>
                                   : launch<uint8_t>;
  run(src, rows, fill, out, num_out, row_bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace pyrl
