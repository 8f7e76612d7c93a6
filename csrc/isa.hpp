#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

namespace pyrl {

// Whether this processor and this build can run "avx512", "avx2" or "portable".
bool has_isa(std::string_view isa);

#if defined(__x86_64__)
#define PYRL_X86(symbol) (&(symbol))
#else
#define PYRL_X86(symbol) nullptr
#endif

// What was built for `isa`, or for "auto" the widest that this processor has:
//   pick(isa, portable, PYRL_X86(with_avx2), PYRL_X86(with_avx512))
template <class T>
const T& pick(std::string_view isa, const T& portable, const T* avx2, const T* avx512) {
  const bool any = isa == "auto";
  if ((any || isa == "avx512") && avx512 && has_isa("avx512")) return *avx512;
  if ((any || isa == "avx2") && avx2 && has_isa("avx2")) return *avx2;
  if (any || isa == "portable") return portable;
  throw std::invalid_argument("isa is " + std::string(isa) +
                              ", expected auto or one that this processor has");
}

}  // namespace pyrl
