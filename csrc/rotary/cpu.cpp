#include "rotary/api.hpp"

#include "common/dispatch.hpp"
#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {

constexpr int64_t kBytesPerThread = 1 << 16;  // below this a second thread costs more than it saves

void rotary_cpu(const RotaryArgs& args, const char* isa, int threads) {
  const auto run = PYRL_PICK(isa, rotary);
  int64_t bytes = 1;
  for (const RotaryPart& part : args.parts) {
    const int64_t row = part.heads * part.width * size_of(args.dtype);
    want_huge_pages(part.out, args.rows * row);
    bytes += 2 * row;
  }
  parallel_for(args.rows, kBytesPerThread / bytes + 1, threads,
               [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

}  // namespace pyrl
