"""Encoders and a language model on different ranks against one process (`make parity`).

Per layout three train steps (scores, loss, backward through the edges, reduction, one clip over all
modules, optimizer) on batches with images; then loss, metrics, every gradient of every module and
what each parameter moved by are compared with plain autograd in one process. A layout that hangs
ends with the stacks of all its ranks.
"""

import argparse
import faulthandler
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import gather_shards
from pyrl_ext.megatron.optimizer import join_build_optimizer
from pyrl_ext.megatron.vision import VisionTower
from pyrl_ext.pack.encoder_work import EncoderWork
from pyrl_ext.pack.rank_rows import Lengths, RankRole, RankRows
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.layout import Module as ModuleKeys
from pyrl_ext.plan.schema.layout import ModuleParallel
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.module_pipe import build_edges
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets
from tests import parity
from tests.helpers import towers, vision
from tests.helpers.deadline import DEADLINE
from tests.helpers.nccl_rules import mark
from tests.helpers.ranks import run_ranks
from tests.helpers.towers import ImageBatch, InProcess

BOUNDS = parity.BOUNDS | {"bytes": 0.0}
BF16_BOUNDS = {"loss": 2e-2, "grad": 1e-1, "grad norm": 2e-2, "change": math.inf, "bytes": 0.0}
COMMON = (  # many microbatches, a norm above the clip
    "batching.tokens_per_microbatch=64",
    "optimizer.clip_grad=0.05",
    "optimizer.weight_decay=0",
    "data.max_prompt_tokens=32",
    "objective.entropy_coef=0.01",
    "optimizer.eps=1e-3",
    "optimizer.lr=1e-2",
)
ENCODERS = ("vision", "audio")
STUCK = 240.0  # s for one layout on a busy machine


@dataclass(frozen=True)
class Layout:
    """``dp2 pp2 -> cp2 recompute:full``: the encoders' ranks, joined by ``+``, and the language
    model's; ``shared`` encoders are on its first stage, ``frozen`` ones are not trained."""

    name: str
    model: str = "qwen"

    @property
    def title(self) -> str:
        return f"{self.name}, {self.model}"

    @property
    def is_family(self) -> bool:
        """True if the encoder is the tower of the model's family; else a small one of the tests."""
        return " vl" in self.model

    @cached_property
    def _parts(self) -> tuple[list[list[str]], list[str]]:
        encoders, reader = self.name.split(" -> ")
        return [each.split() for each in encoders.split(" + ")], reader.split()

    @property
    def encoders(self) -> dict[str, ModuleKeys]:
        """The plan's modules."""
        return {
            name: ModuleKeys(
                train="frozen" not in words,
                ranks="shared" if "shared" in words else "own",
                parallel=ModuleParallel(**{w[:2]: int(w[2:]) for w in words if w[0] in "dtp"}),
                patches_per_microbatch=1 << 20,
            )
            for name, words in zip(ENCODERS, self._parts[0], strict=False)
        }

    @property
    def frozen(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.encoders.items() if not each.train)

    @property
    def is_narrow(self) -> bool:
        """True if it computes in bfloat16; what it is compared with does in float32."""
        return "bf16" in self._parts[1]

    @property
    def reference(self) -> str:
        """Names the single process that it is compared with."""
        words = [self.model, *self.encoders, "frozen", *self.frozen, "routed" * self.is_narrow]
        return "-".join(words).replace(" ", "_")

    def plan(self, folder: Path, alone: bool = False) -> Plan:
        words = [] if alone else [w for w in self._parts[1] if w not in ("1", "bf16")]
        dtype = "bfloat16" if self.is_narrow and not alone else "float32"
        overrides = (*map(parity._override, words), f"model.dtype={dtype}")
        plan = parity.compiled(self.model, folder, overrides, COMMON)
        return plan if alone else plan.model_copy(update={"modules": self.encoders})

    @property
    def bounds(self) -> dict[str, float]:
        return BF16_BOUNDS if self.is_narrow else BOUNDS


