#pragma once
#include <cstdint>

#include "common/dtype.hpp"

namespace pyrl {

// Keys of heads that share their last elements, and values:
//
//   key[t, h] = (both[t, h, :plain], shared[t]),  value[t, h] = both[t, h, plain:]
//
// With `back` the gradient of both inputs from that of the keys and of values:
//
//   both[t, h] = (key[t, h, :plain], value[t, h]),  shared[t] = sum over h of key[t, h, plain:]
//
// added in the order of heads in fp32 (fp64 for f64) and rounded once. Strides are in elements; what is
// written is contiguous.
struct LatentKeysArgs {
  DType dtype;  // f32, bf16, f16 or f64
  int64_t rows, heads, plain, common, rest;  // widths: of both's part, shared's, values'
  void* key;  // [rows, heads, plain + common]
  int64_t key_row, key_head;
  void* both;  // [rows, heads, plain + rest]
  int64_t both_row, both_head;
  void* shared;  // [rows, common]
  int64_t shared_row;
  void* value;  // [rows, heads, rest]
  int64_t value_row, value_head;
  bool back;
};

void latent_keys_cpu(const LatentKeysArgs& args, int threads);

// The same on `stream` of the current device.
void latent_keys_cuda(const LatentKeysArgs& args, void* stream);

// The grid of latent_keys_cuda walked on the host, thread by thread (PYRL_TESTS).
void latent_keys_emulated(const LatentKeysArgs& args);

}  // namespace pyrl
