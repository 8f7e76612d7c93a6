#pragma once
// A thread of gather_routes, in three phases separated by __syncthreads().
//
// A block takes a tile of tokens and a group of layers. It reads their tuples as the widest words
// that divide them (neighbouring threads: neighbouring layers of a token) and lays them out layer by
// layer in shared memory; from there neighbouring threads write neighbouring tokens.
//
// Tuples of 4 and 8 bytes of neighbouring layers, which are most, go the wide way: 16 bytes of
// several layers are read at once and dealt to the rows of these layers, and 16 bytes of several
// tokens are written at once. Where a layer of `out` begins inside such a unit, its tokens lie in
// shared memory so that units there are units of `out`; the tuples before the first and behind the
// last whole one of a tile are written one by one.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/thread.hpp"
#include "gather_routes/api.hpp"

namespace pyrl {

constexpr int kRoutesThreads = 256;
constexpr int kRoutesTokens = 64;    // per tile, at most
constexpr int kRoutesStage = 16384;  // bytes of shared memory, and of a tuple at most
constexpr int kRoutesLayers = 256;   // per launch, whose parameters hold their slots

// The parameter of one launch.
struct RoutesTask {
  const unsigned char* routes;
  int64_t row_bytes;
  const int64_t* rows;
  int64_t num_out;
  unsigned char* out;  // of its first layer
  int64_t groups;      // of layers: blocks per tile
  uint32_t layers, group, tokens, top_k, tuple, num_experts;
  uint32_t word;      // bytes
  uint32_t stride;    // bytes between layers in shared memory: an odd count of words or of banks
  uint32_t unit;      // elements that a thread writes at once; 0: the wide way
  uint32_t chunks;    // of kWideLanes windows of 16 bytes that a token's layers lie in
  const unsigned char* end;  // of routes
  uint64_t per_top_k;  // x / top_k = x * per_top_k >> 40 for x below 2^20
  int16_t slots[kRoutesLayers];

  int64_t blocks() const { return (num_out + tokens - 1) / tokens * groups; }
};

struct RoutesShared {
  alignas(16) unsigned char stage[kRoutesStage];
  int64_t rows[kRoutesTokens];
  uint32_t fill;  // expert of the first element of the tile if it is padding
  int16_t slots[kRoutesLayers];
};

// The tokens and layers of a block.
struct RoutesTile {
  int64_t token;
  uint32_t tokens, layer, layers;

  PYRL_DEVICE RoutesTile(const RoutesTask& r, const ThreadIndex& at)
      : token(at.block / r.groups * r.tokens), layer(uint32_t(at.block % r.groups) * r.group) {
    tokens = r.num_out - token < r.tokens ? uint32_t(r.num_out - token) : r.tokens;
    layers = r.layers - layer < r.group ? r.layers - layer : r.group;
  }
};

// A thread's walk over [outer, inner] in steps of the block's threads.
struct Walk {
  uint32_t inner, i, j, step_i, step_j;

