#include "common/dispatch.hpp"

namespace pyrl {

bool has_isa(std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == "portable";
}

}  // namespace pyrl
