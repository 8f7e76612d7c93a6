// The search of pyrl_ext/plan/forecast/dynamic_cp.py. Sums are formed in its order and products are
// not fused with them (CMakeLists.txt), so that both find the same plan.
#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan_dynamic_cp/api.hpp"
#include "plan_dynamic_cp/few_samples.hpp"

namespace pyrl {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A group in the list of its size, which is sorted by load and then by index.
struct Loaded {
  double load;
  int index;
  int64_t rows;
};

bool operator<(const Loaded& a, const Loaded& b) {
  return a.load < b.load || (a.load == b.load && a.index < b.index);
}

struct Group {
  int index, size;
  double load;
  int64_t rows;
  std::vector<int> samples;
};

struct Microbatch {
  std::vector<int> left;  // positions of samples not placed, longest first
  int64_t free = 0;
  int count = 0;               // of groups in use; the others keep their memory
  std::vector<Group> groups;
  std::vector<std::vector<Loaded>> by_load;  // of every size

  void clear(int64_t ranks, size_t sizes) {
    left.clear();
    free = ranks;
    count = 0;
    by_load.resize(sizes);
    for (auto& of : by_load) of.clear();
  }

  Group& add(int size) {
    if (count == int(groups.size())) groups.emplace_back();
    Group& group = groups[count];
    group.index = count++;
    group.size = size;
    group.samples.clear();
    return group;
  }

