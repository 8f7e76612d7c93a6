// The only file that includes pybind11; no file includes torch. Tensors cross the boundary as
// addresses, so one binary serves every torch version. Arguments are checked in pyrl_ext/ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "expand_runs.hpp"
#include "gather_routes.hpp"
#include "gather_rows.hpp"
#include "isa.hpp"
#include "sum_rows.hpp"
#include "replay_probs.hpp"
#include "token_logprob.hpp"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_expand_runs(py::module_& m) {
  m.def("expand_runs_cpu", [](Address starts, Address lengths, int64_t num_runs, Address out,
                              int64_t size, const std::string& isa, int threads) {
    py::gil_scoped_release nogil;
    pyrl::expand_runs_cpu(at<const int64_t>(starts), at<const int64_t>(lengths), num_runs,
                          at<int64_t>(out), size, isa.c_str(), threads);
  });
}

// Fields cross as rows of integers: src, stride, out, row_bytes, fill, pattern.
std::vector<pyrl::Field> fields_of(const std::vector<std::array<int64_t, 6>>& rows) {
  std::vector<pyrl::Field> fields;
  for (const auto& [src, stride, out, row_bytes, fill, pattern] : rows)
    fields.push_back({at<const std::byte>(src), stride, at<std::byte>(out), row_bytes,
                      at<const std::byte>(fill), uint64_t(pattern)});
  return fields;
}

void bind_gather_rows(py::module_& m) {
  using Rows = std::vector<std::array<int64_t, 6>>;
  m.def("gather_rows_cpu", [](const Rows& table, int64_t num_src, Address rows, int64_t num_out,
                              int threads) {
    const auto fields = fields_of(table);
    py::gil_scoped_release nogil;
    return pyrl::gather_rows_cpu(fields.data(), int(fields.size()), num_src,
                                 at<const int64_t>(rows), num_out, threads);
  });
  m.def("gather_rows_emulated", [](const Rows& table, Address rows, int64_t num_out) {
    const auto fields = fields_of(table);
    pyrl::gather_rows_emulated(fields.data(), int(fields.size()), at<const int64_t>(rows), num_out);
  });
#ifdef PYRL_CUDA
  m.def("gather_rows_cuda", [](const Rows& table, Address rows, int64_t num_out, Address stream) {
    const auto fields = fields_of(table);
    py::gil_scoped_release nogil;
    pyrl::gather_rows_cuda(fields.data(), int(fields.size()), at<const int64_t>(rows), num_out,
                           at<void>(stream));
  });
#endif
}

void bind_gather_routes(py::module_& m) {
  using pyrl::Routes;
  py::class_<Routes>(m, "Routes")
      .def(py::init([](Address routes, int in, int64_t row_bytes, int64_t num_src,
                       int64_t num_slots, int64_t top_k, Address rows, int64_t num_out,
                       Address layers, int64_t num_layers, int64_t num_experts, Address out,
                       int to) {
        return Routes{at<const void>(routes), pyrl::Int(in), row_bytes, num_src, num_slots, top_k,
                      at<const int64_t>(rows), num_out, at<const int64_t>(layers), num_layers,
                      num_experts, at<void>(out), pyrl::Int(to)};
      }));
  m.def("gather_routes_cpu", [](const Routes& routes, const std::string& isa, int threads) {
    py::gil_scoped_release nogil;
    pyrl::gather_routes_cpu(routes, isa.c_str(), threads);
  });
  m.def("gather_routes_emulated", [](const Routes& routes) {
    py::gil_scoped_release nogil;
    pyrl::gather_routes_emulated(routes);
  });
#ifdef PYRL_CUDA
  m.def("gather_routes_cuda", [](const Routes& routes, Address stream) {
    py::gil_scoped_release nogil;
    pyrl::gather_routes_cuda(routes, at<void>(stream));
  });
#endif
}

void bind_sum_rows(py::module_& m) {
  using pyrl::Sum;
  py::class_<Sum>(m, "Sum").def(
      py::init([](Address src, int type, int64_t num_in, int64_t columns, int64_t stride,
                  Address starts, Address order, int64_t num_out, Address out) {
        return Sum{at<const void>(src),       pyrl::Number(type),       num_in,  columns, stride,
                   at<const int64_t>(starts), at<const int64_t>(order), num_out, at<void>(out)};
      }));
  m.def("sum_rows_cpu", [](const Sum& sum, const std::string& isa, int threads) {
    py::gil_scoped_release nogil;
    return pyrl::sum_rows_cpu(sum, isa.c_str(), threads);
  });
  m.def("sum_rows_emulated", [](const Sum& sum) { pyrl::sum_rows_emulated(sum); });
#ifdef PYRL_CUDA
  m.def("sum_rows_cuda", [](const Sum& sum, Address stream) {
    py::gil_scoped_release nogil;
    pyrl::sum_rows_cuda(sum, at<void>(stream));
  });
#endif
  m.def("invert_rows_cpu", [](Address rows, int64_t num_in, int64_t num_out, Address starts,
                              Address order) {
    py::gil_scoped_release nogil;
    return pyrl::invert_rows_cpu(at<const int64_t>(rows), num_in, num_out, at<int64_t>(starts),
                                 at<int64_t>(order));
  });
}

