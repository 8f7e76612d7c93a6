#include "gather_routes.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "parallel.hpp"

namespace pyrl {
namespace {

// Tokens handled together: their rows stay in the first-level cache while every layer's piece of
// them is written as one contiguous stretch.
constexpr int64_t kTile = 64;
constexpr int64_t kTokensPerThread = 1024;

void check(const char* what, const int64_t* entries, int64_t count, int64_t lowest, int64_t end,
           const char* rule) {
  for (int64_t i = 0; i < count; ++i)
    if (entries[i] < lowest || entries[i] >= end)
      throw std::out_of_range(std::string("gather_routes: ") + what + "[" + std::to_string(i) +
                              "] is " + std::to_string(entries[i]) + ", expected " + rule +
                              " in [0, " + std::to_string(end) + ")");
}

// One token's experts of one layer, of which there are TopK (0: known at run time only).
template <class In, class Out, int TopK>
inline void widen(const In* from, Out* to, int64_t top_k) {
  if constexpr (TopK == 0) {
    for (int64_t j = 0; j < top_k; ++j) to[j] = static_cast<Out>(from[j]);
  } else if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(to, from, TopK * sizeof(In));
  } else {
    In narrow[TopK];  // read all before the first write, which might, for all the compiler knows,
    std::memcpy(narrow, from, sizeof narrow);  // change what `from` holds
    for (int j = 0; j < TopK; ++j) to[j] = static_cast<Out>(narrow[j]);
  }
}

template <class In, class Out, int TopK>
void gather_tile(const Routes& r, int64_t begin, int64_t end) {
  const int64_t top_k = TopK > 0 ? TopK : r.top_k, tokens = end - begin;
  const auto* routes = static_cast<const In*>(r.routes);
  auto* out = static_cast<Out*>(r.out);
  const In* from[kTile];
  int64_t padding[kTile], num_padding = 0;
  for (int64_t m = begin; m < end; ++m) {
    const int64_t row = r.rows[m];
    from[m - begin] = routes + (row < 0 ? 0 : row) * r.num_slots * top_k;
    if (row < 0) padding[num_padding++] = m;
  }
  if (r.num_src > 0)  // padding rows are read from row 0, then written over
    for (int64_t i = 0; i < r.num_layers; ++i) {
      const int64_t offset = r.layers[i] * top_k;
      Out* to = out + (i * r.num_out + begin) * top_k;
      for (int64_t m = 0; m < tokens; ++m)
        widen<In, Out, TopK>(from[m] + offset, to + m * top_k, top_k);
    }
  for (int64_t p = 0; p < num_padding; ++p)
    for (int64_t i = 0; i < r.num_layers; ++i)
      for (int64_t j = 0, first = padding[p] * top_k; j < top_k; ++j)
        out[i * r.num_out * top_k + first + j] = static_cast<Out>((first + j) % r.num_experts);
}

template <class In, class Out>
void gather(const Routes& r, int threads) {
  const auto tile = r.top_k == 4   ? gather_tile<In, Out, 4>
                    : r.top_k == 6 ? gather_tile<In, Out, 6>
                    : r.top_k == 8 ? gather_tile<In, Out, 8>
                                   : gather_tile<In, Out, 0>;
  parallel_for(r.num_out, kTokensPerThread, threads, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m += kTile) tile(r, m, std::min(m + kTile, end));
  });
}

template <class In>
void gather_from(const Routes& r, int threads) {
  switch (r.to) {
    case Int::i32: return gather<In, int32_t>(r, threads);
    case Int::i64: return gather<In, int64_t>(r, threads);
    default: return gather<In, In>(r, threads);
  }
}

}  // namespace

void gather_routes_cpu(const Routes& r, int threads) {
  if (r.to != r.in && r.to != Int::i32 && r.to != Int::i64)
    throw std::invalid_argument("gather_routes: out must be i32, i64 or the type of routes");
  check("layers", r.layers, r.num_layers, 0, r.num_slots, "a slot of routes");
  check("rows", r.rows, r.num_out, -1, r.num_src, "-1 (padding) or a token of routes");
  switch (r.in) {
    case Int::u8: return gather_from<uint8_t>(r, threads);
    case Int::u16: return gather_from<uint16_t>(r, threads);
    case Int::i16: return gather_from<int16_t>(r, threads);
    case Int::i32: return gather_from<int32_t>(r, threads);
    case Int::i64: throw std::invalid_argument("gather_routes: routes must not be i64");
  }
}

}  // namespace pyrl