  PYRL_DEVICE Walk(const ThreadIndex& at, uint32_t inner)
      : inner(inner), i(at.thread / inner), j(at.thread % inner), step_i(at.threads / inner),
        step_j(at.threads % inner) {}
  PYRL_DEVICE void next() {
    i += step_i;
    j += step_j;
    if (j >= inner) j -= inner, ++i;
  }
};

PYRL_DEVICE void routes_index(const RoutesTask& r, const ThreadIndex& at, RoutesShared& shared) {
  const RoutesTile tile(r, at);
  for (uint32_t t = at.thread; t < tile.tokens; t += at.threads)
    shared.rows[t] = r.rows[tile.token + t];
  for (uint32_t i = at.thread; i < tile.layers; i += at.threads)
    shared.slots[i] = r.slots[tile.layer + i];
  if (at.thread == 0) shared.fill = uint32_t(tile.token * r.top_k % r.num_experts);
}

template <int Bytes>
struct alignas(Bytes) RoutesWord {
  using Part = std::conditional_t<Bytes == 1, uint8_t,
                                  std::conditional_t<Bytes == 2, uint16_t, uint32_t>>;
  Part part[Bytes / sizeof(Part)];
};

template <int Bytes>
PYRL_DEVICE void routes_load(const RoutesTask& r, const ThreadIndex& at, RoutesShared& shared) {
  using Word = RoutesWord<Bytes>;
  constexpr int kBatch = Bytes == 16 ? 2 : 4;  // loads in flight
  const RoutesTile tile(r, at);
  const uint32_t words_per_tuple = r.tuple / Bytes;
  Walk walk(at, tile.layers * words_per_tuple);  // tokens, words of all layers
  while (walk.i < tile.tokens) {
    Word words[kBatch];
    uint32_t to[kBatch];
    for (int n = 0; n < kBatch; ++n, walk.next()) {
      const int64_t row = walk.i < tile.tokens ? shared.rows[walk.i] : -1;
      const uint32_t layer = words_per_tuple == 1 ? walk.j : walk.j / words_per_tuple;
      const uint32_t part = walk.j - layer * words_per_tuple;
      to[n] = row < 0 ? kRoutesStage
                      : layer * r.stride + walk.i * r.tuple + part * uint32_t(Bytes);
      if (row >= 0)
        words[n] = *reinterpret_cast<const Word*>(r.routes + row * r.row_bytes +
                                                  shared.slots[layer] * int64_t(r.tuple) +
                                                  part * uint32_t(Bytes));
    }
    for (int n = 0; n < kBatch; ++n)
      if (to[n] < kRoutesStage) *reinterpret_cast<Word*>(shared.stage + to[n]) = words[n];
  }
}

PYRL_DEVICE void routes_load_any(const RoutesTask& r, const ThreadIndex& at, RoutesShared& shared) {
  switch (r.word) {
    case 16: return routes_load<16>(r, at, shared);
    case 8: return routes_load<8>(r, at, shared);
    case 4: return routes_load<4>(r, at, shared);
    case 2: return routes_load<2>(r, at, shared);
    default: return routes_load<1>(r, at, shared);
  }
}

constexpr int kWideLanes = 8, kWideTokens = 4;  // of a warp: windows of a token, tokens

// The layers of a tile in `out`, and where a tuple of theirs is in shared memory.
template <int Tuple>
struct WideLayers {
  static constexpr uint32_t kPer = 16 / Tuple;  // tokens of a unit, layers of a window
  uint32_t first, each;  // tuples from a multiple of 16 bytes to the first layer; from layer to layer