# towers of the families: features added in the first chunk, positions of three axes
VL = ("qwen vl", "kimi vl")
FAMILIES = {
    2: "1 -> 1",
    3: "1 -> pp2\n1 -> tp2\ntp2 -> 1\n1 -> dp2 dynamic:2\n1 -> pp2 recompute:full\nfrozen -> cp2",
    4: "pp2 -> cp2\ndp2 -> dp2 ep2\ndp2 -> tp2 ep2 etp1 recompute:full",
}


def _layouts(names: str, *models: str) -> list[Layout]:
    lines = [line for line in map(str.strip, names.splitlines()) if line]
    return [Layout(line, model) for line in lines for model in models]


LAYOUTS = {
    1: [*_layouts("shared -> 1", "qwen", "glm mtp"), *_layouts("shared -> 1", *VL)],
    2: [
        *_layouts("1 -> 1", "qwen", "glm mtp"),
        *_layouts("shared -> pp2\nshared -> tp2\nshared -> cp2\nshared -> dp2 ep2", "qwen"),
        *_layouts("shared -> pp2 vpp2\nshared frozen -> tp2\nshared + shared -> dp2", "qwen"),
        *_layouts("shared -> dp2 ep2 dynamic:2 recompute:full distributed overlapped", "glm mtp"),
        *_layouts("shared -> tp2\nshared -> pp2 vpp2\nshared -> cp2", "glm mtp 2"),
        *_layouts("shared -> tp2 bf16\nshared -> tp2 recompute:full", "qwen"),
        *_layouts(FAMILIES[2], *VL),
        *_layouts("shared -> tp2 ep2 etp1 recompute:full\nshared -> pp2", *VL),
        *_layouts("shared -> dp2 ep2 overlapped distributed", "kimi vl"),
        *_layouts("shared -> tp2 ep2 etp1 bf16", *VL),
    ],
    3: [
        *_layouts("1 -> pp2\npp2 -> 1\n1 -> tp2\ntp2 -> 1\n1 -> dp2\ndp2 -> 1\n1 -> cp2", "qwen"),
        *_layouts("1 -> dp2 ep2\n1 -> tp2 ep2 etp1\n1 -> cp2 ep2\n1 -> pp2 vpp2", "qwen"),
        *_layouts("1 + 1 -> 1\nfrozen -> pp2\npp2 frozen -> 1\n1 -> pp2 recompute:full", "qwen"),
        *_layouts("1 -> dp2 dynamic:2\n1 -> tp2 ep2 etp1\n1 -> cp2 ep2", "glm"),
        *_layouts("1 -> dp2 bf16\n1 -> tp2 bf16", "qwen"),
        *_layouts("1 -> tp2 ep2 etp1 bf16", *VL),
        *_layouts("pp2 -> 1 bf16", "qwen vl"),
        *_layouts("1 -> tp2\n1 -> pp2 recompute:full", "glm mtp", "glm mtp 2"),
        *_layouts("1 -> cp2 ep2\nfrozen -> pp2\ndp2 -> 1", "glm mtp 2"),
        *_layouts("1 -> pp2\nshared -> pp3 layout:Et|ttt|mL", "kimi vl mtp"),
        *_layouts(FAMILIES[3], *VL),
    ],
    4: [
        *_layouts("pp2 -> pp2\ndp2 -> dp2 ep2\npp2 + 1 -> 1\npp2 -> pp2 vpp2\ndp2 -> cp2", "qwen"),
        *_layouts("dp3 -> 1\ntp2 -> tp2\ndp2 -> dp2 ep2 overlapped distributed", "qwen"),
        *_layouts("1 + 1 frozen -> pp2 vpp2\ndp2 -> dp2 ep2 dynamic:2 recompute:full", "qwen"),
        *_layouts("dp2 -> dp2 ep2 dynamic:2", "glm mtp"),
        *_layouts("pp2 -> pp2 vpp2\n1 -> pp3 layout:Ett|ttmm|L\nshared -> tp2 pp2", "glm mtp 2"),
        *_layouts(FAMILIES[4], *VL),
        *_layouts("dp2 -> dp2 ep2 overlapped distributed\npp2 -> pp2 vpp2", "kimi vl"),
        *_layouts("shared -> pp2 dp2 ep2\nshared -> dp2 cp2 ep2\nshared -> tp2 cp2", "qwen", *VL),
        *_layouts("shared -> pp2 vpp2 tp2\nshared frozen -> pp2 cp2", "qwen"),
        *_layouts("shared -> dp2 cp2 ep2 dynamic:4 recompute:full distributed", "glm mtp"),
    ],
    5: [
        *_layouts("dp3 -> dp2\n1 -> tp2 cp2\n1 -> pp2 vpp2 cp2 ep2\ndp3 -> tp2", "qwen", "glm"),
        *_layouts("1 -> dp2 cp2", "qwen", "glm", *VL),
    ],
    6: _layouts("dp2 -> pp2 vpp2 dp2 ep2 dynamic:2\ntp2 pp2 -> pp2\ntp2 dp2 -> cp2", "qwen"),
    8: _layouts("dp2 tp2 -> pp2 dp2 ep2 distributed\npp2 + dp2 -> tp2 pp2", "qwen", "glm"),
}
# in CI: every way of sharing rows, both schedules, two encoders, frozen, recompute, bf16, families
FEW = {
    1: ("shared -> 1, qwen vl",),
    2: (
        "shared -> pp2 vpp2",
        "shared frozen -> tp2",
        "shared -> dp2 ep2 dynamic:2",
        "shared -> dp2 ep2, qwen",
        "shared -> cp2, qwen",
    ),
    3: (
        "1 -> cp2 ep2, glm",
        "1 -> tp2, glm mtp 2",
        "1 -> tp2 ep2 etp1, qwen",
        "1 -> dp2 bf16",
        "pp2 frozen -> 1",
        "shared -> pp3",
    ),
    4: (
        "overlapped distributed, qwen",
        "1 + 1 frozen",
        "dynamic:2, glm mtp",
        "pp2 -> pp2, qwen",
        "dp2 -> dp2 ep2, qwen vl",
        "pp2 -> cp2, kimi vl",
        "shared -> pp2 dp2 ep2, qwen vl",
        "vpp2, glm mtp 2",
        "-> pp3 layout",
        "shared -> tp2 pp2",
    ),
}