void bind_replay_probs(py::module_& m) {
  using pyrl::Replay;
  py::class_<Replay>(m, "Replay")
      .def(py::init([](Address scores, int in, Address ids, int id, int64_t rows, int64_t experts,
                       int64_t top_k, int norm, double scale, Address grad, int from, Address out,
                       int to, Address map) {
        return Replay{at<const void>(scores), pyrl::Real(in),
                      at<const void>(ids),    pyrl::Int(id),
                      rows,                   experts,
                      top_k,                  pyrl::Norm(norm),
                      scale,                  at<const void>(grad),
                      pyrl::Real(from),       at<void>(out),
                      pyrl::Real(to),         at<uint8_t>(map)};
      }));
  m.def("replay_probs_cpu", [](const Replay& replay, int threads) {
    py::gil_scoped_release nogil;
    pyrl::replay_probs_cpu(replay, threads);
  });
  m.def("replay_probs_emulated", [](const Replay& replay, int64_t first) {
    py::gil_scoped_release nogil;
    pyrl::replay_probs_emulated(replay, first);
  });
#ifdef PYRL_CUDA
  m.def("replay_probs_cuda", [](const Replay& replay, Address stream) {
    py::gil_scoped_release nogil;
    pyrl::replay_probs_cuda(replay, at<void>(stream));
  });
#endif
}

void bind_token_logprob(py::module_& m) {
  using pyrl::Shard;
  py::class_<Shard>(m, "Shard")
      .def(py::init([](Address logits, int dtype, int64_t tokens, int64_t columns, int64_t width,
                       Address targets, int64_t first, Address scale, Address keep) {
        return Shard{at<const void>(logits),      pyrl::Float(dtype),
                     tokens,                      columns,
                     width,                       at<const int64_t>(targets),
                     first,                       at<const float>(scale),
                     at<const uint8_t>(keep)};
      }));
  using pyrl::RowGrad;
  py::class_<RowGrad>(m, "RowGrad")
      .def(py::init([](Address max, Address log_sum, Address entropy, Address grad_logprob,
                       Address grad_entropy) {
        return RowGrad{at<const float>(max), at<const float>(log_sum), at<const float>(entropy),
                       at<const float>(grad_logprob), at<const float>(grad_entropy)};
      }));
  m.def("token_logprob_stats_cpu",
        [](const Shard& shard, Address stats, const std::string& isa, int threads) {
          py::gil_scoped_release nogil;
          pyrl::token_logprob_stats_cpu(shard, at<float>(stats), isa.c_str(), threads);
        });
  m.def("token_logprob_grad_cpu", [](const Shard& shard, const RowGrad& row, Address out,
                                     const std::string& isa, int threads) {
    py::gil_scoped_release nogil;
    pyrl::token_logprob_grad_cpu(shard, row, at<void>(out), isa.c_str(), threads);
  });
  m.def("token_logprob_scratch", &pyrl::token_logprob_scratch);
  m.def("token_logprob_stats_emulated", [](const Shard& shard, Address stats, Address scratch) {
    pyrl::token_logprob_stats_emulated(shard, at<float>(stats), at<float>(scratch));
  });
  m.def("token_logprob_grad_emulated", [](const Shard& shard, const RowGrad& row, Address out) {
    pyrl::token_logprob_grad_emulated(shard, row, at<void>(out));
  });
#ifdef PYRL_CUDA
  m.def("token_logprob_stats_cuda",
        [](const Shard& shard, Address stats, Address scratch, Address stream) {
          py::gil_scoped_release nogil;
          pyrl::token_logprob_stats_cuda(shard, at<float>(stats), at<float>(scratch),
                                         at<void>(stream));
        });
  m.def("token_logprob_grad_cuda",
        [](const Shard& shard, const RowGrad& row, Address out, Address stream) {
          py::gil_scoped_release nogil;
          pyrl::token_logprob_grad_cuda(shard, row, at<void>(out), at<void>(stream));
        });
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("has_isa", [](const std::string& isa) { return pyrl::has_isa(isa); });
  bind_expand_runs(m);
  bind_gather_rows(m);
  bind_gather_routes(m);
  bind_sum_rows(m);
  bind_replay_probs(m);
  bind_token_logprob(m);
}
