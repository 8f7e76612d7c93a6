// The only file that includes pybind11; no file includes torch. Tensors cross the boundary as
// addresses, so one binary serves every torch version. pyrl_ext/ops checks the arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "changed_words/api.hpp"
#include "common/dispatch.hpp"
#include "common/dtype.hpp"
#include "common/sources.hpp"
#include "expand_runs/api.hpp"
#include "expert_rows/api.hpp"
#include "gather_routes/api.hpp"
#include "gather_rows/api.hpp"
#include "latent_keys/api.hpp"
#include "plan_dynamic_cp/api.hpp"
#include "replay_probs/api.hpp"
#include "rms_norm/api.hpp"
#include "rotary/api.hpp"
#include "sum_rows/api.hpp"
#include "swiglu/api.hpp"
#include "token_logprob/api.hpp"

namespace py = pybind11;
using Address = uintptr_t;
using nogil = py::call_guard<py::gil_scoped_release>;
using py::arg;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_common(py::module_& m) {
  using pyrl::DType;
  py::enum_<DType>(m, "DType")
      .value("u8", DType::u8)
      .value("u16", DType::u16)
      .value("i16", DType::i16)
      .value("i32", DType::i32)
      .value("i64", DType::i64)
      .value("bf16", DType::bf16)
      .value("f16", DType::f16)
      .value("f32", DType::f32)
      .value("f64", DType::f64);
  m.def("has_isa", [](const std::string& isa) { return pyrl::has_isa(isa); }, arg("isa"));
  m.def("auto_isa", &pyrl::auto_isa);
}

void bind_changed_words(py::module_& m) {
  m.attr("WORDS_AT_ONCE") = pyrl::kWordsAtOnce;
  m.def(
      "changed_words_cpu",
      [](Address before, Address now, int64_t size, int64_t run, Address distances, Address values,
         int64_t room) {
        return pyrl::changed_words_cpu(at<const uint16_t>(before), at<const uint16_t>(now), size,
                                       run, at<uint16_t>(distances), at<uint16_t>(values), room);
      },
      py::kw_only(), arg("before"), arg("now"), arg("size"), arg("run"), arg("distances"),
      arg("values"), arg("room"), nogil());
}

void bind_expand_runs(py::module_& m) {
  m.def(
      "expand_runs_cpu",
      [](Address starts, Address lengths, int64_t num_runs, Address out, int64_t size,
         const std::string& isa, int threads) {
        pyrl::expand_runs_cpu(at<const int64_t>(starts), at<const int64_t>(lengths), num_runs,
                              at<int64_t>(out), size, isa.c_str(), threads);
      },
      arg("starts"), arg("lengths"), arg("num_runs"), arg("out"), arg("size"), arg("isa"),
      arg("threads"), nogil());
}

