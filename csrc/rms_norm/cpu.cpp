#include "rms_norm/api.hpp"

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {

constexpr int64_t kElementsPerThread = 1 << 14;  // below, a second thread costs more than it saves

void rms_norm_cpu(const RmsNormArgs& args, const char* isa, int threads) {
  const auto& run = PYRL_PICK(isa, rms_norm);
  want_huge_pages(args.out, args.rows * args.width * size_of(args.dtype));
  const auto each = [&](int64_t count, int64_t elements, const auto& body) {
    parallel_for(count, kElementsPerThread / (elements + 1) + 1, threads,
                 [&](int64_t begin, int64_t end) { body(args, begin, end); });
  };
  if (!args.grad) return each(args.rows, args.width, run.forward);
  const int64_t parts = rms_norm_parts(args.rows);
  each(parts, kRmsNormRows * args.width, run.backward);
  each(rms_norm_padded(args.width) / 32, parts * 32, run.join);
}

}  // namespace pyrl
