#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// A gated unit, times a weight a row. With g, u the halves of a row of gate_up, p its weight and
// s = 1 / (1 + exp(-g)), all in fp32, rounded once:
//
//   out = g * s * u * p
//
// With `grad`, the derivatives instead: with t = grad * p,
//
//   out = (t * u * s * (1 + g * (1 - s)), t * g * s)      of gates, and of ups
//   weight_grad = sum over the columns of grad * g * s * u, in an order that the width fixes
struct SwigluArgs {
  const void* gate_up;  // [rows, 2 * width] of `dtype`, gates before ups
  DType dtype;          // f32 or bf16
  int64_t rows, width;
  const float* weight;  // [rows], or null: 1
  const void* grad;     // [rows, width] of `dtype`; null: the forward pass
  void* out;            // [rows, width] written; with `grad` [rows, 2 * width]
  float* weight_grad;   // [rows] written, with `grad` only; or null
};

void swiglu_cpu(const SwigluArgs& args, const char* isa, int threads);

// The same on `stream` of the current device, for any alignment.
void swiglu_cuda(const SwigluArgs& args, void* stream);

// The grid of swiglu_cuda walked on the host (PYRL_TESTS).
void swiglu_emulated(const SwigluArgs& args);

// The kernel of one instruction set, for the rows in [begin, end).
using Swiglu = void (*)(const SwigluArgs& args, int64_t begin, int64_t end);
extern const Swiglu swiglu_avx512, swiglu_avx2, swiglu_portable;

}  // namespace pyrl
