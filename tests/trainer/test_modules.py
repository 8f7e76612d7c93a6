"""Modules on different ranks: one clip, a learning rate each, one checkpoint of all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.megatron.optimizer import join_build_optimizer
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.layout import Module as ModuleKeys
from pyrl_ext.plan.schema.layout import ModuleParallel
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_plan

pytestmark = pytest.mark.multiprocess

LR = 1e-2
VISION_LR = 3e-3
CLIP = 0.5
OPTIONS = (
    f"optimizer.lr={LR}",
    "optimizer.eps=1e-3",
    f"optimizer.clip_grad={CLIP}",
    "optimizer.weight_decay=0",
    "optimizer.warmup_steps=0",
)


@dataclass(frozen=True)
class Layout:
    """``parallel`` of the language model, sizes of the other module, whether that one trains, and
    whether it is on the first stage of the language model.

    The other module is a model of megatron's layers too, so that nothing here knows of images.
    """

    llm: tuple[str, ...]
    vision: dict[str, int]
    train: bool = True
    distributed: bool = False
    shared: bool = False

    @property
    def plan(self) -> Plan:
        return self._plan(*(f"parallel.{size}" for size in self.llm))

    @property
    def vision_plan(self) -> Plan:
        return self._plan(*(f"parallel.{axis}={size}" for axis, size in self.vision.items()))

    def _plan(self, *sizes: str) -> Plan:
        distributed = f"optimizer.distributed={str(self.distributed).lower()}"
        keys = ModuleKeys(
            train=self.train,
            ranks="shared" if self.shared else "own",
            lr=VISION_LR,
            patches_per_microbatch=64,
            parallel=ModuleParallel(**self.vision),
        )
        plan = tiny_plan(*OPTIONS, distributed, *sizes)
        return plan.model_copy(update={"modules": {"vision": keys}})


WRITTEN = Layout(("dp=2", "ep=2"), {"pp": 2}, distributed=True)
CONTINUED = Layout(("tp=2", "ep=2", "etp=1"), {"dp": 2})
SHARED = Layout(("pp=2", "tp=2", "ep=2", "etp=1"), {"dp": 2}, distributed=True, shared=True)
FROZEN = Layout(("pp=2",), {"tp": 2}, train=False)


def gradient(weight: Tensor) -> Tensor:
    """Any function of single numbers, so that parts of a tensor have the gradients of the whole."""
    return torch.sin(40 * weight.float()) + weight.float()


def build(layout: Layout, topo: Topology) -> Policy:
    """This rank's policy. A frozen one's ranks build an optimizer as well, for the others' sake."""
    modules = dict[str, TrainedModule]()
    for name, plan in (("llm", layout.plan), ("vision", layout.vision_plan)):
        if place := topo.of(name):
            modules[name] = TrainedModule.build(name, plan, place)
        elif layout.shared:
            join_build_optimizer(topo)
    if "vision" in modules and not layout.train:
        modules["vision"].optimizer = None
    return Policy(modules)


def train(policy: Policy, steps: int) -> list[float]:
    """The norms of so many steps."""
    norms = []
    for _ in range(steps):
        for module in policy.modules.values():
            if module.optimizer is not None:
                module.zero_grad()
                for tensor in module.named_parameters().values():
                    if tensor.requires_grad:
                        tensor.main_grad.copy_(gradient(tensor.detach()))  # type: ignore
        metrics = policy.step_optimizer()
        assert metrics["lr"] == (LR if policy.module.name == "llm" else VISION_LR)
        norms.append(metrics["grad_norm"])
    return norms


def weights(policy: Policy) -> dict[str, Tensor]:
    """Those of this rank's modules, by module and name."""
    found = {}
    for name, module in policy.modules.items():
        found |= {f"{name}.{tensor}": value.clone() for tensor, value in whole(module)}
    return found


def whole(module: TrainedModule) -> GatheredWeights:
    """Its tensors, on its ranks alone."""
    planned = plan_buckets(module.plan, module.table, module=module.name)
    return GatheredWeights(planned, module.weights(), module.topo)


