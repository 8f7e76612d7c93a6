#include "swiglu/api.hpp"

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {

constexpr int64_t kElementsPerThread = 1 << 13;  // below, a second thread costs more than it saves

void swiglu_cpu(const SwigluArgs& args, const char* isa, int threads) {
  const auto run = PYRL_PICK(isa, swiglu);
  want_huge_pages(args.out, args.rows * args.width * (args.grad ? 2 : 1) * size_of(args.dtype));
  parallel_for(args.rows, kElementsPerThread / (args.width + 1) + 1, threads,
               [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

}  // namespace pyrl
