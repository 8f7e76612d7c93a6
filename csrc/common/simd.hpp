#pragma once
// For the sources named cpu_simd.cpp, which CMake compiles once per instruction set: PYRL_ISA is
// portable, avx2 or avx512. They are written in the compiler's vector types.
//
// Code of one instruction set must never be linked in place of another's. So everything in these
// sources is in an unnamed namespace, inline functions of shared headers are in the namespace
// PYRL_ISA (see dtype.hpp), and no function of the standard library is called.
#include <cstdint>

#define PYRL_JOIN_(a, b) a##_##b
#define PYRL_JOIN(a, b) PYRL_JOIN_(a, b)
#define PYRL_KERNELS(op) PYRL_JOIN(op, PYRL_ISA)  // the name that dispatch.hpp looks up

#if defined(__AVX512F__)
#define PYRL_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PYRL_VECTOR_BYTES 32
#else
#define PYRL_VECTOR_BYTES 16
#endif

namespace pyrl {
namespace {

template <class T, int64_t Count>
struct VectorOf {
  typedef T Type __attribute__((vector_size(Count * sizeof(T))));
};

// Count elements of type T: Vector<float, 8>.
template <class T, int64_t Count = PYRL_VECTOR_BYTES / sizeof(T)>
using Vector = typename VectorOf<T, Count>::Type;

}  // namespace
}  // namespace pyrl
