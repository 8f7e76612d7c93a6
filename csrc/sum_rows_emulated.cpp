#include "sum_rows_device.hpp"

namespace pyrl {

void sum_rows_emulated(const Sum& sum) {
  const SumGrid g = plan_sum(sum);
  const auto thread = sum.type == Number::f32    ? sum_thread<F32>
                      : sum.type == Number::bf16 ? sum_thread<BF16>
                      : sum.type == Number::f16  ? sum_thread<F16>
                                                 : sum_thread<F64>;
  for (int64_t block = 0; block < g.blocks; ++block)
    each_thread(block, g.blocks, kSumThreads, [&](Place at) { thread(g, at); });
}

}  // namespace pyrl
