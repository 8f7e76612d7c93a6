#include "common/dispatch.hpp"

#include <cstdlib>

namespace pyrl {
namespace {

std::string choose_isa() {
  std::string here;
  for (const char* isa : {"avx512", "avx2", "portable"})
    if (has_isa(isa)) here += (here.empty() ? "" : ", ") + std::string(isa);
  const char* named = std::getenv("PYRL_ISA");
  if (!named || !*named) return here.substr(0, here.find(','));
  if (has_isa(named)) return named;
  throw std::invalid_argument("PYRL_ISA is " + std::string(named) + ", expected what this processor has: " +
                              here);
}

}  // namespace

bool has_isa(std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == "portable";
}

const std::string& auto_isa() {
  static const std::string isa = choose_isa();
  return isa;
}

}  // namespace pyrl