def batches(plan: Plan, layout: Layout) -> list[ImageBatch]:
    """One a step; some microbatches have no image.

    In bfloat16 every token has its routes: a router left to itself may choose another expert than
    in float32 where two are nearly equal, and one token is most of the gradient of an expert with
    few.
    """
    found = []
    tower = plan.sizes.vision
    numbers = 3 * tower.temporal_patch_size * tower.patch_size**2 if tower else towers.PIXELS
    for seed, batch in enumerate(parity.batches(plan, mtp_routes=False)):
        mask = batch.route_mask | layout.is_narrow
        one = replace(batch, targets=batch.targets.clone(), route_mask=mask)
        found.append(towers.with_images(one, (*layout.encoders,), seed, numbers))
    return found


@dataclass
class Outcome(parity.Outcome):
    """The results of one layout, with those of the encoders; and the bytes over each edge."""

    sent: dict[str, list[int]] | None = None


def rows_scored(policy: Policy, shard: BatchShard, batch: ImageBatch) -> Tensor:
    """[T] log-probs of all rows, on every rank."""
    found = policy.scores(shard, policy.plan.replay.old)
    stream = torch.zeros(len(batch.tokens))
    if shard.role.last_stage and not policy.topo.tp_rank:
        stream[torch.from_numpy(shard.rows.tokens)] = found.logprobs
    dist.all_reduce(stream)
    return stream


def width_of(plan: Plan) -> int:
    tower = plan.sizes.vision
    return plan.sizes.hidden_size * (1 + len(tower.deepstack if tower else ()))


# one process -------------------------------------------------------------------------------------


