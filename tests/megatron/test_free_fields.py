"""Every field that ``model.megatron`` passes on, set to another value for one training step.

A field of speed or memory leaves the numbers of a run without it, in the layout whose code reads
it. One that changes numbers by design changes them equally in two layouts. Others are refused when
the plan is compiled.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.language.errors import ConfigError, show
from pyrl_ext.plan.rules.passthrough import megatron_fields
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan
from tests.parity import BOUNDS, Outcome

pytestmark = pytest.mark.multiprocess

MODEL = "glm"  # latent attention, a dense layer, shared experts and routers with a bias
FULL = "float32"
HALF = "bfloat16"


class Row(NamedTuple):
    """A free field and how a step with it is checked.

    Args:
        value:   another one than the trainer's.
        layout:  of two ranks, in words of `tests.parity`; "": one process.
        dtype:   of the model. In bfloat16 the layout is pipeline stages, which round equally.
        changes: numbers change by design.
        at_once: megatron reads the field when its config is made, and not later.
    """

    name: str
    value: Any
    layout: str
    dtype: str = FULL
    changes: bool = False
    at_once: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {show(self.value)}, {self.layout or 'one process'}, {self.dtype}"


SPREAD = "tp2 ep2 etp1"
ROWS = (
    Row("deterministic_mode", True, SPREAD),
    Row("batch_p2p_sync", True, "pp2"),
    Row("deallocate_pipeline_outputs", True, "pp2"),
    Row("deallocate_pipeline_outputs", True, "pp2 vpp2"),
    Row("disable_bf16_reduced_precision_matmul", True, "pp2", HALF, at_once=True),
    Row("bias_dropout_fusion", True, ""),  # compiles for seconds
    Row("moe_router_dtype", "fp64", SPREAD),
    Row("moe_router_dtype", None, SPREAD),  # the model's type
    Row("moe_router_dtype", None, "pp2", HALF, changes=True),
    Row("clone_scatter_output_in_embedding", False, SPREAD),
)
# fields that were free until a step with them failed -> (value, words of the reason)
REFUSED = {
    "moe_shared_expert_overlap": (True, "leaves out the shared experts"),
    "moe_z_loss_coeff": (0.1, "adds up the padding rows"),
    "fp32_residual_connection": (True, "take activations in model.dtype"),
    "gradient_accumulation_fusion": (True, "need a kernel of APEX"),
    "defer_embedding_wgrad_compute": (True, "the LM head is this package's"),
    "wgrad_deferral_limit": (1, "the LM head is this package's"),
    "overlap_p2p_comm_warmup_flush": (True, "sometimes waited without end"),
    "distribute_saved_activations": (True, "hold parts of the sequence already"),
    "bias_activation_fusion": (True, "only transformer-engine's layers read it"),
    "moe_per_layer_logging": (True, "no part of the trainer reads it"),
}


def test_every_free_field_has_a_row():
    assert {row.name for row in ROWS} == {*megatron_fields()["free"]}


# refused -----------------------------------------------------------------------------------------


def refused(name: str, value: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError, match=f"model.megatron.{name}") as caught:
        tiny_plan(f"model.megatron.{name}={show(value)}", *overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_compile_plan_refuses_fields_that_fail_a_step(name):
    value, reason = REFUSED[name]
    assert reason in refused(name, value)
    assert reason in refused(name, value, "model.dtype=bfloat16", "parallel.tp=2")


@pytest.mark.parametrize("name", megatron_fields()["transformer_engine"])
def test_compile_plan_refuses_fields_of_te_with_local_layers(name):
    assert "only transformer-engine's layers read it" in refused(name, True)


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_RowMoELayer_builds_no_layer_that_would_lose_its_shared_experts(dtype):
    plan = tiny_plan(f"model.dtype={dtype}")
    model = plan.model.model_copy(update={"megatron": {"moe_shared_expert_overlap": True}})
    with (
        topology.start(plan) as topo,
        pytest.raises(ValueError, match="RowMoELayer: moe_shared_expert_overlap is True"),
    ):
        Policy.build(plan.model_copy(update={"model": model}), topo)


# free --------------------------------------------------------------------------------------------


@contextmanager
def reads_of(name: str, at_once: bool) -> Iterator[list[str]]:
    """The functions that read this field of megatron's config, its own checks only ``at_once``."""
    readers: list[str] = []

    def get(config: Any, key: str) -> Any:
        if key == name:
            reader = sys._getframe(1).f_code.co_name
            if at_once or reader != "__post_init__":
                readers.append(reader)
        return object.__getattribute__(config, key)

    with patch.object(ModelParallelConfig, "__getattribute__", get, create=True):
        yield readers


