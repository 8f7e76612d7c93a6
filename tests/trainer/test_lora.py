"""Adapters on the live model: their gradients, the base without them, other layouts, checkpoints.

`tests.parity` has the layouts; here are those that see each mark of a factor.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import buffers
from pyrl_ext.models.lora_table import linear_of
from pyrl_ext.models.weight_table import load
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import lora, passes
from tests.helpers.checkpoints import content
from tests.helpers.ranks import run_ranks
from tests.parity import MODELS, batches, compiled

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PLAIN = ("lora=null",)


def train(policy: Policy, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` on the batches of `tests.parity`."""
    for batch in batches(policy.plan, mtp_routes=False)[first:last]:
        schedule = Scheduler(policy.plan).schedule(batch.seqlens)
        passes.step(policy, batch, schedule, policy.plan.replay.old)


def scored(policy: Policy) -> torch.Tensor:
    batch = batches(policy.plan, mtp_routes=False)[0]
    schedule = Scheduler(policy.plan).schedule(batch.seqlens)
    return passes.scores(policy, batch, schedule).logprobs


# one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *product(["glm lora", "qwen some lora"], ["float32", "bfloat16"]),
        ("qwen next lora", "float32"),
    ],
)
def test_Adapters_leave_the_base_as_it_is(tmp_path, model, dtype):
    """To the bit: with B zero as without adapters, and after steps with adapters off."""
    plan = compiled(model, tmp_path)
    dtyped = f"model.dtype={dtype}"
    with topology.start(plan) as topo:
        plain = compiled(model, tmp_path, (*PLAIN, dtyped))
        want = scored(Policy.build(plain, topo, trainable=False))
        policy = Policy.build(compiled(model, tmp_path, (dtyped,)), topo)
        assert torch.equal(scored(policy), want)
        train(policy, 0, 1)
        assert not torch.equal(scored(policy), want)
        with lora.adapters_of(policy.llm).off():
            assert torch.equal(scored(policy), want)
        base = {n: t for n, t in Policy.build(plain, topo, trainable=False).weights()}
        live = lora.base(policy.llm)
        assert all(torch.equal(live[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize(
    "model", ["glm mtp lora", "qwen lora", "qwen some lora", "qwen next lora", "nemotron lora"]
)
def test_Adapters_have_the_gradient_of_the_weights_they_are_merged_into(tmp_path, model):
    """With W + scale B A as weights that are trained: dA = scale B^T dW, dB = scale dW A^T; added
    over experts that share a factor. The norm is that of all factors."""
    plan = compiled(model, tmp_path)
    plain = compiled(model, tmp_path, PLAIN)
    batch = batches(plan, MODELS[model].mtp_routes)[0]
    schedule = Scheduler(plan).schedule(batch.seqlens)
    loss = build_loss(plan.objective)
    with passes.built(plan) as policy:
        whole = Policy.build(plain, policy.topo)
        lora.draw_b(policy.llm)
        weights = lora.merged(policy.llm)
        factors = lora.factors(policy.llm)
        load(whole.llm.table, whole.llm.named_parameters(), weights.__getitem__, policy.topo)
        metrics = [passes.accumulate(p, batch, schedule, loss) for p in (policy, whole)]
        got = lora.gradients(policy.llm)
        of_weights = dict(whole.gradients())
        norm = policy.step_optimizer()["grad_norm"]
    for name, value in metrics[1].items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    want = {name: torch.zeros_like(tensor) for name, tensor in got.items()}
    assert plan.lora is not None
    for name, gradient in of_weights.items():
        a, b = (_factor_name(name, letter, factors) for letter in "AB")
        if a is None or b is None:
            continue
        scale = plan.lora.scale_of(".experts." in name)
        want[a] += scale * factors[b].T @ gradient
        want[b] += scale * gradient @ factors[a].T
    for name, gradient in want.items():
        assert parity.apart(got[name], gradient) < 2e-5, name
    if not plan.num_mtp_layers:  # megatron clips MTP layers by a norm for themselves
        total = torch.stack([g.double().norm() for g in want.values()]).norm()
        assert norm == pytest.approx(float(total), rel=1e-5)


def _factor_name(weight: str, letter: str, factors: dict) -> str | None:
    """The factor of a checkpoint tensor, or the one that its expert shares."""
    own = weight.replace(".weight", f".lora_{letter}.weight")
    before, found, after = own.partition(".experts.")
    shared = before + found + after.partition(".")[2]
    return next((name for name in (own, shared) if name in factors), None)


@pytest.mark.parametrize("targets", ["all", "[gate]", "[q_a_proj]"])
def test_Adapters_are_all_that_has_gradients_and_moments(tmp_path, targets):
    with_experts = compiled("glm lora", tmp_path)
    lora_keys = {} if targets == "all" else {"expert_rank": None, "targets": targets[1:-1].split()}
    assert with_experts.lora is not None
    lora_section = with_experts.lora.model_copy(update=lora_keys)
    plan = with_experts.model_copy(update={"lora": lora_section})
    with passes.built(plan) as policy:
        held = sum(t.numel() for t in lora.factors(policy.llm).values())
        kinds = {linear_of(n.replace(".lora_A", "")) for n in lora.factors(policy.llm)}
        assert targets == "all" or kinds - {"lora_B"} == {targets.strip("[]")}
        assert sum(buffer.grad_data.numel() for buffer in buffers(policy.llm.chunks)) == held
        train(policy, 0, 1)
        states = [p.optimizer.state for p in policy.llm.optimizer.chained_optimizers]
        moments = [s["exp_avg"].numel() for state in states for s in state.values()]
        assert sum(moments) == held


def test_recomputation_keeps_the_gradients_of_adapters(tmp_path):
    """With a frozen base nothing before the first adapter requires one."""
    found = []
    for recompute in ("none", "full"):
        plan = compiled("qwen lora", tmp_path, (f"model.recompute={recompute}", "replay=off"))
        with passes.built(plan) as policy:
            train(policy, 0, 1)
            found.append(lora.gradients(policy.llm))
    assert all(torch.equal(found[0][name], grad) for name, grad in found[1].items())


# several ranks -----------------------------------------------------------------------------------

LAYOUTS = {
    "tp2 etp1": "glm lora",  # each mark of a factor
    "tp2 ep2 etp1": "qwen some lora",  # factors that the experts of all ranks share
}
RESHARD = [
    *product(["glm lora"], ["tp2", "dp2 ep2 distributed", "pp2 vpp2"]),
    ("qwen next lora", "tp2"),  # rows in sections of unequal length
    ("nemotron lora", "tp2"),  # also of a mixer with several
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lora")


def test_Adapters_of_every_layout_equal_one_process(folder):
    """In a spawn apart from checkpoints, in which ranks with a wrong mark would wait forever."""
    for model in set(LAYOUTS.values()):
        torch.save(parity.train_steps(compiled(model, folder), False), folder / f"{model}.pt")
    chosen = [parity._layouts(line, model)[0] for line, model in LAYOUTS.items()]
    rows = run_ranks(parity.on_ranks, 2, chosen, folder)[0]
    assert [row["layout"] for row in rows] == [*LAYOUTS]
    assert not parity.too_far(rows)


def reference(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """One process: of each model of `RESHARD` a checkpoint after two steps, the factors after
    three, and that a run which goes on from it has the same."""
    models = dict.fromkeys(model for model, _ in RESHARD)
    return {model: continued(compiled(model, folder), folder / model) for model in models}


def continued(plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    with passes.built(plan) as policy:
        train(policy, 0, 2)
        policy.save(folder / "step-2")
        train(policy, 2, 3)
        want = lora.factors(policy.llm)
    with passes.built(plan, initial=False) as policy:
        policy.load(folder / "step-2")
        train(policy, 2, 3)
        assert all(torch.equal(want[n], t) for n, t in lora.factors(policy.llm).items())
    return want


def on_ranks(group, folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """By model and layout the factors after step three, from the checkpoint of one process, which
    is saved again before."""
    found = {}
    for model, line in RESHARD:
        plan = compiled(model, folder, parity._layouts(line, model)[0].overrides)
        with passes.built(plan, initial=False) as policy:
            policy.load(folder / model / "step-2")
            policy.save(folder / model / line / "step-2")
            train(policy, 2, 3)
            found[model, line] = lora.factors(policy.llm)
    return found


@pytest.fixture(scope="module")
def outcomes(folder):
    want = reference(folder)
    return want, run_ranks(on_ranks, 2, folder)[0]


@pytest.mark.parametrize(("model", "line"), RESHARD)
def test_load_goes_on_with_adapters_under_another_layout(model, line, outcomes, folder):
    """It saves the same tensors again, bit for bit, and none of the base."""
    want, found = outcomes
    for name, tensor in found[model, line].items():
        assert parity.apart(tensor, want[model][name]) < 1e-5, name
    saved = content(folder / model / "step-2")
    again = content(folder / model / line / "step-2")
    tensors = {n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}
    assert len(tensors) > 100 and all(".lora_" in name for name in tensors)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("change", ["seed=1", "lora=null"])
def test_load_refuses_adapters_of_another_base(outcomes, folder, change):
    plan = compiled("glm lora", folder, (change,))
    refused = pytest.raises(ValueError, match=r"holds adapters of the base \w{12}, expected")
    with passes.built(plan) as policy, refused:
        policy.load(folder / "glm lora/step-2")
