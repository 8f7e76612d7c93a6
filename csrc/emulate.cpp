// The grids of the CUDA kernels walked on the host, block after block and thread after thread: their
// index arithmetic is tested on machines without a GPU. Built only with -DPYRL_TESTS=ON.
#include <memory>
#include <vector>

#include "expert_rows/gpu_thread.hpp"
#include "gather_routes/gpu_thread.hpp"
#include "gather_rows/gpu_thread.hpp"
#include "latent_keys/gpu_thread.hpp"
#include "replay_probs/gpu_thread.hpp"
#include "rotary/gpu_thread.hpp"
#include "sum_rows/gpu_thread.hpp"
#include "swiglu/gpu_thread.hpp"
#include "token_logprob/gpu_thread.hpp"

namespace pyrl {

void expert_rows_emulated(const ExpertRowsArgs& args, int32_t* scratch) {
  using namespace expert_rows;
  std::vector<int64_t> memory(Tile::bytes(args) / 8);
  const Tile shared(args, memory.data());
  const int64_t tiles = num_tiles(args.tokens);
  int64_t tile = 0;
  const auto phase = [&](const auto& run) { each_thread(tile, tiles, kThreads, run); };
  for (; tile < tiles; ++tile) {
    phase([&](const ThreadIndex& at) { tile_bits(args, tile, shared, at); });
    phase([&](const ThreadIndex& at) { tile_counts(args, tile, shared, scratch, at); });
  }
  for (tile = 0; tile < tiles; ++tile) {
    phase([&](const ThreadIndex& at) {
      tile_bits(args, tile, shared, at);
      tile_sums(args, tile, shared, scratch, at);
    });
    phase([&](const ThreadIndex& at) { tile_totals(args, tile, shared, at); });
    phase([&](const ThreadIndex& at) { tile_firsts(args, shared, at); });
    phase([&](const ThreadIndex& at) { tile_order(args, tile, shared, at); });
    with_word(args.word, [&](auto word) {
      phase([&](const ThreadIndex& at) { tile_rows<decltype(word)>(args, tile, shared, at); });
    });
  }
}

void expert_rows_grad_emulated(const ExpertRowsGradArgs& args) {
  using namespace expert_rows;
  with_word(args.word, [&](auto word) {
    using Word = decltype(word);
    for (int64_t tile = 0, tiles = num_grad_tiles(args); tile < tiles; ++tile) {
      each_thread(tile, tiles, kThreads, [&](ThreadIndex at) { grad_zeros<Word>(args, tile, at); });
      each_thread(tile, tiles, kThreads, [&](ThreadIndex at) { grad_places<Word>(args, tile, at); });
    }
  });
}

void gather_rows_emulated(const Field* fields, int count, const int64_t* rows, int64_t num_out) {
  each_gather(fields, count, rows, num_out, [](const Gather& g) {
    for (int64_t block = 0; block < g.blocks; ++block)
      each_thread(block, g.blocks, kGatherThreads, [&](ThreadIndex at) { gather_thread(g, at); });
  });
}

void gather_routes_emulated(const GatherRoutesArgs& args) {
  routes_launches(args, [](const RoutesTask& task, auto element) {
    for (int64_t block = 0, blocks = task.blocks(); block < blocks; ++block) {
      RoutesShared shared;
      const auto phase = [&](const auto& run) {
        each_thread(block, blocks, kRoutesThreads,
                    [&](const ThreadIndex& at) { run(task, at, shared); });
      };
      phase(routes_index);
      phase(routes_load_words<decltype(element)>);
      phase(routes_write_units<decltype(element)>);
    }
  });
}

void sum_rows_emulated(const SumRowsArgs& args) {
  const SumGrid g = plan_sum(args);
  const auto thread = args.dtype == DType::f32    ? sum_thread<F32>
                      : args.dtype == DType::bf16 ? sum_thread<BF16>
                      : args.dtype == DType::f16  ? sum_thread<F16>
                                                  : sum_thread<F64>;
  const auto shared = std::make_unique<SumShared>();
  for (int64_t block = 0; block < g.blocks; ++block) {
    const auto phase = [&](const auto& run) {
      each_thread(block, g.blocks, kSumThreads, [&](ThreadIndex at) { run(g, at, *shared); });
    };
    phase(sum_starts);
    phase(sum_firsts);
    phase(thread);
  }
}

void latent_keys_emulated(const LatentKeysArgs& args) {
  const KeysGrid g = plan_keys(args);
  const auto thread = args.dtype == DType::f32    ? keys_thread<F32>
                      : args.dtype == DType::bf16 ? keys_thread<BF16>
                      : args.dtype == DType::f16  ? keys_thread<F16>
                                                  : keys_thread<F64>;
  for (int64_t block = 0; block < g.blocks; ++block)
    each_thread(block, g.blocks, kKeysThreads, [&](ThreadIndex at) { thread(g, at); });
}

namespace {

struct RotaryWalk {
  const RotaryGrid& g;

  template <class T, bool From, bool To>
  void run() const {
    for (int64_t block = 0; block < g.blocks; ++block)
      each_thread(block, g.blocks, kRotaryThreads,
                  [&](ThreadIndex at) { rotary_thread<T, From, To>(g, at); });
  }
};

}  // namespace

void rotary_emulated(const RotaryArgs& args) { with_rotary(args, RotaryWalk{plan_rotary(args)}); }

namespace {

struct ReplayWalk {
  const ReplayProbsArgs& r;
  int64_t first;

