#include "gather_routes_device.hpp"

namespace pyrl {

void gather_routes_emulated(const Routes& routes) {
  routes_launches(routes, [](const RoutesTask& r, auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    for (int64_t block = 0, blocks = r.blocks(); block < blocks; ++block) {
      RoutesShared shared;
      const auto phase = [&](const auto& run) {
        each_thread(block, blocks, kRoutesThreads, [&](const Place& at) { run(r, at, shared); });
      };
      phase(routes_index);
      phase(routes_load_words);
      phase(routes_write_units<In, Out>);
    }
  });
}

}  // namespace pyrl
