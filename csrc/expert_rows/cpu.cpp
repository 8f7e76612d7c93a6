#include "expert_rows/api.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/pages.hpp"
#include "common/parallel.hpp"
#include "expert_rows/gpu_thread.hpp"

namespace pyrl {
namespace {

constexpr int64_t kBytesPerThread = 1 << 17;  // below, a second thread costs more than it saves

// Calls visit(e) for the experts of a token, ascending; eight entries of the map at a time.
template <class Visit>
void each_expert(const uint8_t* map, int64_t experts, const Visit& visit) {
  int64_t e = 0;
  for (uint64_t word; e + 8 <= experts; e += 8) {
    std::memcpy(&word, map + e, 8);
    for (; word; word &= word - 1) visit(e + __builtin_ctzll(word) / 8);
  }
  for (; e < experts; ++e)
    if (map[e]) visit(e);
}

// Adds a part's tokens to `counts`. Returns the first that does not have top_k experts, or -1.
int64_t count(const ExpertRowsArgs& a, int64_t begin, int64_t end, int64_t* counts) {
  for (int64_t t = begin; t < end; ++t) {
    int64_t found = 0;
    each_expert(a.map + t * a.experts, a.experts, [&](int64_t e) { ++counts[e], ++found; });
    if (found != a.top_k) return t;
  }
  return -1;
}

// Writes the rows of a part's tokens; next[e] is where the next of an expert goes.
template <class Word>
void place(const ExpertRowsArgs& a, int64_t begin, int64_t end, int64_t* next) {
  const Word* probs = static_cast<const Word*>(a.probs);
  Word* weights = static_cast<Word*>(a.weights);
  for (int64_t t = begin; t < end; ++t) {
    int64_t* order = a.order + t * a.top_k;
    a.starts[t] = t * a.top_k;
    each_expert(a.map + t * a.experts, a.experts, [&](int64_t e) {
      const int64_t m = next[e]++, at = t * a.experts + e;
      a.rows[m] = t;
      a.places[m] = at;
      weights[m] = probs[at];
      *order++ = m;
    });
  }
}

template <class Word>
void scatter(const ExpertRowsGradArgs& a, int64_t begin, int64_t end) {
  const Word* grad = static_cast<const Word*>(a.grad);
  Word* out = static_cast<Word*>(a.out);
  std::memset(out + begin * a.experts, 0, (end - begin) * a.experts * sizeof(Word));
  for (int64_t i = begin * a.top_k; i < end * a.top_k; ++i) out[a.places[a.order[i]]] = grad[a.order[i]];
}

}  // namespace

void expert_rows_cpu(const ExpertRowsArgs& a, int threads) {
  const int64_t grain = kBytesPerThread / (a.experts + 40 * a.top_k + 1) + 1;
  const int64_t parts = std::clamp<int64_t>(a.tokens / grain, 1, threads);
  const auto first = [&](int64_t part) { return a.tokens * part / parts; };
  std::vector<int64_t> counts(parts * a.experts);
  const int64_t bad = parallel_find(parts, 1, threads, [&](int64_t begin, int64_t end) {
    int64_t found = -1;
    for (int64_t p = begin; p < end && found < 0; ++p)
      found = count(a, first(p), first(p + 1), counts.data() + p * a.experts);
    return found;
  });
  if (bad >= 0) {
    const int64_t found = a.experts - std::count(a.map + bad * a.experts, a.map + (bad + 1) * a.experts, 0);
    throw std::invalid_argument("expert_rows: routing_map[" + std::to_string(bad) + "] has " +
                                std::to_string(found) + " experts, expected top_k " +
                                std::to_string(a.top_k));
  }
  int64_t next = 0;  // counts become the first row of each part's tokens
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t before = next;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t own = counts[p * a.experts + e];
      counts[p * a.experts + e] = next;
      next += own;
    }
    a.counts[e] = int32_t(next - before);
  }
  a.starts[a.tokens] = a.tokens * a.top_k;
  const auto run = a.word == 2 ? place<uint16_t> : a.word == 4 ? place<uint32_t> : place<uint64_t>;
  parallel_for(parts, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) run(a, first(p), first(p + 1), counts.data() + p * a.experts);
  });
}

int64_t expert_rows_scratch(int64_t tokens, int64_t experts) {
  return expert_rows::num_tiles(tokens) * experts;
}

void expert_rows_grad_cpu(const ExpertRowsGradArgs& a, int threads) {
  const auto run = a.word == 2 ? scatter<uint16_t> : a.word == 4 ? scatter<uint32_t> : scatter<uint64_t>;
  const int64_t grain = kBytesPerThread / (a.experts * a.word + 20 * a.top_k + 1) + 1;
  want_huge_pages(a.out, a.tokens * a.experts * a.word);
  parallel_for(a.tokens, grain, threads, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

}  // namespace pyrl