def whole_steps(plan: Plan, layout: Layout) -> Outcome:
    """Three steps by plain autograd through encoders and language model, torch's AdamW over all."""
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        loss = build_loss(plan.objective)
        kinds = tuple(layout.encoders)
        held: dict[str, Any] = {
            kind: vision.whole_tower(plan, topo)
            if layout.is_family
            else towers.build_tower(kind, plan, topo, width_of(plan))
            for kind in kinds
        }
        for kind in layout.frozen:
            held[kind].requires_grad_(False)
        inside = {
            (kind, depth): InProcess(tower, plan.sizes.hidden_size if depth else None, depth)
            for kind, tower in held.items()
            for depth in range(1 + plan.num_mtp_layers)
        }
        policy.edges = inside  # type: ignore[assignment]
        mine: list[Any] = [
            p for chunk in policy.llm.models for p in chunk.parameters() if p.requires_grad
        ]
        theirs: list[Any] = [
            p for tower in held.values() for p in tower.parameters() if p.requires_grad
        ]
        # megatron clips MTP layers by their own norm (optimizer.py: SEPARATE_GRAD_NORM_GROUPS)
        ahead = {p for p in mine if getattr(p, "grad_norm_group", None) == "mtp"}
        options = plan.optimizer
        adam = torch.optim.AdamW(
            [*mine, *theirs], options.lr, options.betas, options.eps, options.weight_decay
        )
        before = everything(policy, held, topo)
        out = Outcome([], [], [], [], {})
        for step, batch in enumerate(batches(plan, layout)):
            schedule = Scheduler(plan).schedule(batch.seqlens)
            for (name, _), edge in inside.items():
                edge.images = towers.image_shard(plan, topo, batch, schedule).images[name]
            scored = rows_scored(policy, towers.image_shard(plan, topo, batch, schedule), batch)
            batch = replace(batch, old_logprobs=scored)
            adam.zero_grad()
            shard = towers.image_shard(plan, topo, batch, schedule)
            metrics = policy.accumulate(shard, loss)
            for p in mine:
                p.grad = p.main_grad.clone()
            for p in theirs:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / shard.loss_tokens[0][0]
            grads = {name: grad.clone() for name, grad in policy.gradients()}
            out.grads.append(grads | of_towers(held, topo, lambda p: p.grad, layout.frozen))
            norm = clip([*(p for p in mine if p not in ahead), *theirs], options.clip_grad)
            clip([*ahead], options.clip_grad)
            adam.param_groups[0]["lr"] = plan.learning_rate()(step)
            adam.step()
            out.metrics.append(metrics)
            out.losses.append(metrics["loss"])
            out.norms.append(norm)
        after = everything(policy, held, topo)
        out.changes = {name: tensor - before[name] for name, tensor in after.items()}
        return out


def clip(parameters: list[Any], most: float) -> float:
    """Scale the gradients to a norm of at most ``most``; returns their norm before."""
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    for p in parameters:
        p.grad *= min(1.0, most / (norm + 1e-6))
    return norm


def of_towers(held: dict, topo: Topology, value: Any, left_out: tuple = ()) -> dict[str, Tensor]:
    if isinstance(tower := held.get("vision"), VisionTower):
        return vision.tower_tensors(tower, torch.zeros_like if left_out else value)
    parts = [
        towers.pieces(kind, tower, topo, value)
        for kind, tower in held.items()
        if kind not in left_out
    ]
    return towers.assembled([piece for part in parts for piece in part])


def everything(policy: Policy, held: dict, topo: Topology) -> dict[str, Tensor]:
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    return weights | of_towers(held, topo, lambda p: p)


# many ranks --------------------------------------------------------------------------------------


def build(plan: Plan, topo: Topology, layout: Layout) -> Policy:
    if layout.is_family:
        return Policy.build(plan, topo)
    modules = {}
    if topo.module == "llm":
        modules = {"llm": TrainedModule.build("llm", plan, topo)}
    for name in layout.encoders:
        trained = name not in layout.frozen
        if place := topo.of(name):
            modules[name] = towers.tower_module(name, plan, place, width_of(plan), trained)
        elif trained and plan.modules[name].ranks == "shared":
            join_build_optimizer(topo)
    return Policy(modules, build_edges(plan, topo, trainable=True))


