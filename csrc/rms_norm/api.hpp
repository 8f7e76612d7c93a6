#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// Rows divided by the root of their mean square, times a weight a column. With
// s = 1 / sqrt(mean(x^2) + eps), all in fp32 and rounded once:
//
//   out = x * s * weight
//
// With `grad`, the derivatives instead: with t = grad * weight,
//
//   out = s * t - x * s^3 * mean(t * x) + residual_grad
//   weight_grad = sum over the rows of grad * x * s, in an order that their number fixes
struct RmsNormArgs {
  const void* src;  // row n begins (n / heads) * row + (n % heads) * head elements after it
  DType dtype;      // f32 or bf16, of all but `scale` and `parts`
  int64_t rows, heads, row, head, width;
  const void* weight;         // [width]
  float eps;
  float* scale;               // [rows] s, written; with `grad` read
  const void* grad;           // [rows, width]; null: the forward pass
  const void* residual_grad;  // [rows, width], with `grad` only; null: 0
  void* out;                  // [rows, width] written
  void* weight_grad;          // [width] written, with `grad` only
  float* parts;               // [rms_norm_scratch(rows, width)], with `grad` only
};

// A part of weight_grad is the sum of so many rows.
constexpr int64_t kRmsNormRows = 64;

constexpr int64_t rms_norm_parts(int64_t rows) { return (rows + kRmsNormRows - 1) / kRmsNormRows; }

// Columns of a part in memory: whole pairs of vectors.
constexpr int64_t rms_norm_padded(int64_t width) { return (width + 31) / 32 * 32; }

constexpr int64_t rms_norm_scratch(int64_t rows, int64_t width) {
  return rms_norm_parts(rows) * rms_norm_padded(width);
}

void rms_norm_cpu(const RmsNormArgs& args, const char* isa, int threads);

// The kernels of one instruction set.
struct RmsNorm {
  void (*forward)(const RmsNormArgs& args, int64_t begin, int64_t end);   // rows
  void (*backward)(const RmsNormArgs& args, int64_t begin, int64_t end);  // parts
  void (*join)(const RmsNormArgs& args, int64_t begin, int64_t end);      // 32 columns each
};
extern const RmsNorm rms_norm_avx512, rms_norm_avx2, rms_norm_portable;

}  // namespace pyrl
