#include "gather_rows.hpp"

#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "parallel.hpp"

namespace pyrl {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;  // below this a second thread costs more than it saves
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

struct Rows {
  const std::byte* src;
  int64_t num_src;
  const int64_t* rows;
  const std::byte* fill;
  std::byte* out;
  int64_t bytes;

  bool outside(int64_t i) const { return rows[i] < -1 || rows[i] >= num_src; }
};

// Rows of a few bytes (token ids, masks): one load and one store each.
// Returns the first entry outside the range, or kNone.
template <int64_t Bytes>
int64_t copy_words(const Rows& r, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (r.outside(i)) return i;
    const int64_t row = r.rows[i];
    std::memcpy(r.out + i * Bytes, row < 0 ? r.fill : r.src + row * Bytes, Bytes);
  }
  return kNone;
}

// Wider rows: an index of a packed layout is mostly runs of consecutive rows, one memcpy a run.
int64_t copy_runs(const Rows& r, int64_t begin, int64_t end) {
  for (int64_t i = begin, stop; i < end; i = stop) {
    if (r.outside(i)) return i;
    const int64_t row = r.rows[i];
    stop = i + 1;
    if (row < 0) {
      std::memcpy(r.out + i * r.bytes, r.fill, r.bytes);
      continue;
    }
    while (stop < end && r.rows[stop] == row + (stop - i) && r.rows[stop] < r.num_src) ++stop;
    std::memcpy(r.out + i * r.bytes, r.src + row * r.bytes, (stop - i) * r.bytes);
  }
  return kNone;
}

int64_t copy(const Rows& r, int64_t begin, int64_t end) {
  switch (r.bytes) {
    case 1: return copy_words<1>(r, begin, end);
    case 2: return copy_words<2>(r, begin, end);
    case 4: return copy_words<4>(r, begin, end);
    case 8: return copy_words<8>(r, begin, end);
    case 16: return copy_words<16>(r, begin, end);
    default: return copy_runs(r, begin, end);
  }
}

}  // namespace

void gather_rows_cpu(const std::byte* src, int64_t num_src, const int64_t* rows,
                     const std::byte* fill, std::byte* out, int64_t num_out, int64_t row_bytes,
                     int threads) {
  const Rows r{src, num_src, rows, fill, out, row_bytes};
  std::atomic<int64_t> bad{kNone};
  const int64_t grain = kBytesPerThread / (row_bytes + 8) + 1;
  parallel_for(num_out, grain, threads, [&](int64_t begin, int64_t end) {
    const int64_t found = copy(r, begin, end);
    int64_t first = bad.load();
    while (found < first && !bad.compare_exchange_weak(first, found)) {
    }
  });
  if (const int64_t i = bad.load(); i != kNone)
    throw std::out_of_range("gather_rows: rows[" + std::to_string(i) + "] is " +
                            std::to_string(rows[i]) + ", expected -1 (fill) or a row of src in [0, " +
                            std::to_string(num_src) + ")");
}

}  // namespace pyrl