  double time() const {
    double most = 0.0;
    for (int i = 0; i < count; ++i) most = std::max(most, groups[i].load);
    return most;
  }
};

using Plan = std::vector<Microbatch>;

struct Variant {
  double weight;
  int base;
  double share;
};

// A group that has room for `rows` more; no other of its size has less load and as much room.
struct Room {
  int size;
  double load;
  int64_t rows;
};

class Search {
 public:
  explicit Search(const CpProblem& problem) : p_(problem), count_(int(problem.lengths.size())) {
    order_.resize(count_);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return p_.lengths[a] > p_.lengths[b]; });
    least_rows_.assign(count_, std::numeric_limits<int64_t>::max());
    work_.assign(count_, std::numeric_limits<double>::infinity());
    for (const CpSize& s : p_.sizes) price(s);
    for (int x = 0; x < count_; ++x)
      if (least_rows_[x] == std::numeric_limits<int64_t>::max())
        throw std::invalid_argument("plan_dynamic_cp: sample " + std::to_string(order_[x]) +
                                    " has " + std::to_string(p_.lengths[order_[x]]) +
                                    " tokens, expected at most what a group of some size holds");
    int64_t rows = 0;
    for (const int64_t each : least_rows_) rows += each;
    fewest_ = ceil_div(rows, capacity_);
    mean_ = total_work() / double(p_.num_ranks) / double(fewest_);
  }

  CpPlan best() {
    if (is_few(p_)) {
      const Plan plan = best_of_all();
      return {numbers(plan), makespan(plan), lower_bound()};
    }
    Plan found;
    double least = 0.0;
    for (const Variant& variant : variants()) {
      Plan made = plan(variant);
      split(made);
      const double time = makespan(made);
      if (found.empty() || time < least) {
        found = std::move(made);
        least = time;
      }
    }
    return {numbers(found), least, lower_bound()};
  }

 private:
  void price(const CpSize& s) {
    auto& rows = rows_.emplace_back(count_);
    auto& cost = cost_.emplace_back(count_);
    for (int x = 0; x < count_; ++x) {
      rows[x] = ceil_div(p_.lengths[order_[x]], s.unit) * s.unit;
      const double n = double(rows[x]);
      cost[x] = s.token * n + s.square * n * n;
      if (rows[x] > s.limit) continue;
      least_rows_[x] = std::min(least_rows_[x], rows[x]);
      work_[x] = std::min(work_[x], cost[x] * double(s.size));
    }
    capacity_ = std::max(capacity_, p_.num_ranks * s.limit / s.size);
  }

  double total_work() const {
    double total = 0.0;
    for (const double each : work_) total += each;
    return total;
  }

  // Whole plans ---------------------------------------------------------------------------------

  Plan best_of_all() const {
    Plan plan;
    for (const auto& groups : FewSamples(p_, cost_, rows_).best()) {
      Microbatch& micro = plan.emplace_back();
      micro.clear(p_.num_ranks, p_.sizes.size());
      for (const auto& [size, samples] : groups) {
        Group& group = micro.add(size);
        group.samples = samples;
        std::tie(group.load, group.rows) = load(size, samples);
      }
    }
    split(plan);
    return plan;
  }

  std::vector<Variant> variants() const {
    std::vector<double> shares{1.0};
    if (p_.multiple > 1) {
      const double target = double(ceil_div(fewest_, p_.multiple) * p_.multiple);
      shares.clear();
      for (const double slack : p_.slack)
        shares.push_back(std::min(1.0, double(fewest_) / target * slack));
    }
    const int bases = int(std::min(p_.bases, int64_t(p_.sizes.size())));
    std::vector<Variant> found;
    for (const double share : shares)
      for (int base = 0; base < bases; ++base)
        for (const double weight : p_.weights) found.push_back({weight, base, share});
    return found;
  }

  Plan plan(const Variant& variant) {
    Plan made;
    std::vector<int> left(count_);
    std::iota(left.begin(), left.end(), 0);
    while (!left.empty()) {
      Microbatch best;
      double most = 0.0;
      bool any = false;
      for (const double time : times(left)) {
        build(left, time, variant);
        const double score = efficiency(built_, variant.weight);
        if (any && score <= most) continue;
        any = true;
        most = score;
        std::swap(best, built_);
      }
      left = best.left;
      made.push_back(std::move(best));
    }
    return made;
  }

  double makespan(const Plan& made) const {
    double total = 0.0;
    for (const Microbatch& each : made) total += p_.launch + each.time();
    return total;
  }

  double lower_bound() const {
    const int64_t fewest = ceil_div(fewest_, p_.multiple) * p_.multiple;
    const std::vector<double> longest = alone(0);
    const double work = total_work() / double(p_.num_ranks);
    return p_.launch * double(fewest) +
           std::max(work, *std::min_element(longest.begin(), longest.end()));
  }

  // Seconds of a sample alone on a group of each size that can hold it.
  std::vector<double> alone(int x) const {
    std::vector<double> found;
    for (size_t k = 0; k < p_.sizes.size(); ++k)
      if (rows_[k][x] <= p_.sizes[k].limit) found.push_back(p_.sizes[k].fixed + cost_[k][x]);
    return found;
  }

  void split(Plan& made) const {
    while (int64_t(made.size()) % p_.multiple) {
      size_t at = 0, most = 0;
      for (size_t i = 0; i < made.size(); ++i) {
        size_t held = 0;
        for (int g = 0; g < made[i].count; ++g) held += made[i].groups[g].samples.size();
        if (held > most) at = i, most = held;
      }
      Microbatch first, second;
      first.clear(p_.num_ranks, p_.sizes.size());
      if (most < 2) {
        made.push_back(std::move(first));
        continue;
      }
      second.clear(p_.num_ranks, p_.sizes.size());
      halve(made[at], first, second);
      made[at] = std::move(first);
      made.insert(made.begin() + int64_t(at) + 1, std::move(second));
    }
  }

  void halve(const Microbatch& whole, Microbatch& first, Microbatch& second) const {
    Microbatch* const halves[] = {&first, &second};
    int turn = 0;
    for (int g = 0; g < whole.count; ++g) {
      for (Microbatch* half : halves) half->add(whole.groups[g].size);
      for (const int x : whole.groups[g].samples) {
        halves[turn]->groups[g].samples.push_back(x);
        turn = 1 - turn;
      }
      for (Microbatch* half : halves) {
        Group& group = half->groups[g];
        std::tie(group.load, group.rows) = load(group.size, group.samples);
      }
    }
  }

  std::vector<int64_t> numbers(const Plan& made) const {
    std::vector<int64_t> out;
    for (const Microbatch& each : made) {
      std::vector<int> largest(each.count);
      std::iota(largest.begin(), largest.end(), 0);
      std::stable_sort(largest.begin(), largest.end(),
                       [&](int a, int b) { return each.groups[a].size > each.groups[b].size; });
      const size_t groups = out.size();
      int64_t first = 0, count = each.count;
      out.push_back(0);
      for (const int g : largest) {
        const Group& group = each.groups[g];
        out.insert(out.end(), {first, p_.sizes[group.size].size, int64_t(group.samples.size())});
        const size_t begin = out.size();
        for (const int x : group.samples) out.push_back(order_[x]);
        std::sort(out.begin() + int64_t(begin), out.end());
        first += p_.sizes[group.size].size;
      }
      for (; first < p_.num_ranks; first += p_.sizes[0].size, ++count)
        out.insert(out.end(), {first, p_.sizes[0].size, 0});
      out[groups] = count;
    }
    return out;
  }

  // One microbatch ------------------------------------------------------------------------------

  std::vector<double> times(const std::vector<int>& left) const {
    int64_t rows = 0;
    double work = 0.0;
    for (const int x : left) {
      rows += least_rows_[x];
      if (rows > capacity_) break;
      work += work_[x];
    }
    const double even = work / double(p_.num_ranks);
    std::vector<double> found = alone(left.front());
    const double least = *std::min_element(found.begin(), found.end());
    for (const double share : p_.times) found.push_back(std::max(least, even * share));
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  double efficiency(const Microbatch& micro, double weight) const {
    double work = 0.0;
    int64_t rows = 0;
    for (int g = 0; g < micro.count; ++g)
      for (const int x : micro.groups[g].samples) {
        work += work_[x];
        rows += least_rows_[x];
      }
    const double tokens = weight * mean_;
    const double gained =
        work / double(p_.num_ranks) + tokens * (double(rows) / double(capacity_));
    return gained / (micro.time() + p_.launch + tokens);
  }

  void build(const std::vector<int>& left, double time, const Variant& variant) {
    built_.clear(p_.num_ranks, p_.sizes.size());
    most_rows_.clear();
    for (const CpSize& s : p_.sizes) most_rows_.push_back(int64_t(double(s.limit) * variant.share));
    built_.left = left;
    shortest_ = left.back();
    fill(time, variant.base);
    while (built_.free && grow()) fill(time, variant.base);
  }

  void fill(double time, int base) {
    given_.swap(built_.left);
    std::vector<int>& left = built_.left;
    left.clear();
    const int size = int(given_.size());
    for (int at = 0; at < size;) {
      const int x = given_[at], k = opens(x, time, base);
      if (k >= 0) {
        open(x, k);
      } else if (!join(x, time)) {
        rooms();
        const int then = next_fit(at + 1, time, base);
        left.insert(left.end(), given_.begin() + at, given_.begin() + then);
        at = then;
        continue;
      }
      ++at;
    }
  }

  // The first sample from `at` on that fits: a shorter one fits wherever a longer one does.
  int next_fit(int at, double time, int base) const {
    const int size = int(given_.size());
    int end = at;  // search windows of doubling width, since it is mostly near
    for (int step = 1; end < size && !fits(given_[end], time, base); step *= 2) {
      at = end + 1;
      end = std::min(size, end + step);
    }
    return int(std::partition_point(given_.begin() + at, given_.begin() + end,
                                    [&](int x) { return !fits(x, time, base); }) -
               given_.begin());
  }

  // The smallest size of a new group for a sample, or -1.
  int opens(int x, double time, int base) const {
    while (base && p_.sizes[base].size > built_.free) --base;
    for (int k = base; k < int(p_.sizes.size()); ++k) {
      const CpSize& s = p_.sizes[k];
      if (s.size > built_.free) return -1;
      if (rows_[k][x] <= s.limit && s.fixed + cost_[k][x] <= time) return k;
    }
    return -1;
  }

  void open(int x, int k) {
    Group& group = built_.add(k);
    group.load = p_.sizes[k].fixed + cost_[k][x];
    group.rows = rows_[k][x];
    group.samples.push_back(x);
    built_.free -= p_.sizes[k].size;
    insert({group.load, group.index, group.rows}, k);
  }

  // A group without room for the shortest sample is left out.
  bool full(const Loaded& each, int k) const {
    return most_rows_[k] - each.rows < rows_[k][shortest_];
  }

  void insert(const Loaded& each, int k) {
    auto& of = built_.by_load[k];
    if (!full(each, k)) of.insert(std::lower_bound(of.begin(), of.end(), each), each);
  }

  void erase(const Loaded& each, int k) {
    auto& of = built_.by_load[k];
    if (!full(each, k)) of.erase(std::lower_bound(of.begin(), of.end(), each));
  }

  // Puts a sample into the group that is then the least loaded.
  bool join(int x, double time) {
    double after = 0.0;
    const Loaded* best = nullptr;
    for (size_t k = 0; k < built_.by_load.size(); ++k) {
      const double cost = cost_[k][x];
      const int64_t most = most_rows_[k] - rows_[k][x];
      for (const Loaded& each : built_.by_load[k]) {
        const double then = each.load + cost;
        if (then > time || (best && then > after)) break;
        if (each.rows > most) continue;
        if (!best || then < after || each < *best) after = then, best = &each;
        break;
      }
    }
    if (!best) return false;
    Group& group = built_.groups[best->index];
    group.load = after;
    group.rows += rows_[group.size][x];
    group.samples.push_back(x);
    auto& of = built_.by_load[group.size];
    const Loaded moved{after, group.index, group.rows};
    const auto from = of.begin() + (best - of.data());
    if (full(moved, group.size)) {
      of.erase(from);
      return true;
    }
    // those that are now less loaded move down
    const auto to = std::lower_bound(from + 1, of.end(), moved);
    std::move(from + 1, to, from);
    *(to - 1) = moved;
    return true;
  }

  void rooms() {
    rooms_.clear();
    for (size_t k = 0; k < built_.by_load.size(); ++k) {
      int64_t most = -1;
      for (const Loaded& each : built_.by_load[k]) {
        const int64_t room = most_rows_[k] - each.rows;
        if (room <= most) continue;
        rooms_.push_back({int(k), each.load, room});
        most = room;
      }
    }
  }

  bool fits(int x, double time, int base) const {
    if (built_.free && opens(x, time, base) >= 0) return true;
    for (const Room& room : rooms_)
      if (rows_[room.size][x] <= room.rows && room.load + cost_[room.size][x] <= time) return true;
    return false;
  }

  bool grow() {
    Group* slowest = nullptr;
    for (int g = 0; g < built_.count; ++g) {
      Group& group = built_.groups[g];
      if (group.size + 1 == int(p_.sizes.size()) || more(group) > built_.free) continue;
      if (!slowest || group.load > slowest->load) slowest = &group;
    }
    if (!slowest) return false;
    const int size = slowest->size + 1;
    const auto [seconds, rows] = load(size, slowest->samples);
    if (seconds >= slowest->load || rows > p_.sizes[size].limit) return false;
    erase({slowest->load, slowest->index, slowest->rows}, slowest->size);
    built_.free -= more(*slowest);
    slowest->size = size;
    slowest->load = seconds;
    slowest->rows = rows;
    insert({seconds, slowest->index, rows}, size);
    return true;
  }

  int64_t more(const Group& group) const {
    return p_.sizes[group.size + 1].size - p_.sizes[group.size].size;
  }

  std::pair<double, int64_t> load(int size, const std::vector<int>& samples) const {
    double seconds = samples.empty() ? 0.0 : p_.sizes[size].fixed;
    int64_t rows = 0;
    for (const int x : samples) {
      seconds += cost_[size][x];
      rows += rows_[size][x];
    }
    return {seconds, rows};
  }

  const CpProblem& p_;
  int count_;
  std::vector<int> order_;
  std::vector<std::vector<int64_t>> rows_;  // [size][position], padded
  std::vector<std::vector<double>> cost_;
  std::vector<int64_t> least_rows_;
  std::vector<double> work_;
  int64_t capacity_ = 0, fewest_ = 0;
  double mean_ = 0.0;
  // what is built now
  Microbatch built_;
  std::vector<int> given_;
  int shortest_ = 0;
  std::vector<int64_t> most_rows_;
  std::vector<Room> rooms_;
};

}  // namespace

CpPlan plan_dynamic_cp_cpu(const CpProblem& problem) { return Search(problem).best(); }

}  // namespace pyrl
