#include "common/sources.hpp"

namespace pyrl {

const char* const sources = PYRL_SOURCES;  // CMakeLists.txt computes it

}  // namespace pyrl