def on_ranks(world: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with topology.start(WRITTEN.plan) as topo:
        policy = build(WRITTEN, topo)
        found["norms"] = train(policy, 2)
        policy.step = 2
        policy.save(folder / "step-2")
    with topology.start(CONTINUED.plan) as topo:
        policy = build(CONTINUED, topo)
        policy.load(folder / "step-2")
        assert policy.updates == 2
        found["norms"] += train(policy, 1)
        found["weights"] = weights(policy)
    with topology.start(SHARED.plan) as topo:
        policy = build(SHARED, topo)
        found["groups"] = [
            {id(group) for group in vars(place.groups).values() if group is not None}
            for place in (topo, *topo.colocated.values())
        ]
        policy.load(folder / "step-2")
        policy.save(folder / "step-3")
        norms = train(policy, 1)
        held = weights(policy)
    with topology.start(CONTINUED.plan) as topo:
        other = build(CONTINUED, topo)
        other.load(folder / "step-3")
        found["shared"] = norms + train(other, 1), [held, weights(other)]
    with topology.start(FROZEN.plan) as topo, heartbeats(topo) as heartbeat:
        heartbeat.step = 7
        heartbeat.enter("time/update")
        found["place"] = heartbeat.place
        policy = build(FROZEN, topo)
        found["frozen"] = train(policy, 1), weights(policy)
    return found


def alone(names: tuple[str, ...], steps: int) -> tuple[list[float], dict[str, Tensor], Any]:
    """The norms, weights and first weights by torch's AdamW over all modules in one process."""
    layout = Layout((), {})
    with topology.start(layout._plan().model_copy(update={"modules": {}})) as topo:
        first = dict(whole(TrainedModule.build("llm", tiny_plan(*OPTIONS), topo)))
    first = {
        f"{m}.{name}": tensor.clone() for m in ("llm", "vision") for name, tensor in first.items()
    }
    held = {name: tensor.clone().requires_grad_() for name, tensor in first.items()}
    trained = {
        name: tensor
        for name, tensor in held.items()
        if name.startswith(names) and "e_score_correction_bias" not in name
    }
    rates = {"llm": LR, "vision": VISION_LR}
    groups = [
        {"params": [t for n, t in trained.items() if n.startswith(name)], "lr": rates[name]}
        for name in names
    ]
    options = tiny_plan(*OPTIONS).optimizer
    adam = torch.optim.AdamW(groups, LR, options.betas, options.eps, 0.0)
    norms = []
    for _ in range(steps):
        for tensor in trained.values():
            tensor.grad = gradient(tensor.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)))
        adam.step()
    return norms, {name: tensor.detach() for name, tensor in held.items()}, first


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 4, tmp_path_factory.mktemp("modules"))


def check(
    found: list[dict[str, Tensor]], want: dict[str, Tensor], first: dict[str, Tensor]
) -> None:
    """Every tensor moved as far as wanted, on the ranks of its module."""
    names = set().union(*found)
    assert names == want.keys()
    for weights in found:
        for name, tensor in weights.items():
            moved = tensor - first[name]
            wanted = want[name] - first[name]
            assert float((moved - wanted).norm()) <= 1e-3 * float(wanted.norm()), name


def test_step_clips_all_modules_by_one_norm_and_continues_under_another_layout(results):
    """Two steps, a checkpoint of both modules, and the third step under another
    layout of both; against torch's AdamW over all."""
    norms, want, first = alone(("llm", "vision"), 3)
    for each in results:
        assert each["norms"] == pytest.approx(norms, rel=2e-5)
    check([each["weights"] for each in results], want, first)


def test_two_modules_on_a_rank_step_as_one_and_share_a_checkpoint_with_other_layouts(results):
    """The third step from the same checkpoint with both modules on the first stage, and after a
    checkpoint of that layout on ranks for each."""
    norms, want, first = alone(("llm", "vision"), 3)
    for each in results:
        assert each["shared"][0] == pytest.approx(norms[2:] * 2, rel=2e-5)
    for number in (0, 1):
        check([each["shared"][1][number] for each in results], want, first)


def test_modules_on_one_rank_share_the_groups_of_the_same_ranks(results):
    for rank, each in enumerate(results):
        llm, *encoder = each["groups"]
        assert len(encoder) == (1 if rank < 2 else 0)
        assert all(groups <= llm for groups in encoder)  # dp 2, whose ranks are tp 2 of the model


def test_heartbeat_names_the_module_of_a_rank(results):
    places = [each["place"] for each in results]
    assert places == ["llm's update of step 7"] * 2 + ["vision's update of step 7"] * 2


def test_step_of_a_module_that_is_not_trained_has_norm_zero(results):
    norms, want, first = alone(("llm",), 1)
    for each in results:
        assert each["frozen"][0] == pytest.approx(norms, rel=2e-5)
    check([each["frozen"][1] for each in results], want, first)
    assert math.isfinite(norms[0]) and norms[0] > CLIP
