#pragma once
#include <cstdint>
#include <vector>

namespace pyrl {

// A size that groups may have. Seconds of a group whose samples have padded lengths n:
// fixed + token * sum(n) + square * sum(n^2).
struct CpSize {
  int64_t size, unit, limit;
  double fixed, token, square;
};

// What a plan is made for, and what is tried; pyrl_ext/plan/forecast/dynamic_cp.py, which is the
// specification, says what each of them means.
struct CpProblem {
  std::vector<int64_t> lengths;
  int64_t num_ranks;
  std::vector<CpSize> sizes;
  double launch;
  int64_t multiple;
  std::vector<double> times, slack, weights;
  int64_t bases, most_steps;
};

struct CpPlan {
  // For each microbatch the number of its groups, then for each group its first rank, its size, the
  // number of its samples and their ids.
  std::vector<int64_t> numbers;
  double makespan, lower_bound;
};

// Throws std::invalid_argument naming a sample that no group can hold.
CpPlan plan_dynamic_cp_cpu(const CpProblem& problem);

}  // namespace pyrl
