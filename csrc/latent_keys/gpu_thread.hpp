#pragma once
#include "common/dtype.hpp"
#include "common/thread.hpp"
#include "latent_keys/api.hpp"

namespace pyrl {

constexpr int kKeysThreads = 256;  // per block

// How the grid covers what is written: a thread writes one vector, threads of a row all heads in turn
// and then, with `back`, the shared elements.
struct KeysGrid {
  LatentKeysArgs args;
  int64_t plain, common, head;  // vectors of a head: its own in a key, shared ones, all
  int64_t row, blocks;  // vectors of a row
  bool wide;            // vectors of 16 bytes, otherwise of one element
};

inline KeysGrid plan_keys(const LatentKeysArgs& k) {
  KeysGrid g{k, 0, 0, 0, 0, 0, false};
  const int64_t size = size_of(k.dtype);
  uintptr_t low = 0;
  for (const void* p : {static_cast<const void*>(k.key), static_cast<const void*>(k.both),
                        static_cast<const void*>(k.shared), static_cast<const void*>(k.value)})
    low |= reinterpret_cast<uintptr_t>(p);
  for (int64_t n : {k.plain, k.common, k.rest, k.key_row, k.key_head, k.both_row, k.both_head,
                    k.shared_row, k.value_row, k.value_head})
    low |= uintptr_t(n * size);
  g.wide = low % 16 == 0;
  const int64_t vector = g.wide ? 16 / size : 1;
  g.plain = k.plain / vector;
  g.common = k.common / vector;
  g.head = g.plain + k.rest / vector + (k.back ? 0 : g.common);
  g.row = g.head * k.heads + (k.back ? g.common : 0);
  g.blocks = (k.rows * g.row + kKeysThreads - 1) / kKeysThreads;
  return g;
}

template <class T, int Width>
struct alignas(Width * sizeof(typename T::Raw)) KeysVector {
  typename T::Raw x[Width];
};

template <class T, int Width>
PYRL_DEVICE void keys_at(const KeysGrid& g, ThreadIndex at) {
  using Raw = typename T::Raw;
  using Vector = KeysVector<T, Width>;
  const LatentKeysArgs& k = g.args;
  const int64_t n = at.block * kKeysThreads + at.thread;
  if (n >= k.rows * g.row) return;
  const int64_t t = n >> 32 ? n / g.row : uint32_t(n) / uint32_t(g.row);
  const auto unit = uint32_t(n - t * g.row), h = unit / uint32_t(g.head);
  const int64_t v = unit - h * uint32_t(g.head);
  const auto load = [&](const void* from, int64_t row, int64_t vector) {
    return reinterpret_cast<const Vector*>(static_cast<const Raw*>(from) + row)[vector];
  };
  const auto store = [&](void* to, int64_t width, int64_t vector, const Vector& x) {
    reinterpret_cast<Vector*>(static_cast<Raw*>(to) + (t * k.heads + h) * width)[vector] = x;
  };
  const int64_t both = t * k.both_row + h * k.both_head, keys = g.plain + g.common;
  if (!k.back) {
    if (v < g.plain)
      store(k.key, k.plain + k.common, v, load(k.both, both, v));
    else if (v < keys)
      store(k.key, k.plain + k.common, v, load(k.shared, t * k.shared_row, v - g.plain));
    else
      store(k.value, k.rest, v - keys, load(k.both, both, v - g.common));
  } else if (h < k.heads) {
    store(k.both, k.plain + k.rest, v,
          v < g.plain ? load(k.key, t * k.key_row + h * k.key_head, v)
                      : load(k.value, t * k.value_row + h * k.value_head, v - g.plain));
  } else {
    const int64_t s = unit - k.heads * g.head;
    typename T::Acc sums[Width] = {};
    for (int64_t i = 0; i < k.heads; ++i) {
      const Vector term = load(k.key, t * k.key_row + i * k.key_head, g.plain + s);
      for (int j = 0; j < Width; ++j) sums[j] += T::widen(term.x[j]);
    }
    Vector sum;
    for (int j = 0; j < Width; ++j) sum.x[j] = T::narrow(sums[j]);
    reinterpret_cast<Vector*>(static_cast<Raw*>(k.shared) + t * k.common)[s] = sum;
  }
}

template <class T>
PYRL_DEVICE void keys_thread(const KeysGrid& g, ThreadIndex at) {
  if (g.wide)
    keys_at<T, 16 / int(sizeof(typename T::Raw))>(g, at);
  else
    keys_at<T, 1>(g, at);
}

}  // namespace pyrl
