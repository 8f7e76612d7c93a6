// The search of pyrl_ext/plan/forecast/few_samples.py: the best of all plans of few samples. Sums and
// comparisons are in its order, so that both find the same plan.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "plan_dynamic_cp/api.hpp"

namespace pyrl {

// A group: its size, as an index, and its samples.
using FewGroup = std::pair<int, std::vector<int>>;

inline bool is_few(const CpProblem& problem) {
  const double samples = double(problem.lengths.size());
  const double ranks = double(problem.num_ranks / problem.sizes[0].size);
  return std::pow(3.0, samples) * ranks * double(problem.sizes.size()) <= double(problem.most_steps);
}

class FewSamples {
 public:
  using Table = std::vector<std::vector<double>>;

  FewSamples(const CpProblem& problem, const Table& cost,
             const std::vector<std::vector<int64_t>>& rows)
      : p_(problem), samples_(int(problem.lengths.size())), sets_(size_t(1) << samples_) {
    for (const CpSize& size : p_.sizes) widths_.push_back(int(size.size / p_.sizes[0].size));
    ranks_ = int(p_.num_ranks / p_.sizes[0].size);
    for (size_t k = 0; k < p_.sizes.size(); ++k)
      seconds_.push_back(seconds(p_.sizes[k], cost[k], rows[k]));
    group();
  }

  // The microbatches of least time; of several such plans the one that is found first.
  std::vector<std::vector<FewGroup>> best() const {
    std::vector<std::vector<double>> times(samples_ + 1, none());
    std::vector<std::vector<size_t>> first(samples_ + 1, std::vector<size_t>(sets_));
    times[0][0] = 0.0;
    for (size_t held = 1; held < sets_; ++held)
      each_part(held, [&](size_t part) {
        for (int count = 1; count <= samples_; ++count) {
          const double time = slowest_[ranks_][part] + times[count - 1][held ^ part];
          if (time < times[count][held]) times[count][held] = time, first[count][held] = part;
        }
      });
    int best = 0;
    double least = kNever;
    for (int count = 1; count <= samples_; ++count) {
      if (count % p_.multiple && count != samples_) continue;
      const int64_t launched = (count + p_.multiple - 1) / p_.multiple * p_.multiple;
      const double time = p_.launch * double(launched) + times[count][sets_ - 1];
      if (best == 0 || time < least) best = count, least = time;
    }
    std::vector<std::vector<FewGroup>> plan;
    size_t held = sets_ - 1;
    for (int count = best; count > 0; --count) {
      plan.push_back(groups(first[count][held]));
      held ^= first[count][held];
    }
    return plan;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::vector<double> none() const { return std::vector<double>(sets_, kNever); }

  // Every part of a set that has its lowest element, the smallest number first.
  template <class F>
  static void each_part(size_t held, F&& visit) {
    const size_t lowest = held & -held, rest = held ^ lowest;
    size_t part = 0;
    do {
      visit(part | lowest);
      part = (part - rest) & rest;
    } while (part);
  }

  // Seconds of every set of samples as one group; infinite beyond its limit.
  std::vector<double> seconds(const CpSize& size, const std::vector<double>& cost,
                              const std::vector<int64_t>& rows) const {
    std::vector<double> found{size.fixed};
    std::vector<int64_t> held{0};
    for (int x = 0; x < samples_; ++x)  // the sets whose last sample is x
      for (size_t before = 0, count = found.size(); before < count; ++before) {
        found.push_back(found[before] + cost[x]);
        held.push_back(held[before] + rows[x]);
      }
    for (size_t set = 0; set < sets_; ++set)
      if (held[set] > size.limit) found[set] = kNever;
    return found;
  }

  // The least time of the slowest group for every number of ranks and every set.
  void group() {
    slowest_.assign(ranks_ + 1, none());
    for (auto& of : slowest_) of[0] = 0.0;
    chosen_.assign(ranks_ + 1, std::vector<std::pair<int, size_t>>(sets_));
    for (size_t held = 1; held < sets_; ++held)
      each_part(held, [&](size_t part) {
        for (int k = 0; k < int(widths_.size()); ++k) {
          const double alone = seconds_[k][part];
          for (int r = widths_[k]; r <= ranks_; ++r) {
            const double time = std::max(alone, slowest_[r - widths_[k]][held ^ part]);
            if (time < slowest_[r][held]) slowest_[r][held] = time, chosen_[r][held] = {k, part};
          }
        }
      });
  }

  std::vector<FewGroup> groups(size_t held) const {
    std::vector<FewGroup> found;
    int ranks = ranks_;
    while (held) {
      const auto [k, part] = chosen_[ranks][held];
      auto& samples = found.emplace_back(k, std::vector<int>{}).second;
      for (int x = 0; x < samples_; ++x)
        if (part >> x & 1) samples.push_back(x);
      held ^= part;
      ranks -= widths_[k];
    }
    return found;
  }

  const CpProblem& p_;
  int samples_;
  size_t sets_;
  int ranks_ = 0;
  std::vector<int> widths_;
  Table seconds_, slowest_;
  std::vector<std::vector<std::pair<int, size_t>>> chosen_;
};

}  // namespace pyrl
