#include <memory>

#include "replay_probs_device.hpp"

namespace pyrl {
namespace {

template <class A, class Word, int Count>
void walk(const Replay& r, int64_t first) {
  const auto shared = std::make_unique<Tile<A>>();
  const int64_t tiles = num_tiles(r);
  for (int64_t tile = first / kTileRows; tile < tiles; ++tile) {
    each_thread(tile, tiles, kBlockThreads, [&](Place at) { tile_values(r, tile, *shared, at); });
    each_thread(tile, tiles, kBlockThreads,
                [&](Place at) { tile_write<A, Word, Count>(r, tile, *shared, at); });
  }
}

struct Walk {
  const Replay& r;
  int64_t first;

  template <class A, class Word, int Count>
  void run() const {
    walk<A, Word, Count>(r, first);
  }
};

}  // namespace

void replay_probs_emulated(const Replay& r, int64_t first) { with_types(r, Walk{r, first}); }

}  // namespace pyrl
