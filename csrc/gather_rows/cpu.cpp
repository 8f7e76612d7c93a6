#include "gather_rows/api.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/pages.hpp"
#include "common/parallel.hpp"

namespace pyrl {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;  // below this a second thread costs more than it saves
constexpr int64_t kBlock = 1024;  // entries that stay in the L1 cache for all fields
constexpr int64_t kStep = 32;     // entries compared at a time

typedef int64_t Entries __attribute__((vector_size(64)));

// Consecutive rows, which most rows of a packed layout are: one memcpy per field.
struct CopyRun {
  int64_t first, count, row;  // output rows from `first` on are source rows from `row` on, or fill
};

// Whether the kStep entries at `rows` are row, row + step, ...
bool continues(const int64_t* rows, int64_t row, int64_t step) {
  Entries expected = row + step * Entries{0, 1, 2, 3, 4, 5, 6, 7}, differs = {};
  for (int64_t j = 0; j < kStep; j += 8, expected += 8 * step) {
    Entries entries;
    std::memcpy(&entries, rows + j, sizeof entries);
    differs |= entries ^ expected;
  }
  int64_t any = 0;
  for (int j = 0; j < 8; ++j) any |= differs[j];
  return any == 0;
}

// Splits entries [begin, end) into runs. Returns the first entry outside [-1, num_src), or -1.
int64_t find_runs(const int64_t* rows, int64_t begin, int64_t end, int64_t num_src, CopyRun* runs,
                  int64_t& num_runs) {
  num_runs = 0;
  for (int64_t i = begin, stop; i < end; i = stop) {
    const int64_t row = rows[i], step = row >= 0;
    if (row < -1 || row >= num_src) return i;
    stop = i + 1;
    if (stop < end && rows[stop] == row + step) {
      const int64_t limit = row < 0 ? end : std::min(end, i + num_src - row);
      while (stop + kStep <= limit && continues(rows + stop, row + (stop - i) * step, step))
        stop += kStep;
      while (stop < limit && rows[stop] == row + (stop - i) * step) ++stop;
    }
    runs[num_runs++] = {i, stop - i, row};
  }
  return -1;
}

void repeat(uint64_t pattern, std::byte* out, int64_t bytes) {
  int64_t b = 0;
  for (; b + 8 <= bytes; b += 8) std::memcpy(out + b, &pattern, 8);
  std::memcpy(out + b, &pattern, bytes - b);
}

void copy_runs(const Field& f, const CopyRun* runs, int64_t num_runs) {
  for (int64_t k = 0; k < num_runs; ++k) {
    const auto [first, count, row] = runs[k];
    std::byte* out = f.out + first * f.row_bytes;
    if (row < 0 && !f.fill) {
      repeat(f.pattern, out, count * f.row_bytes);
    } else if (row >= 0 && f.stride == f.row_bytes) {
      std::memcpy(out, f.src + row * f.stride, count * f.row_bytes);
    } else {
      const std::byte* from = row < 0 ? f.fill : f.src + row * f.stride;
      const int64_t stride = row < 0 ? 0 : f.stride;
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(out + i * f.row_bytes, from + i * stride, f.row_bytes);
    }
  }
}

// Scattered rows of a few bytes: one load and one store each.
template <int64_t Bytes>
void copy_words(const Field& f, const int64_t* rows, int64_t begin, int64_t end) {
  std::byte padding[Bytes];
  if (f.fill)
    std::memcpy(padding, f.fill, Bytes);
  else
    repeat(f.pattern, padding, Bytes);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows[i];
    std::memcpy(f.out + i * Bytes, row < 0 ? padding : f.src + row * f.stride, Bytes);
  }
}

void copy_block(const Field& f, const int64_t* rows, int64_t begin, int64_t end, const CopyRun* runs,
                int64_t num_runs) {
  if (num_runs * 8 > end - begin) switch (f.row_bytes) {
      case 1: return copy_words<1>(f, rows, begin, end);
      case 2: return copy_words<2>(f, rows, begin, end);
      case 4: return copy_words<4>(f, rows, begin, end);
      case 8: return copy_words<8>(f, rows, begin, end);
      case 16: return copy_words<16>(f, rows, begin, end);
      default: break;
    }
  copy_runs(f, runs, num_runs);
}

}  // namespace

int64_t gather_rows_cpu(const Field* fields, int count, int64_t num_src, const int64_t* rows,
                        int64_t num_out, int threads) {
  int64_t bytes = sizeof(int64_t);
  for (int f = 0; f < count; ++f) {
    bytes += fields[f].row_bytes;
    want_huge_pages(fields[f].out, num_out * fields[f].row_bytes);
  }
  return parallel_find(num_out, kBytesPerThread / bytes + 1, threads, [&](int64_t from, int64_t to) {
    CopyRun runs[kBlock];
    for (int64_t begin = from, num_runs; begin < to; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, to);
      const int64_t bad = find_runs(rows, begin, end, num_src, runs, num_runs);
      if (bad >= 0) return bad;
      for (int f = 0; f < count; ++f) copy_block(fields[f], rows, begin, end, runs, num_runs);
    }
    return int64_t{-1};
  });
}

}  // namespace pyrl
