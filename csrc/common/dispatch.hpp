#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

namespace pyrl {

// Whether this processor and this build can run "avx512", "avx2" or "portable".
bool has_isa(std::string_view isa);

// The instruction set that "auto" names: PYRL_ISA of the environment, read once, or without it the
// widest that this processor has. Throws std::invalid_argument where PYRL_ISA names none of those.
const std::string& auto_isa();

// Returns the kernels built for `isa`. Null where this build has none.
template <class T>
const T& pick(std::string_view isa, const T& portable, const T* avx2, const T* avx512) {
  if (isa == "auto") isa = auto_isa();
  if (isa == "avx512" && avx512 && has_isa(isa)) return *avx512;
  if (isa == "avx2" && avx2 && has_isa(isa)) return *avx2;
  if (isa == "portable") return portable;
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
