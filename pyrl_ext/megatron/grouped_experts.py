"""Routed experts whose weights are stacked: a layer's products are one grouped product each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pyrl_ext.loss.fused_head import stand_in
from pyrl_ext.ops import squared, squared_relu, swiglu
from pyrl_ext.ops.tensors import to_device

# (True if gated, the function in megatron's config) -> the operator of a unit
UNITS: Any = {(True, F.silu): swiglu, (False, squared): squared_relu}


class GroupedExperts(MegatronModule):
    """``y = (silu(x G^T) * (x U^T) * p) D^T`` with gate G, up U and down D of each row's expert, or
    ``y = (relu(x U^T)^2 * p) D^T`` of experts without gates.

    megatron's ``SequentialMLP`` runs the experts of a rank one after the other; this runs them in
    two grouped products, with one parameter for all gates and ups and one for all downs. Both save
    the same checkpoints.

    Args:
        num_local_experts: E, the experts of this rank.
        config: megatron's.
        pg_collection: groups of expert and of expert-tensor parallelism.

    Attributes:
        linear_fc1: [E, 2 * width, hidden], gates above ups, or [E, width, hidden] without gates;
            width is the rank's part.
        linear_fc2: [E, hidden, width].
        adapters: of either weight, by its name.

    Raises: ValueError for rows of the weights that are no multiples of 16 bytes, as ``grouped_mm``
        needs them.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, name: str | None = None
    ):
        super().__init__(config=config)
        gated = config.gated_linear_unit
        self.unit = UNITS[gated, config.activation_func]
        self.inner = 1 + gated
        self.recomputes_unit = "moe_act" in (config.recompute_modules or ())
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        hidden = config.hidden_size
        unit = 16 // config.params_dtype.itemsize
        if width % unit or hidden % unit:
            raise ValueError(
                f"GroupedExperts: hidden {hidden}, width {width}, expected multiples of {unit} in "
                f"{config.params_dtype}"
            )
        self.linear_fc1 = self._weight(num_local_experts, self.inner * width, hidden, split=1)
        self.linear_fc2 = self._weight(num_local_experts, hidden, width, split=2)
        self.adapters = nn.ModuleDict()

    def _weight(self, *shape: int, split: int) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            init: Any = config.init_method
            init(weight)
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=split, stride=1)
        # True if its gradient is reduced over the ranks of dense weights
        weight.allreduce = (  # type: ignore[attr-defined]
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        return weight

    def forward(self, rows: Tensor, rows_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The experts' outputs.

        Args:
            rows: [N, hidden], expert by expert.
            rows_per_expert: [E] integers, on the host or the device.
            probs: [N], weight of each row's output.

        Returns: [N, hidden], this rank's part of a sum over expert-tensor-parallel ranks; no bias.
        """
        ends = rows_per_expert.cumsum(0, dtype=torch.int32)
        ends = ends if ends.device == rows.device else to_device(ends, rows.device)
        joined = self._product("linear_fc1", rows, ends)
        if self.recomputes_unit:  # no adapter reads what enters the second product: a rule
            out: Tensor = _UnitLinear.apply(  # type: ignore[assignment]
                self.unit, joined, probs.float(), self.linear_fc2, ends
            )
            return out, None
        return self._product("linear_fc2", self.unit(joined, probs.float()), ends), None

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        out = grouped_linear(rows, getattr(self, name), ends)
        if name not in self.adapters:
            return out
        adapter: Any = self.adapters[name]
        return adapter.add_to(out, rows, ends=ends)

    def backward_dw(self) -> None:
        """Nothing: `forward`'s gradient has the weights' too."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Both weights under the names, and as parts of the tensors, of ``SequentialMLP``."""
        axes = len(sharded_offsets)
        replica = (0, 0, self.dp_group.rank())
        (ep, ep_rank), (tp, tp_rank) = (
            (g.size(), g.rank()) for g in (self.ep_group, self.tp_group)
        )
        experts = *sharded_offsets, (axes, ep_rank, ep)

        def part(key: str, data: Tensor, dim: int, place: int, count: int) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key,
                data,
                *experts,
                (axes + dim, place, count),
                replica_id=replica,
                prepend_axis_num=axes,
            )

        def split(key: str, data: Tensor, *_: Any) -> Any:  # a list, as megatron's own for SwiGLU
            parts = enumerate(data.chunk(self.inner, 1))
            return [part(key, x, 1, tp_rank + n * tp, self.inner * tp) for n, x in parts]

        fc1, fc2 = (f"{prefix}experts.{name}.weight" for name in ("linear_fc1", "linear_fc2"))
        join: Any = partial(torch.cat, dim=1)
        joined = ShardedTensorFactory(fc1, self.linear_fc1, split, join, replica)
        return {
            f"{prefix}linear_fc1": joined,
            f"{prefix}linear_fc2": part(fc2, self.linear_fc2, 2, tp_rank, tp),
        }


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``y[n] = weight[g] rows[n]``, where g is the first group with n < ends[g].

    Args:
        rows: [N, K]
        weight: [G, M, K]
        ends: [G] int32, rising to N

    Returns: [N, M]
    """
    out: Tensor = _GroupedLinear.apply(rows, weight, ends)  # type: ignore[assignment]
    return out


class _GroupedLinear(torch.autograd.Function):
    """torch's own gradient of ``grouped_mm`` refuses incoming gradients that are not contiguous.

    Without rows, as on an empty rank of dynamic context parallelism, ``grouped_mm`` is not called:
    torch does not say what its CUDA kernels do then. The result is empty, the weight's gradient 0.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        frozen = not ctx.needs_input_grad[1]
        ctx.save_for_backward(None if frozen else rows, weight, ends)
        return _grouped_mm(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight, ends = ctx.saved_tensors
        return *_gradients(grad, rows, weight, ends, ctx.needs_input_grad[:2]), None


class _UnitLinear(torch.autograd.Function):
    """``grouped_linear(unit(joined, probs), weight, ends)``, which computes the unit's output again
    in the backward pass.

    megatron's ``CheckpointWithoutOutput`` does so by exchanging the memory of tensors, with an
    extension that it compiles for that.
    """

    @staticmethod
    def forward(
        ctx: Any, unit: Any, joined: Tensor, probs: Tensor, weight: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.unit = unit
        ctx.save_for_backward(joined, probs, weight, ends)
        return _grouped_mm(unit(joined, probs), weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        joined, probs, weight, ends = ctx.saved_tensors
        _, of_joined, of_probs, of_weight, _ = ctx.needs_input_grad
        joined = joined.detach().requires_grad_(of_joined)
        probs = probs.detach().requires_grad_(of_probs)
        with torch.enable_grad():
            inner = ctx.unit(joined, probs)
        wanted = (of_joined or of_probs, of_weight)
        inner_grad, weight_grad = _gradients(grad, inner.detach(), weight, ends, wanted)
        if wanted[0]:
            torch.autograd.backward(inner, inner_grad)
        return None, joined.grad, probs.grad, weight_grad, None


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    return F.grouped_mm(rows, weight.mT, offs=ends)


def _gradients(
    grad: Tensor, rows: Tensor | None, weight: Tensor, ends: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the rows and of the weight, where wanted. The weight's alone reads `rows`."""
    of_rows, of_weight = wanted
    if not len(grad):
        zeros = torch.zeros_like(weight) if of_weight else None
        return grad.new_empty(0, weight.shape[2]), zeros
    grad = grad.contiguous()
    rows_grad = F.grouped_mm(grad, weight, offs=ends) if of_rows else None
    weight_grad = _weight_grad(weight, grad, rows, ends) if rows is not None and of_weight else None
    return rows_grad, weight_grad


def _weight_grad(weight: Tensor, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor | None:
    """[G, M, K]: ``grad[n] rows[n]^T`` added over each group's rows.

    On a CPU it is added to ``weight.main_grad`` where there is one of the same type, so that
    nothing of the size of all weights is written and added. On a GPU a grouped product cannot add
    to what is there, and a product for each group needs the counts on the host, to be 1.1 times
    as fast (H100, 64 groups of 3072 x 2048: 2.2 ms, against 2.4 ms).
    """
    total = getattr(weight, "main_grad", None)
    if weight.device.type != "cpu" or total is None or total.dtype != weight.dtype:
        return F.grouped_mm(grad.mT, rows, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for expert, left, right in zip(total, grad.split(counts), rows.split(counts), strict=True):
        expert.addmm_(left.T, right)
    return stand_in(weight)
