#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// Heads of one tensor: src[t, h, i] lies at src + t * row + h * head + i, out is contiguous.
struct RotaryPart {
  const void* src;  // [rows, heads, width] of the call's dtype, read
  int64_t row, head;  // strides in elements
  int64_t heads, width;
  void* out;  // [rows, heads, width] written; must not alias src
};

// Turns `turned` elements of every head of row t: the first, or the last with `last`. With pairs
// (a, b), cosines c and sines s of that row:
//
//   a' = a * c - b * s,  b' = b * c + a * s      with `back`: s is -s
//
// in fp32 (fp64 for f64), rounded once. The pair j is at (j, j + turned / 2), or among neighbours at
// (2 j, 2 j + 1). The other elements are copied.
struct RotaryArgs {
  RotaryPart parts[2];
  DType dtype;        // f32, bf16, f16 or f64
  const void* turns;  // [rows, turned] float (double for f64): cosines, then sines
  int64_t rows, turned;
  bool last, src_neighbours, out_neighbours, back;
};

void rotary_cpu(const RotaryArgs& args, const char* isa, int threads);

// The same on `stream` of the current device.
void rotary_cuda(const RotaryArgs& args, void* stream);

// The grid of rotary_cuda walked on the host, thread by thread (PYRL_TESTS).
void rotary_emulated(const RotaryArgs& args);

// The kernel of one instruction set, for rows in [begin, end).
using Rotary = void (*)(const RotaryArgs& args, int64_t begin, int64_t end);
extern const Rotary rotary_avx512, rotary_avx2, rotary_portable;

}  // namespace pyrl