  PYRL_DEVICE WideLayers(const RoutesTask& r, const RoutesTile& tile)
      : first(uint32_t(reinterpret_cast<uintptr_t>(r.out) / Tuple) + tile.layer * uint32_t(r.num_out)),
        each(uint32_t(r.num_out)) {}
  // Tokens of the unit in which a layer of the tile begins that are before it.
  PYRL_DEVICE uint32_t shift(uint32_t layer) const { return (first + layer * each) % kPer; }
  PYRL_DEVICE bool shifted() const { return (first | each) % kPer != 0; }
  // Units of a layer change places with its window, so that the layers of a window, and those of its
  // neighbours, are in different banks. The last tokens of a shifted tile share a unit with the first.
  PYRL_DEVICE uint32_t place(uint32_t layer, uint32_t token) const {
    constexpr uint32_t kBytes = kRoutesTokens * Tuple;
    const uint32_t byte = (token + shift(layer)) * Tuple % kBytes;
    return layer * kBytes + (byte ^ (layer / kPer & 7u) * 16);
  }
};

template <class T, int Tuple>
PYRL_DEVICE RoutesWord<Tuple> padding_tuple(const RoutesTask& r, uint32_t first) {
  T experts[Tuple / sizeof(T)];
  for (uint32_t j = 0; j < Tuple / sizeof(T); ++j) experts[j] = T((first + j) % r.num_experts);
  RoutesWord<Tuple> tuple;
  memcpy(&tuple, experts, Tuple);
  return tuple;
}

// The window of 16 bytes at `from`; of one that begins before the routes or ends behind them only
// the tuples inside.
template <int Tuple>
PYRL_DEVICE void load_window(const RoutesTask& r, const unsigned char* from,
                             RoutesWord<Tuple> (&tuples)[16 / Tuple]) {
  if (from >= r.routes && from + 16 <= r.end) {
    const auto window = *reinterpret_cast<const RoutesWord<16>*>(from);
    memcpy(tuples, &window, 16);
    return;
  }
  for (int s = 0; s < 16 / Tuple; ++s)
    if (from + s * Tuple >= r.routes && from + (s + 1) * Tuple <= r.end)
      tuples[s] = *reinterpret_cast<const RoutesWord<Tuple>*>(from + s * Tuple);
}

template <class T, int Tuple>
PYRL_DEVICE void wide_load(const RoutesTask& r, const ThreadIndex& at, RoutesShared& shared) {
  constexpr int kPer = 16 / Tuple, kBatch = 2;
  const RoutesTile tile(r, at);
  const WideLayers<Tuple> layers(r, tile);
  const uint32_t lane = at.thread % 32, warps = at.threads / 32;
  const uint32_t items = (tile.tokens + kWideTokens - 1) / kWideTokens * r.chunks;
  for (uint32_t item = at.thread / 32; item < items; item += kBatch * warps) {
    RoutesWord<Tuple> tuples[kBatch][kPer];
    int layer[kBatch];  // of the first tuple
    uint32_t token[kBatch];
    PYRL_UNROLL
    for (int n = 0; n < kBatch; ++n) {
      const uint32_t i = item + n * warps, tokens = i / r.chunks;
      const uint32_t window = (i - tokens * r.chunks) * kWideLanes + lane % kWideLanes;
      token[n] = tokens * kWideTokens + lane / kWideLanes;
      layer[n] = int(tile.layers);
      if (i >= items || token[n] >= tile.tokens) continue;
      const int64_t row = shared.rows[token[n]];
      if (row < 0) {
        layer[n] = int(window * kPer);
        const auto padding =
            padding_tuple<T, Tuple>(r, shared.fill + token[n] * (Tuple / uint32_t(sizeof(T))));
        for (int s = 0; s < kPer; ++s) tuples[n][s] = padding;
        continue;
      }
      const unsigned char* from =
          r.routes + row * r.row_bytes + (r.slots[0] + int64_t(tile.layer)) * Tuple;
      const auto shift = uint32_t(reinterpret_cast<uintptr_t>(from) % 16);
      layer[n] = (int(window * 16) - int(shift)) / Tuple;
      if (layer[n] < int(tile.layers)) load_window(r, from + (int(window * 16) - int(shift)), tuples[n]);
    }
    PYRL_UNROLL
    for (int n = 0; n < kBatch; ++n) {
      PYRL_UNROLL
      for (int s = 0; s < kPer; ++s) {
        const auto to = uint32_t(layer[n] + s);  // below 0: large
        if (to < tile.layers)
          *reinterpret_cast<RoutesWord<Tuple>*>(shared.stage + layers.place(to, token[n])) =
              tuples[n][s];
      }
    }
  }
}

template <int Tuple>
PYRL_DEVICE void wide_write(const RoutesTask& r, const ThreadIndex& at, const RoutesShared& shared) {
  constexpr uint32_t kPer = 16 / Tuple;
  const RoutesTile tile(r, at);
  const WideLayers<Tuple> layers(r, tile);
  unsigned char* const out = r.out + (tile.layer * r.num_out + tile.token) * Tuple;
  const auto copy = [&](auto word, uint32_t layer, uint32_t token) {
    using Word = decltype(word);
    *reinterpret_cast<Word*>(out + (layer * r.num_out + token) * Tuple) =
        *reinterpret_cast<const Word*>(shared.stage + layers.place(layer, token));
  };
  for (Walk walk(at, (tile.tokens + kPer - 1) / kPer); walk.i < tile.layers; walk.next()) {
    const uint32_t token = (0 - layers.shift(walk.i)) % kPer + walk.j * kPer;
    if (token + kPer <= tile.tokens) copy(RoutesWord<16>(), walk.i, token);
  }
  if (!layers.shifted()) return;
  const uint32_t singles = tile.tokens % kPer ? 2 * kPer - 2 : kPer;  // of a layer, at most
  for (Walk walk(at, singles); walk.i < tile.layers; walk.next()) {
    const uint32_t wanted = (0 - layers.shift(walk.i)) % kPer;
    const uint32_t before = wanted < tile.tokens ? wanted : tile.tokens;
    const uint32_t whole = (tile.tokens - before) / kPer * kPer;
    const uint32_t token = walk.j < before ? walk.j : whole + walk.j;
    if (token < tile.tokens) copy(RoutesWord<Tuple>(), walk.i, token);
  }
}

template <class T>
PYRL_DEVICE void routes_load_words(const RoutesTask& r, const ThreadIndex& at, RoutesShared& shared) {
  if (r.unit == 0)
    return r.tuple == 4 ? wide_load<T, 4>(r, at, shared) : wide_load<T, 8>(r, at, shared);
  routes_load_any(r, at, shared);
}

// Elements that a thread writes at once.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) RoutesUnit {
  T element[Count];
};

template <class T, int Unit>
PYRL_DEVICE void routes_write(const RoutesTask& r, const ThreadIndex& at,
                              const RoutesShared& shared) {
  const RoutesTile tile(r, at);
  auto* out = reinterpret_cast<T*>(r.out) + tile.token * r.top_k;
  for (Walk walk(at, tile.tokens * r.top_k / Unit); walk.i < tile.layers; walk.next()) {
    const uint32_t first = walk.j * Unit, token = uint32_t(first * r.per_top_k >> 40);
    RoutesUnit<T, Unit> unit;
    if (shared.rows[token] < 0) {
      for (uint32_t n = 0; n < Unit; ++n)
        unit.element[n] = T((shared.fill + first + n) % r.num_experts);
    } else {
      unit = *reinterpret_cast<const RoutesUnit<T, Unit>*>(
          shared.stage + walk.i * r.stride + first * uint32_t(sizeof(T)));
    }
    *reinterpret_cast<RoutesUnit<T, Unit>*>(out + (tile.layer + walk.i) * r.num_out * r.top_k +
                                            first) = unit;
  }
}