def train_step(plan: Plan) -> Outcome:
    with passes.built(plan) as policy:
        loss = build_loss(plan.objective)
        before = parity.trained(policy)
        batch = parity.batches(plan, mtp_routes=False)[0]
        schedule = Scheduler(plan).schedule(batch.seqlens)
        old = passes.scores(policy, batch, schedule)
        batch = replace(batch, old_logprobs=old.logprobs)
        metrics = passes.accumulate(policy, batch, schedule, loss)
        grads = parity.gradients(policy)
        metrics |= policy.step_optimizer()
        changes = {name: x - before[name] for name, x in parity.trained(policy).items()}
    gc.collect()  # the policy's process groups, with their threads
    return Outcome([metrics["loss"]], [metrics["grad_norm"]], [metrics], [grads], changes)


def compiled(row: Row, layout: str, folder: Path, with_field: bool) -> Plan:
    overrides = [*map(parity._override, layout.split()), f"model.dtype={row.dtype}"]
    if with_field:
        overrides.append(f"model.megatron.{row.name}={show(row.value)}")
    return parity.compiled(MODEL, folder, tuple(overrides))


def on_one(group: Any, folder: Path) -> dict[str, Any]:
    """Save a step without any field, and take those with one that two ranks do not take or are
    compared with.

    Returns: title of a row -> who read the field, and how far the step is from that without it.
    """
    plain = dict[str, Outcome]()
    found = dict[str, Any]()
    for row in ROWS:
        if row.dtype not in plain:
            plain[row.dtype] = train_step(compiled(row, "", folder, with_field=False))
            torch.save(plain[row.dtype], folder / f"{row.dtype}.pt")
        if row.layout and not row.changes:
            continue
        plan = compiled(row, "", folder, with_field=True)
        with reads_of(row.name, row.at_once) as readers:
            got = train_step(plan)
        torch.save(got, folder / f"{row.title}.pt")
        found[row.title] = {"readers": readers, "off": parity.deviations(got, plain[row.dtype])}
    return found


def on_two(group: Any, folder: Path) -> dict[str, Any]:
    """Deviations of each step of two ranks from one process: from its step with the same field if
    the field changes numbers, else from its step without any."""
    found = dict[str, Any]()
    for row in ROWS:
        if not row.layout:
            continue
        plan = compiled(row, row.layout, folder, with_field=True)
        with reads_of(row.name, row.at_once) as readers:
            got = train_step(plan)
        wanted = folder / f"{row.title if row.changes else row.dtype}.pt"
        want = torch.load(wanted, weights_only=False)
        found[row.title] = {"readers": readers, "off": parity.deviations(got, want)}
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Results of one process, and of the first of two ranks."""
    folder = tmp_path_factory.mktemp("fields")
    (one,) = run_ranks(on_one, 1, folder)
    two, _ = run_ranks(on_two, 2, folder)
    return one, two


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_model_megatron_field_is_read_and_layouts_agree(steps, row):
    """Within the bounds of parity."""
    one, two = steps
    found = two[row.title] if row.layout else one[row.title]
    assert found["readers"], "nothing read the field"
    for name, bound in BOUNDS.items():
        assert found["off"][name][0] <= bound, (name, found["off"][name])


@pytest.mark.parametrize("row", [row for row in ROWS if row.changes], ids=lambda row: row.title)
def test_model_megatron_field_changes_numbers_by_design(steps, row):
    one, _ = steps
    assert one[row.title]["off"]["grad"][0] > 100 * BOUNDS["grad"]
