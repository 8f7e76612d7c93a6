#include "gather_routes/api.hpp"

#include <stdexcept>
#include <string>

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

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

}  // namespace

void check_routes(const GatherRoutesArgs& r) {
  if (r.dtype != DType::u8 && r.dtype != DType::u16)
    throw std::invalid_argument("gather_routes: routes must be u8 or u16");
  check("layers", r.layers, r.num_layers, 0, r.num_slots, "a slot of routes");
}

void gather_routes_cpu(const GatherRoutesArgs& r, const char* isa, int threads) {
  check_routes(r);
  check("rows", r.rows, r.num_out, -1, r.num_src, "-1 (padding) or a token of routes");
  const auto run = PYRL_PICK(isa, gather_routes);
  const int64_t bytes = r.num_layers * r.num_out * r.top_k * size_of(r.dtype);
  want_huge_pages(r.out, bytes);
  parallel_for(r.num_out, kTokensPerThread, threads, [&](int64_t begin, int64_t end) {
    run(r, bytes >= kStreamed, begin, end);
  });
}

}  // namespace pyrl
