#include "gather_rows_device.hpp"

namespace pyrl {

void gather_rows_emulated(const Field* fields, int count, const int64_t* rows, int64_t num_out) {
  each_gather(fields, count, rows, num_out, [](const Gather& g) {
    for (int64_t block = 0; block < g.blocks; ++block)
      each_thread(block, g.blocks, kGatherThreads, [&](Place at) { gather_thread(g, at); });
  });
}

}  // namespace pyrl