  template <class A, class Word>
  void run() const {
    using namespace replay_probs;
    using Values = WarpValues<A>;
    const Warps w(r, sizeof(Word));
    std::vector<Vector> stage(w.stage_bytes() / sizeof(Vector) + 1);
    for (int64_t warp = first / w.rows; warp < w.count; ++warp) {
      std::vector<Lane<A, Word>> lanes;
      for (int lane = 0; lane < kWarp; ++lane) lanes.emplace_back(r, w, warp, lane, stage.data());
      for (int lane = 0; lane < kWarp; ++lane) clear_rows(r, lanes[lane], lane);
      for (auto& lane : lanes) lane.load(r);
      const Values value = Values::of([&](int i) { return lanes[i].value; });
      const Values grad = Values::of([&](int i) { return lanes[i].grad; });
      const Values result = r.grad ? grads_of(r, value, grad, w.width) : probs_of(r, value, w.width);
      for (int lane = 0; lane < kWarp; ++lane) lanes[lane].store(r, result.lane[lane]);
      for (int lane = 0; lane < kWarp; ++lane) copy_rows(r, w, lanes[lane], lane);
    }
  }
};

}  // namespace

void replay_probs_emulated(const ReplayProbsArgs& args, int64_t first) {
  replay_probs::with_types(args, ReplayWalk{args, first});
}

void swiglu_emulated(const SwigluArgs& args) {
  const SwigluGrid g = plan_swiglu(args);
  const int lanes = 1 << g.lanes;
  float sums[kSwigluThreads];
  swiglu_types(g, [&](auto type, auto wide) {
    using T = decltype(type);
    constexpr bool kWide = decltype(wide)::value;
    for (int64_t block = 0; block < g.blocks; ++block) {
      const auto phase = [&](const auto& run) {
        each_thread(block, g.blocks, kSwigluThreads, run);
      };
      if (!args.grad) {
        phase([&](const ThreadIndex& at) { swiglu_forward<T, kWide>(g, at); });
        continue;
      }
      phase([&](const ThreadIndex& at) { sums[at.thread] = swiglu_grad<T, kWide>(g, at); });
      for (int half = lanes >> 1; half > 0; half /= 2)
        phase([&](const ThreadIndex& at) {
          if (at.thread % lanes < half) sums[at.thread] += sums[at.thread + half];
        });
      phase([&](const ThreadIndex& at) {
        const SwigluLane own(g, at);
        if (args.weight_grad && own.lane == 0 && own.row < args.rows)
          args.weight_grad[own.row] = sums[at.thread];
      });
    }
  });
}

namespace token_logprob {

template <class T, bool Masked>
void stats_rows(const LogitsShard& shard, const StatsOut& out, State* parts) {
  const int64_t count = num_parts(shard.width), blocks = shard.tokens * count;
  std::vector<State> states(kThreads), warps(kLanes);
  for (int64_t block = 0; block < blocks; ++block) {
    each_thread(block, blocks, kThreads, [&](const ThreadIndex& at) {
      states[at.thread] = thread_state<T, Masked>(shard, at);
    });
    const float rate = shard.scale[block / count] * kLog2e;
    for (int lane = 0; lane < kLanes; ++lane)
      warps[lane] = lane < kThreads / kLanes ? join_lanes(&states[lane * kLanes], rate)
                                             : State{-INFINITY, 0, 0};
    const State state = join_lanes(warps.data(), rate);
    if (count == 1)
      finish(shard, state, chosen_of<T>(shard, block, shard.targets[block]), out, block);
    else
      parts[block] = state;
  }
  for (int64_t t = 0; t < shard.tokens && count > 1; ++t) finish_parts<T>(shard, parts, out, t);
}

template <class T, class O, bool Masked>
void grad_rows(const LogitsShard& shard, const RowGrad& row, void* out) {
  const int64_t blocks = shard.tokens * num_parts(shard.columns);
  for (int64_t block = 0; block < blocks; ++block)
    each_thread(block, blocks, kThreads,
                [&](const ThreadIndex& at) { thread_grad<T, O, Masked>(shard, row, out, at); });
}

}  // namespace token_logprob

void token_logprob_stats_emulated(const LogitsShard& shard, const StatsOut& out, float* scratch) {
  using namespace token_logprob;
  dispatch(shard, [&](auto type, auto masked) {
    stats_rows<decltype(type), masked>(shard, out, reinterpret_cast<State*>(scratch));
  });
}

void token_logprob_combine_emulated(const ShardStats& shards, const TokenRows& rows) {
  for (int64_t t = 0; t < shards.tokens; ++t) token_logprob::combine(shards, rows, t);
}

void token_logprob_grad_emulated(const LogitsShard& shard, const RowGrad& row, void* out, DType dtype) {
  token_logprob::dispatch(shard, dtype, [&](auto type, auto to, auto masked) {
    token_logprob::grad_rows<decltype(type), decltype(to), masked>(shard, row, out);
  });
}

}  // namespace pyrl