def gathered(policy: Policy, layout: Layout, grads: bool) -> dict[str, Tensor]:
    """Whole tensors of all modules: gradients, or weights."""
    if layout.is_family:
        return {n: x.clone() for n, x in (policy.gradients() if grads else policy.weights())}
    whole = dict[str, Tensor]()
    parts = list[tuple]()
    for name, module in policy.modules.items():
        if grads and module.optimizer is None:
            continue
        if name == "llm":
            live, dtype = (module.gradients(), torch.float32) if grads else (module.weights(), None)
            planned = plan_buckets(policy.plan, module.table, dtype)
            whole = {n: x.clone() for n, x in GatheredWeights(planned, live, module.topo)}
            continue
        if grads and policy.plan.optimizer.distributed:
            gather_shards(module.chunks)
        value = (lambda p: p.main_grad) if grads else (lambda p: p)
        parts += towers.pieces(name, module.chunks[0], module.topo, value)
    everyone: list[Any] = [None] * policy.topo.world_size
    dist.all_gather_object(everyone, parts)
    return whole | towers.assembled([piece for part in everyone for piece in part])


def train_steps(plan: Plan, layout: Layout) -> Outcome:
    begun = time.perf_counter()
    with topology.start(plan) as topo:
        policy = build(plan, topo, layout)
        loss = build_loss(plan.objective)
        before = gathered(policy, layout, grads=False)
        out = Outcome([], [], [], [], {})
        for batch in batches(plan, layout):
            schedule = Scheduler(plan).schedule(batch.seqlens)
            shard = towers.image_shard(plan, topo, batch, schedule)
            batch = replace(batch, old_logprobs=rows_scored(policy, shard, batch))
            shard = towers.image_shard(plan, topo, batch, schedule)
            metrics = policy.accumulate(shard, loss)
            out.grads.append(gathered(policy, layout, grads=True))
            metrics |= policy.step_optimizer()
            out.metrics.append(metrics)
            out.losses.append(metrics["loss"])
            out.norms.append(metrics["grad_norm"])
        after = gathered(policy, layout, grads=False)
        out.changes = {name: tensor - before[name] for name, tensor in after.items()}
        out.sent = sent_over_edges(policy)
        out.seconds = time.perf_counter() - begun
    return out


def sent_over_edges(policy: Policy) -> dict[str, list[int]]:
    """Encoder -> bytes of all ranks, there and back."""
    mine = {key: [e.sent["there"], e.sent["back"]] for key, e in policy.edges.items()}
    everyone: list[Any] = [None] * policy.topo.world_size
    dist.all_gather_object(everyone, mine)
    found = {name: [0, 0] for name in policy.plan.grids if name != "llm"}
    for (name, _), sent in ((key, sent) for each in everyone for key, sent in each.items()):
        found[name] = [a + b for a, b in zip(found[name], sent, strict=True)]
    return found


def expected_bytes(plan: Plan, layout: Layout) -> dict[str, list[int]]:
    """Every row goes there twice, for scores and update, and comes back once, unless frozen; to an
    MTP layer, which reads less of it, once, and back if its gradient is wanted."""
    number = 2 if plan.model.dtype == "bfloat16" else 4
    whole = batches(plan, layout)
    found = {kind: [0, 0] for kind in layout.encoders}
    for kind, depth in product(layout.encoders, range(1 + plan.num_mtp_layers)):
        rows = sum(crossing(plan, batch, kind, depth) for batch in whole)
        each = rows * number * (plan.sizes.hidden_size if depth else width_of(plan))
        stays = kind in layout.frozen or (depth and plan.objective.mtp_detach)
        found[kind][0] += each * (1 if depth else 2)
        found[kind][1] += 0 if stays else each
    return found


