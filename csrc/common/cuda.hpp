#pragma once
#include <stdexcept>
#include <string>

namespace pyrl {

// Throws std::runtime_error if the launch before it failed.
inline void check_launch(const char* op) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
}

}  // namespace pyrl
