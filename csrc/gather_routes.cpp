#include "gather_routes.hpp"

#include <stdexcept>
#include <string>

#include "isa.hpp"
#include "parallel.hpp"

namespace pyrl {
namespace {

constexpr int64_t kTokensPerThread = 1024;
constexpr int64_t kStreamed = 1 << 20;  // bytes of `out` from which it is written past the caches

void check(const char* what, const int64_t* entries, int64_t count, int64_t lowest, int64_t end,
           const char* rule) {
  for (int64_t i = 0; i < count; ++i)
    if (entries[i] < lowest || entries[i] >= end)
      throw std::out_of_range(std::string("gather_routes: ") + what + "[" + std::to_string(i) +
                              "] is " + std::to_string(entries[i]) + ", expected " + rule +
                              " in [0, " + std::to_string(end) + ")");
}

int64_t size_of(Int type) {
  return type == Int::u8 ? 1 : type == Int::i32 ? 4 : type == Int::i64 ? 8 : 2;
}

}  // namespace

void check_routes(const Routes& r) {
  if (r.in == Int::i64) throw std::invalid_argument("gather_routes: routes must not be i64");
  if (r.to != r.in && r.to != Int::i32 && r.to != Int::i64)
    throw std::invalid_argument("gather_routes: out must be i32, i64 or the type of routes");
  check("layers", r.layers, r.num_layers, 0, r.num_slots, "a slot of routes");
}

void gather_routes_cpu(const Routes& r, const char* isa, int threads) {
  check_routes(r);
  check("rows", r.rows, r.num_out, -1, r.num_src, "-1 (padding) or a token of routes");
  const auto& chosen = pick(isa, gather_routes_portable, PYRL_X86(gather_routes_avx2),
                            PYRL_X86(gather_routes_avx512));
  const bool stream = r.num_layers * r.num_out * r.top_k * size_of(r.to) >= kStreamed;
  parallel_for(r.num_out, kTokensPerThread, threads,
               [&](int64_t begin, int64_t end) { chosen.run(r, stream, begin, end); });
}

}  // namespace pyrl