def crossing(plan: Plan, batch: ImageBatch, kind: str, depth: int) -> int:
    """Rows of images that one rank encodes and another embeds."""
    images = batch.images[kind]
    grid = plan.grids[kind]
    llm = plan.grids["llm"]
    total = sum(row + i >= depth for _, row, n, _ in zip(*images, strict=True) for i in range(n))
    if plan.modules[kind].ranks == "own" or (depth and plan.parallel.pp > 1):
        return total
    schedule = towers.padded(plan, Scheduler(plan).schedule(batch.seqlens))
    lengths = Lengths(np.asarray(batch.seqlens), np.cumsum([0, *batch.seqlens]))
    work = EncoderWork(batch.images[kind], schedule, lengths, grid.parallel.dp)
    for replica, rank in enumerate(grid.ranks):
        at = llm.place(rank)
        role = RankRole(at.dp * llm.parallel.cp + at.cp, at.tp, llm.parallel.tp)
        embedded = RankRows.of(schedule, lengths, role).routers
        encoded = [work.rows(number, replica, depth) for number in range(len(schedule))]
        total -= len(np.intersect1d(np.concatenate(encoded), embedded))
    return total


def on_ranks(group: Any, layouts: list[Layout], folder: Path) -> list[dict]:
    os.environ["WORLD_SIZE"] = str(group.size())
    rows = []
    for layout in layouts:
        faulthandler.dump_traceback_later(STUCK, exit=True)
        mark(layout.title)
        plan = layout.plan(folder)
        got = train_steps(plan, layout)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        if group.rank():
            continue
        want = torch.load(folder / f"{layout.reference}.pt", weights_only=False)
        off = parity.deviations(got, want)
        off["bytes"] = (float(got.sent != expected_bytes(plan, layout)), str(got.sent))
        row = {"layout": layout, "ranks": group.size(), "off": off, "seconds": got.seconds}
        rows.append(row)
        print(line(row), flush=True)
    return rows


def reference(group: Any, layouts: list[Layout], folder: Path) -> None:
    os.environ["WORLD_SIZE"] = "1"
    for layout in layouts:
        if not (path := folder / f"{layout.reference}.pt").exists():
            torch.save(whole_steps(layout.plan(folder, alone=True), layout), path)


def too_far(row: dict) -> list[str]:
    bounds = row["layout"].bounds
    return [f"{n}: {where}" for n, (off, where) in row["off"].items() if not off <= bounds[n]]


def line(row: dict) -> str:
    cells = [f"{row['off'][name][0]:9.1e}" for name in BOUNDS]
    text = f"{row['layout'].title:48s} {row['ranks']:5d} {' '.join(cells)} {row['seconds']:6.1f}"
    return text + (f"   TOO FAR {bad}" if (bad := too_far(row)) else "")


def run(layouts: dict[int, list[Layout]], timeout: float = DEADLINE) -> list[dict]:
    """Rows of the table: one spawn a world size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        run_ranks(reference, 1, [x for some in layouts.values() for x in some], folder)
        for size, some in layouts.items():
            rows += run_ranks(on_ranks, size, some, folder, timeout=timeout)[0]
        return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="world sizes")
    parser.add_argument("--few", action="store_true", help="those that CI runs")
    parser.add_argument("--only", default="", help="layouts whose title contains this")
    options = parser.parse_args(arguments)
    chosen = {n: [x for x in LAYOUTS[n] if options.only in x.title] for n in options.ranks}
    if options.few:
        chosen = {n: [x for x in LAYOUTS[n] if any(f in x.title for f in FEW[n])] for n in FEW}
    print(f"{'layout':48s} ranks {' '.join(f'{n:>9s}' for n in BOUNDS)}  seconds", flush=True)
    rows = run({n: some for n, some in chosen.items() if some})
    bad = [row for row in rows if too_far(row)]
    print(f"{'allowed':54s} {' '.join(f'{b:9.1e}' for b in BOUNDS.values())}")
    print(f"{len(rows)} layouts of modules, {len(bad)} too far from one process")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
