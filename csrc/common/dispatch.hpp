#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

namespace pyrl {

// Whether this processor and this build can run "avx512", "avx2" or "portable".
bool has_isa(std::string_view isa);

// Returns the kernels built for `isa`, or for "auto" those of the widest instruction set that this
// processor has. Null where this build has none.
template <class T>
const T& pick(std::string_view isa, const T& portable, const T* avx2, const T* avx512) {
  const bool any = isa == "auto";
  if ((any || isa == "avx512") && avx512 && has_isa("avx512")) return *avx512;
  if ((any || isa == "avx2") && avx2 && has_isa("avx2")) return *avx2;
  if (any || isa == "portable") return portable;
  throw std::invalid_argument("isa is " + std::string(isa) +
                              ", expected auto or one that this processor has");
}

// pick() among what cpu_simd.cpp defines: <op>_portable, <op>_avx2 and <op>_avx512.
#if defined(__x86_64__)
#define PYRL_PICK(isa, op) pick(isa, op##_portable, &op##_avx2, &op##_avx512)
#else
#define PYRL_PICK(isa, op) pick(isa, op##_portable, decltype(&op##_portable)(), decltype(&op##_portable)())
#endif

}  // namespace pyrl