template <class T>
constexpr int kRoutesUnit = 4 / int(sizeof(T));  // a bank of shared memory

template <class T>
PYRL_DEVICE void routes_write_units(const RoutesTask& r, const ThreadIndex& at,
                                    const RoutesShared& shared) {
  if (r.unit == 0) return r.tuple == 4 ? wide_write<4>(r, at, shared) : wide_write<8>(r, at, shared);
  if (r.unit == 1) return routes_write<T, 1>(r, at, shared);
  routes_write<T, kRoutesUnit<T>>(r, at, shared);
}

// Whether a launch can go the wide way: slots side by side, tuples at multiples of their size.
inline bool wide_way(const RoutesTask& r) {
  for (uint32_t i = 1; i < r.layers; ++i)
    if (r.slots[i] != r.slots[0] + int(i)) return false;
  return (r.tuple == 4 || r.tuple == 8) && r.word >= r.tuple &&
         reinterpret_cast<uintptr_t>(r.out) % r.tuple == 0;
}

// The launch for the layers from `first` on.
template <class T>
RoutesTask routes_task(const GatherRoutesArgs& r, int64_t first) {
  const auto divides = [](uint64_t x, int word) { return x % word == 0; };
  const int64_t tuple = r.top_k * sizeof(T);
  RoutesTask task;
  task.routes = static_cast<const unsigned char*>(r.routes);
  task.row_bytes = r.row_bytes;
  task.rows = r.rows;
  task.num_out = r.num_out;
  task.num_experts = uint32_t(r.num_experts);
  auto* out = static_cast<T*>(r.out) + first * r.num_out * r.top_k;
  task.out = reinterpret_cast<unsigned char*>(out);
  task.layers = uint32_t(std::min<int64_t>(r.num_layers - first, kRoutesLayers));
  task.top_k = uint32_t(r.top_k);
  task.tuple = uint32_t(tuple);
  task.word = 16;
  while (!divides(reinterpret_cast<uintptr_t>(r.routes) | r.row_bytes | tuple, task.word))
    task.word /= 2;
  const uint32_t bank = std::max(task.word, 4u);
  task.tokens = uint32_t(std::clamp<int64_t>((kRoutesStage - bank) / tuple, 1, kRoutesTokens));
  task.stride = std::min<uint32_t>((task.tokens * task.tuple + bank - 1) / bank | 1,
                                   kRoutesStage / bank) * bank;
  task.group = std::min<uint32_t>(kRoutesStage / task.stride, task.layers);
  task.groups = (task.layers + task.group - 1) / task.group;
  constexpr int unit = kRoutesUnit<T>;
  task.unit = divides(r.top_k, unit) && divides(reinterpret_cast<uintptr_t>(out), 4) ? unit : 1;
  task.per_top_k = (uint64_t(1) << 40) / r.top_k + 1;
  for (uint32_t i = 0; i < task.layers; ++i) task.slots[i] = int16_t(r.layers[first + i]);
  task.end = task.routes + (r.num_src - 1) * r.row_bytes + r.num_slots * tuple;
  if (wide_way(task)) {
    task.unit = 0;
    task.tokens = kRoutesTokens;
    task.group = std::min(kRoutesStage / (task.tokens * task.tuple), task.layers);
    task.groups = (task.layers + task.group - 1) / task.group;
    task.group = uint32_t((task.layers + task.groups - 1) / task.groups);
    const uint32_t windows = (task.group * task.tuple + 16 - task.tuple + 15) / 16;
    task.chunks = (windows + kWideLanes - 1) / kWideLanes;
  }
  return task;
}

// Calls launch(task, T()) for every launch of `r`; T is the unsigned integer of its elements.
template <class T, class Launch>
void routes_launches_of(const GatherRoutesArgs& r, const Launch& launch) {
  for (int64_t first = 0; first < r.num_layers; first += kRoutesLayers)
    launch(routes_task<T>(r, first), T());
}

template <class Launch>
void routes_launches(const GatherRoutesArgs& r, const Launch& launch) {
  check_routes(r);
  if (r.num_layers * r.num_out * r.top_k == 0) return;
  if (r.dtype == DType::u8)
    routes_launches_of<uint8_t>(r, launch);
  else
    routes_launches_of<uint16_t>(r, launch);
}

}  // namespace pyrl
