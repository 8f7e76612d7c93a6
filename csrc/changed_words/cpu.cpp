#include "changed_words/api.hpp"

#include <algorithm>
#include <cstring>

namespace pyrl {
namespace {

uint64_t bits(const uint16_t* words) {
  uint64_t found;
  static_assert(sizeof found == kWordsAtOnce * sizeof *words);
  std::memcpy(&found, words, sizeof found);
  return found;
}

struct List {
  uint16_t* __restrict distances;
  uint16_t* __restrict values;
  int64_t count = 0;
  int64_t last = -1;

  // Without a branch, which a processor could not foresee.
  void add(int64_t place, uint16_t value, bool listed) {
    distances[count] = uint16_t(place - last);
    values[count] = value;
    last = listed ? place : last;
    count += listed;
  }
};

}  // namespace

int64_t changed_words_cpu(const uint16_t* before, const uint16_t* now, int64_t size, int64_t run,
                          uint16_t* distances, uint16_t* values, int64_t room) {
  List list{distances, values};
  for (int64_t start = 0; start < size; start += run) {
    const int64_t last = std::min(start + run, size) - 1;
    int64_t i = start;
    for (; i + kWordsAtOnce <= last; i += kWordsAtOnce) {
      if (bits(before + i) == bits(now + i)) continue;
      for (int64_t k = i; k < i + kWordsAtOnce; ++k) list.add(k, now[k], before[k] != now[k]);
      if (list.count > room) return -1;
    }
    for (; i <= last; ++i) list.add(i, now[i], before[i] != now[i] || i == last);
    if (list.count > room) return -1;
  }
  return list.count;
}

}  // namespace pyrl