void bind_expert_rows(py::module_& m) {
  using Args = pyrl::ExpertRowsArgs;
  using Grad = pyrl::ExpertRowsGradArgs;
  py::class_<Args>(m, "ExpertRowsArgs")
      .def(py::init([](Address map, int64_t tokens, int64_t experts, int64_t top_k, Address probs, int word,
                       Address rows, Address starts, Address order, Address places, Address weights,
                       Address counts) {
             return Args{at<const uint8_t>(map), tokens,
                         experts,                top_k,
                         at<const void>(probs),  word,
                         at<int64_t>(rows),      at<int64_t>(starts),
                         at<int64_t>(order),     at<int64_t>(places),
                         at<void>(weights),      at<int32_t>(counts)};
           }),
           py::kw_only(), arg("map"), arg("tokens"), arg("experts"), arg("top_k"), arg("probs"), arg("word"),
           arg("rows"), arg("starts"), arg("order"), arg("places"), arg("weights"), arg("counts"));
  py::class_<Grad>(m, "ExpertRowsGradArgs")
      .def(py::init([](Address grad, int word, Address order, Address places, int64_t tokens,
                       int64_t experts, int64_t top_k, Address out) {
             return Grad{at<const void>(grad), word,    at<const int64_t>(order), at<const int64_t>(places),
                         tokens,               experts, top_k,                    at<void>(out)};
           }),
           py::kw_only(), arg("grad"), arg("word"), arg("order"), arg("places"), arg("tokens"),
           arg("experts"), arg("top_k"), arg("out"));
  m.def(
      "expert_rows_cpu",
      [](const Args& args, int threads) { pyrl::expert_rows_cpu(args, threads); }, arg("args"),
      arg("threads"), nogil());
  m.def(
      "expert_rows_grad_cpu",
      [](const Grad& args, int threads) { pyrl::expert_rows_grad_cpu(args, threads); }, arg("args"),
      arg("threads"), nogil());
  m.def("expert_rows_scratch", &pyrl::expert_rows_scratch, arg("tokens"), arg("experts"));
#ifdef PYRL_CUDA
  m.def(
      "expert_rows_cuda",
      [](const Args& args, Address scratch, Address stream) {
        pyrl::expert_rows_cuda(args, at<int32_t>(scratch), at<void>(stream));
      },
      arg("args"), arg("scratch"), arg("stream"), nogil());
  m.def(
      "expert_rows_grad_cuda",
      [](const Grad& args, Address stream) { pyrl::expert_rows_grad_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_gather_rows(py::module_& m) {
  using pyrl::Field;
  py::class_<Field>(m, "Field")
      .def(py::init([](Address src, int64_t stride, Address out, int64_t row_bytes, Address fill,
                       int64_t pattern) {
             return Field{at<const std::byte>(src),  stride,           at<std::byte>(out), row_bytes,
                          at<const std::byte>(fill), uint64_t(pattern)};
           }),
           py::kw_only(), arg("src"), arg("stride"), arg("out"), arg("row_bytes"), arg("fill") = 0,
           arg("pattern") = 0);
  m.def(
      "gather_rows_cpu",
      [](const std::vector<Field>& fields, int64_t num_src, Address rows, int64_t num_out,
         int threads) {
        return pyrl::gather_rows_cpu(fields.data(), int(fields.size()), num_src,
                                     at<const int64_t>(rows), num_out, threads);
      },
      arg("fields"), arg("num_src"), arg("rows"), arg("num_out"), arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "gather_rows_cuda",
      [](const std::vector<Field>& fields, Address rows, int64_t num_out, Address stream) {
        pyrl::gather_rows_cuda(fields.data(), int(fields.size()), at<const int64_t>(rows), num_out,
                               at<void>(stream));
      },
      arg("fields"), arg("rows"), arg("num_out"), arg("stream"), nogil());
#endif
}

void bind_gather_routes(py::module_& m) {
  using Args = pyrl::GatherRoutesArgs;
  py::class_<Args>(m, "GatherRoutesArgs")
      .def(py::init([](Address routes, pyrl::DType dtype, int64_t row_bytes, int64_t num_src,
                       int64_t num_slots, int64_t top_k, Address rows, int64_t num_out,
                       Address layers, int64_t num_layers, int64_t num_experts, Address out) {
             return Args{at<const void>(routes),
                         dtype,
                         row_bytes,
                         num_src,
                         num_slots,
                         top_k,
                         at<const int64_t>(rows),
                         num_out,
                         at<const int64_t>(layers),
                         num_layers,
                         num_experts,
                         at<void>(out)};
           }),
           py::kw_only(), arg("routes"), arg("dtype"), arg("row_bytes"), arg("num_src"),
           arg("num_slots"), arg("top_k"), arg("rows"), arg("num_out"), arg("layers"),
           arg("num_layers"), arg("num_experts"), arg("out"));
  m.def(
      "gather_routes_cpu",
      [](const Args& args, const std::string& isa, int threads) {
        pyrl::gather_routes_cpu(args, isa.c_str(), threads);
      },
      arg("args"), arg("isa"), arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "gather_routes_cuda",
      [](const Args& args, Address stream) { pyrl::gather_routes_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_plan_dynamic_cp(py::module_& m) {
  using pyrl::CpPlan;
  using pyrl::CpProblem;
  using pyrl::CpSize;
  py::class_<CpSize>(m, "CpSize")
      .def(py::init([](int64_t size, int64_t unit, int64_t limit, double fixed, double token,
                       double square) {
             return CpSize{size, unit, limit, fixed, token, square};
           }),
           arg("size"), arg("unit"), arg("limit"), arg("fixed"), arg("token"), arg("square"));
  using Numbers = std::vector<double>;
  py::class_<CpProblem>(m, "CpProblem")
      .def(py::init([](std::vector<int64_t> lengths, int64_t num_ranks, std::vector<CpSize> sizes,
                       double launch, int64_t multiple, Numbers times, Numbers slack,
                       Numbers weights, int64_t bases, int64_t most_steps) {
             return CpProblem{std::move(lengths), num_ranks,        std::move(sizes),
                              launch,             multiple,         std::move(times),
                              std::move(slack),   std::move(weights), bases,
                              most_steps};
           }),
           py::kw_only(), arg("lengths"), arg("num_ranks"), arg("sizes"), arg("launch"),
           arg("multiple"), arg("times"), arg("slack"), arg("weights"), arg("bases"),
           arg("most_steps"));
  py::class_<CpPlan>(m, "CpPlan")
      .def_readonly("numbers", &CpPlan::numbers)
      .def_readonly("makespan", &CpPlan::makespan)
      .def_readonly("lower_bound", &CpPlan::lower_bound);
  m.def("plan_dynamic_cp_cpu", &pyrl::plan_dynamic_cp_cpu, arg("problem"), nogil());
}

void bind_sum_rows(py::module_& m) {
  using Args = pyrl::SumRowsArgs;
  py::class_<Args>(m, "SumRowsArgs")
      .def(py::init([](Address src, pyrl::DType dtype, int64_t num_in, int64_t columns,
                       int64_t stride, Address starts, Address order, int64_t num_out,
                       Address out) {
             return Args{at<const void>(src),
                         dtype,
                         num_in,
                         columns,
                         stride,
                         at<const int64_t>(starts),
                         at<const int64_t>(order),
                         num_out,
                         at<void>(out)};
           }),
           py::kw_only(), arg("src"), arg("dtype"), arg("num_in"), arg("columns"), arg("stride"),
           arg("starts"), arg("order"), arg("num_out"), arg("out"));
  m.def(
      "sum_rows_cpu",
      [](const Args& args, const std::string& isa, int threads) {
        return pyrl::sum_rows_cpu(args, isa.c_str(), threads);
      },
      arg("args"), arg("isa"), arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "sum_rows_cuda",
      [](const Args& args, Address stream) { pyrl::sum_rows_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
  m.def(
      "invert_rows_cpu",
      [](Address rows, int64_t num_in, int64_t num_out, Address starts, Address order) {
        return pyrl::invert_rows_cpu(at<const int64_t>(rows), num_in, num_out,
                                     at<int64_t>(starts), at<int64_t>(order));
      },
      arg("rows"), arg("num_in"), arg("num_out"), arg("starts"), arg("order"), nogil());
}

void bind_rotary(py::module_& m) {
  using Part = pyrl::RotaryPart;
  using Args = pyrl::RotaryArgs;
  py::class_<Part>(m, "RotaryPart")
      .def(py::init([](Address src, int64_t row, int64_t head, int64_t heads, int64_t width, Address out) {
             return Part{at<const void>(src), row, head, heads, width, at<void>(out)};
           }),
           py::kw_only(), arg("src"), arg("row"), arg("head"), arg("heads"), arg("width"), arg("out"));
  py::class_<Args>(m, "RotaryArgs")
      .def(py::init([](const Part& query, const Part& key, pyrl::DType dtype, Address turns, int64_t rows,
                       int64_t turned, bool last, bool src_neighbours, bool out_neighbours, bool back) {
             return Args{{query, key}, dtype,          at<const void>(turns), rows, turned,
                         last,         src_neighbours, out_neighbours,        back};
           }),
           py::kw_only(), arg("query"), arg("key"), arg("dtype"), arg("turns"), arg("rows"),
           arg("turned"), arg("last"), arg("src_neighbours"), arg("out_neighbours"), arg("back"));
  m.def(
      "rotary_cpu",
      [](const Args& args, const std::string& isa, int threads) {
        pyrl::rotary_cpu(args, isa.c_str(), threads);
      },
      arg("args"), arg("isa"), arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "rotary_cuda",
      [](const Args& args, Address stream) { pyrl::rotary_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_latent_keys(py::module_& m) {
  using Args = pyrl::LatentKeysArgs;
  py::class_<Args>(m, "LatentKeysArgs")
      .def(py::init([](pyrl::DType dtype, int64_t rows, int64_t heads, int64_t plain, int64_t common,
                       int64_t rest, Address key, int64_t key_row, int64_t key_head, Address both,
                       int64_t both_row, int64_t both_head, Address shared, int64_t shared_row,
                       Address value, int64_t value_row, int64_t value_head, bool back) {
             return Args{dtype,    rows,      heads,     plain,      common,     rest,
                         at<void>(key),    key_row,   key_head,  at<void>(both),   both_row,   both_head,
                         at<void>(shared), shared_row, at<void>(value), value_row, value_head, back};
           }),
           py::kw_only(), arg("dtype"), arg("rows"), arg("heads"), arg("plain"), arg("common"),
           arg("rest"), arg("key"), arg("key_row"), arg("key_head"), arg("both"), arg("both_row"),
           arg("both_head"), arg("shared"), arg("shared_row"), arg("value"), arg("value_row"),
           arg("value_head"), arg("back"));
  m.def(
      "latent_keys_cpu",
      [](const Args& args, int threads) { pyrl::latent_keys_cpu(args, threads); }, arg("args"),
      arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "latent_keys_cuda",
      [](const Args& args, Address stream) { pyrl::latent_keys_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_replay_probs(py::module_& m) {
  using Args = pyrl::ReplayProbsArgs;
  using pyrl::DType;
  using pyrl::Norm;
  py::enum_<Norm>(m, "Norm")
      .value("none", Norm::none)
      .value("sum", Norm::sum)
      .value("softmax", Norm::softmax);
  py::class_<Args>(m, "ReplayProbsArgs")
      .def(py::init([](Address scores, DType scores_dtype, Address ids, DType ids_dtype,
                       int64_t rows, int64_t experts, int64_t top_k, Norm norm, double scale,
                       Address grad, DType grad_dtype, Address out, DType out_dtype,
                       Address map) {
             return Args{at<const void>(scores),
                         scores_dtype,
                         at<const void>(ids),
                         ids_dtype,
                         rows,
                         experts,
                         top_k,
                         norm,
                         scale,
                         at<const void>(grad),
                         grad_dtype,
                         at<void>(out),
                         out_dtype,
                         at<uint8_t>(map)};
           }),
           py::kw_only(), arg("scores"), arg("scores_dtype"), arg("ids"), arg("ids_dtype"),
           arg("rows"), arg("experts"), arg("top_k"), arg("norm"), arg("scale"), arg("grad"),
           arg("grad_dtype"), arg("out"), arg("out_dtype"), arg("map"));
  m.def(
      "replay_probs_cpu",
      [](const Args& args, int threads) { pyrl::replay_probs_cpu(args, threads); }, arg("args"),
      arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "replay_probs_cuda",
      [](const Args& args, Address stream) { pyrl::replay_probs_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_rms_norm(py::module_& m) {
  using Args = pyrl::RmsNormArgs;
  py::class_<Args>(m, "RmsNormArgs")
      .def(py::init([](Address src, pyrl::DType dtype, int64_t rows, int64_t heads, int64_t row,
                       int64_t head, int64_t width, Address weight, float eps, Address scale,
                       Address grad, Address residual_grad, Address out, Address weight_grad,
                       Address parts) {
             return Args{at<const void>(src), dtype,
                         rows,                heads,
                         row,                 head,
                         width,               at<const void>(weight),
                         eps,                 at<float>(scale),
                         at<const void>(grad), at<const void>(residual_grad),
                         at<void>(out),       at<void>(weight_grad),
                         at<float>(parts)};
           }),
           py::kw_only(), arg("src"), arg("dtype"), arg("rows"), arg("heads"), arg("row"),
           arg("head"), arg("width"), arg("weight"), arg("eps"), arg("scale"), arg("grad"),
           arg("residual_grad"), arg("out"), arg("weight_grad"), arg("parts"));
  m.def("rms_norm_scratch", &pyrl::rms_norm_scratch, arg("rows"), arg("width"));
  m.def(
      "rms_norm_cpu",
      [](const Args& args, const std::string& isa, int threads) {
        pyrl::rms_norm_cpu(args, isa.c_str(), threads);
      },
      arg("args"), arg("isa"), arg("threads"), nogil());
}

void bind_swiglu(py::module_& m) {
  using Args = pyrl::SwigluArgs;
  py::class_<Args>(m, "SwigluArgs")
      .def(py::init([](Address gate_up, pyrl::DType dtype, int64_t rows, int64_t width,
                       Address weight, Address grad, Address out, Address weight_grad) {
             return Args{at<const void>(gate_up), dtype,         rows,
                         width,                   at<const float>(weight), at<const void>(grad),
                         at<void>(out),           at<float>(weight_grad)};
           }),
           py::kw_only(), arg("gate_up"), arg("dtype"), arg("rows"), arg("width"), arg("weight"),
           arg("grad"), arg("out"), arg("weight_grad"));
  m.def(
      "swiglu_cpu",
      [](const Args& args, const std::string& isa, int threads) {
        pyrl::swiglu_cpu(args, isa.c_str(), threads);
      },
      arg("args"), arg("isa"), arg("threads"), nogil());
#ifdef PYRL_CUDA
  m.def(
      "swiglu_cuda",
      [](const Args& args, Address stream) { pyrl::swiglu_cuda(args, at<void>(stream)); },
      arg("args"), arg("stream"), nogil());
#endif
}

void bind_token_logprob(py::module_& m) {
  using pyrl::LogitsShard;
  using pyrl::RowGrad;
  py::class_<LogitsShard>(m, "LogitsShard")
      .def(py::init([](Address logits, pyrl::DType dtype, int64_t tokens, int64_t columns,
                       int64_t width, Address targets, int64_t first, Address scale,
                       Address keep) {
             return LogitsShard{at<const void>(logits),
                                dtype,
                                tokens,
                                columns,
                                width,
                                at<const int64_t>(targets),
                                first,
                                at<const float>(scale),
                                at<const uint8_t>(keep)};
           }),
           py::kw_only(), arg("logits"), arg("dtype"), arg("tokens"), arg("columns"), arg("width"),
           arg("targets"), arg("first"), arg("scale"), arg("keep"));
  py::class_<RowGrad>(m, "RowGrad")
      .def(py::init([](Address max, Address log_sum, Address entropy, Address grad_logprob,
                       Address grad_entropy) {
             return RowGrad{at<const float>(max), at<const float>(log_sum),
                            at<const float>(entropy), at<const float>(grad_logprob),
                            at<const float>(grad_entropy)};
           }),
           py::kw_only(), arg("max"), arg("log_sum"), arg("entropy"), arg("grad_logprob"),
           arg("grad_entropy"));
  py::class_<pyrl::TokenRows>(m, "TokenRows")
      .def(py::init([](Address logprob, Address entropy, Address max, Address log_sum) {
             return pyrl::TokenRows{at<float>(logprob), at<float>(entropy), at<float>(max),
                                    at<float>(log_sum)};
           }),
           arg("logprob"), arg("entropy"), arg("max"), arg("log_sum"));
  py::class_<pyrl::StatsOut>(m, "StatsOut")
      .def(py::init([](Address stats) { return pyrl::StatsOut{at<float>(stats), {}}; }),
           arg("stats"))
      .def(py::init([](const pyrl::TokenRows& rows) { return pyrl::StatsOut{nullptr, rows}; }),
           arg("rows"));
  py::class_<pyrl::ShardStats>(m, "ShardStats")
      .def(py::init([](Address stats, int shards, int64_t tokens, Address targets, Address scale,
                       int64_t valid_vocab) {
             return pyrl::ShardStats{at<const float>(stats),   shards,
                                     tokens,                   at<const int64_t>(targets),
                                     at<const float>(scale),   valid_vocab};
           }),
           py::kw_only(), arg("stats"), arg("shards"), arg("tokens"), arg("targets"), arg("scale"),
           arg("valid_vocab"));
  m.def(
      "token_logprob_stats_cpu",
      [](const LogitsShard& shard, Address stats, const std::string& isa, int threads) {
        pyrl::token_logprob_stats_cpu(shard, at<float>(stats), isa.c_str(), threads);
      },
      arg("shard"), arg("stats"), arg("isa"), arg("threads"), nogil());
  m.def(
      "token_logprob_grad_cpu",
      [](const LogitsShard& shard, const RowGrad& row, Address out, const std::string& isa,
         int threads) {
        pyrl::token_logprob_grad_cpu(shard, row, at<void>(out), isa.c_str(), threads);
      },
      arg("shard"), arg("row"), arg("out"), arg("isa"), arg("threads"), nogil());
  m.def("token_logprob_scratch", &pyrl::token_logprob_scratch, arg("tokens"), arg("width"));
#ifdef PYRL_CUDA
  m.def(
      "token_logprob_stats_cuda",
      [](const LogitsShard& shard, const pyrl::StatsOut& out, Address scratch, Address stream) {
        pyrl::token_logprob_stats_cuda(shard, out, at<float>(scratch), at<void>(stream));
      },
      arg("shard"), arg("out"), arg("scratch"), arg("stream"), nogil());
  m.def(
      "token_logprob_combine_cuda",
      [](const pyrl::ShardStats& shards, const pyrl::TokenRows& rows, Address stream) {
        pyrl::token_logprob_combine_cuda(shards, rows, at<void>(stream));
      },
      arg("shards"), arg("rows"), arg("stream"), nogil());
  m.def(
      "token_logprob_grad_cuda",
      [](const LogitsShard& shard, const RowGrad& row, Address out, pyrl::DType dtype,
         Address stream) {
        pyrl::token_logprob_grad_cuda(shard, row, at<void>(out), dtype, at<void>(stream));
      },
      arg("shard"), arg("row"), arg("out"), arg("dtype"), arg("stream"), nogil());
#endif
}

#ifdef PYRL_TESTS  // the grids of the CUDA kernels, walked on the host
void bind_emulation(py::module_& m) {
  m.def(
      "gather_rows_emulated",
      [](const std::vector<pyrl::Field>& fields, Address rows, int64_t num_out) {
        pyrl::gather_rows_emulated(fields.data(), int(fields.size()), at<const int64_t>(rows),
                                   num_out);
      },
      arg("fields"), arg("rows"), arg("num_out"));
  m.def(
      "expert_rows_emulated",
      [](const pyrl::ExpertRowsArgs& args, Address scratch) {
        pyrl::expert_rows_emulated(args, at<int32_t>(scratch));
      },
      arg("args"), arg("scratch"));
  m.def("expert_rows_grad_emulated", &pyrl::expert_rows_grad_emulated, arg("args"));
  m.def("gather_routes_emulated", &pyrl::gather_routes_emulated, arg("args"));
  m.def("sum_rows_emulated", &pyrl::sum_rows_emulated, arg("args"));
  m.def("swiglu_emulated", &pyrl::swiglu_emulated, arg("args"));
  m.def("rotary_emulated", &pyrl::rotary_emulated, arg("args"));
  m.def("latent_keys_emulated", &pyrl::latent_keys_emulated, arg("args"));
  m.def("replay_probs_emulated", &pyrl::replay_probs_emulated, arg("args"), arg("first"));
  m.def(
      "token_logprob_stats_emulated",
      [](const pyrl::LogitsShard& shard, const pyrl::StatsOut& out, Address scratch) {
        pyrl::token_logprob_stats_emulated(shard, out, at<float>(scratch));
      },
      arg("shard"), arg("out"), arg("scratch"));
  m.def("token_logprob_combine_emulated", &pyrl::token_logprob_combine_emulated, arg("shards"),
        arg("rows"));
  m.def(
      "token_logprob_grad_emulated",
      [](const pyrl::LogitsShard& shard, const pyrl::RowGrad& row, Address out, pyrl::DType dtype) {
        pyrl::token_logprob_grad_emulated(shard, row, at<void>(out), dtype);
      },
      arg("shard"), arg("row"), arg("out"), arg("dtype"));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("sources") = pyrl::sources;
  bind_common(m);
  bind_changed_words(m);
  bind_expand_runs(m);
  bind_expert_rows(m);
  bind_gather_rows(m);
  bind_gather_routes(m);
  bind_plan_dynamic_cp(m);
  bind_sum_rows(m);
  bind_rms_norm(m);
  bind_rotary(m);
  bind_latent_keys(m);
  bind_replay_probs(m);
  bind_swiglu(m);
  bind_token_logprob(m);
#ifdef PYRL_TESTS
  bind_emulation(m);
#endif
}
