#include "latent_keys/api.hpp"

#include <cstring>
#include <vector>

#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;  // below this a second thread costs more than it saves

void join(const LatentKeysArgs& k, int64_t t) {
  const int64_t size = size_of(k.dtype), width = k.plain + k.common;
  const auto* both = static_cast<const char*>(k.both) + t * k.both_row * size;
  const auto* shared = static_cast<const char*>(k.shared) + t * k.shared_row * size;
  auto* key = static_cast<char*>(k.key) + t * k.heads * width * size;
  auto* value = static_cast<char*>(k.value) + t * k.heads * k.rest * size;
  for (int64_t h = 0; h < k.heads; ++h, key += width * size, value += k.rest * size) {
    const char* from = both + h * k.both_head * size;
    std::memcpy(key, from, k.plain * size);
    std::memcpy(key + k.plain * size, shared, k.common * size);
    std::memcpy(value, from + k.plain * size, k.rest * size);
  }
}

template <class T>
void part(const LatentKeysArgs& k, int64_t t, typename T::Acc* sums) {
  using Raw = typename T::Raw;
  const auto* key = static_cast<const Raw*>(k.key) + t * k.key_row;
  const auto* value = static_cast<const Raw*>(k.value) + t * k.value_row;
  auto* both = static_cast<Raw*>(k.both) + t * k.heads * (k.plain + k.rest);
  std::fill_n(sums, k.common, typename T::Acc(0));
  for (int64_t h = 0; h < k.heads; ++h, both += k.plain + k.rest) {
    const Raw* from = key + h * k.key_head;
    std::memcpy(both, from, k.plain * sizeof(Raw));
    std::memcpy(both + k.plain, value + h * k.value_head, k.rest * sizeof(Raw));
    for (int64_t i = 0; i < k.common; ++i) sums[i] += T::widen(from[k.plain + i]);
  }
  auto* shared = static_cast<Raw*>(k.shared) + t * k.common;
  for (int64_t i = 0; i < k.common; ++i) shared[i] = T::narrow(sums[i]);
}

template <class T>
void part_rows(const LatentKeysArgs& k, int64_t begin, int64_t end) {
  std::vector<typename T::Acc> sums(k.common);
  for (int64_t t = begin; t < end; ++t) part<T>(k, t, sums.data());
}

}  // namespace

void latent_keys_cpu(const LatentKeysArgs& k, int threads) {
  const int64_t size = size_of(k.dtype);
  const int64_t head = k.plain + k.rest, bytes = 2 * k.heads * (head + k.common) * size;
  want_huge_pages(k.back ? k.both : k.key, k.rows * k.heads * (k.plain + (k.back ? k.rest : k.common)) * size);
  if (!k.back) want_huge_pages(k.value, k.rows * k.heads * k.rest * size);
  parallel_for(k.rows, kBytesPerThread / (bytes + 1) + 1, threads, [&](int64_t begin, int64_t end) {
    if (!k.back)
      for (int64_t t = begin; t < end; ++t) join(k, t);
    else if (k.dtype == DType::f32)
      part_rows<F32>(k, begin, end);
    else if (k.dtype == DType::bf16)
      part_rows<BF16>(k, begin, end);
    else if (k.dtype == DType::f16)
      part_rows<F16>(k, begin, end);
    else
      part_rows<F64>(k, begin, end);
  });
}

}  // namespace pyrl
