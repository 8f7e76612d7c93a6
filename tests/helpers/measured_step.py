"""Steps of a plan whose memory and phases are measured and compared with the prediction.

One step warms up, one is counted, and one more is timed. Compared are:

weights, gradients, optimizer, reference, engine weights and adapters: bytes of these tensors
(without the padding of gradient buffers).
routes: bytes of the largest microbatch's, and of the whole batch on the host.
activations: most bytes that autograd held for backward passes at a time, each storage once; on
ranks of two modules, of both.
phases: what the tensors above hold as the phase starts, and the most that operators had made on top
of it (what a kernel takes inside is not seen). The prediction is for the rows that were computed.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from pyrl_ext.megatron.optimizer import state_tensors
from pyrl_ext.pack.rank_rows import layout_of
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.memory import Load, StageMemory, stage_memory
from pyrl_ext.train.loop import build_step
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.trainer.prefetch import MicrobatchPrefetcher
from pyrl_ext.trainer.step import Phase


class Saved:
    """The memory that autograd holds for backward passes; ``peak`` is the most bytes at a time.

    Args:
        known: tensors that are held anyway, and not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._users: Counter[int] = Counter()

    @contextmanager
    def watched(self) -> Iterator[Saved]:
        """Counts what is saved inside the ``with`` block."""
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _Held(self, x), lambda h: h.tensor):
            yield self

    def add(self, tensor: Tensor) -> None:
        at, size = _storage(tensor)
        self._users[at] += 1
        if self._users[at] == 1 and at not in self._known:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def drop(self, tensor: Tensor) -> None:
        at, size = _storage(tensor)
        self._users[at] -= 1
        if not self._users[at] and at not in self._known:
            self.bytes -= size


class _Held:
    """A saved tensor, as long as autograd keeps it."""

    def __init__(self, saved: Saved, tensor: Tensor):
        # an output would keep its own graph alive
        self.saved = saved
        self.tensor = tensor.detach()
        saved.add(self.tensor)

    def __del__(self) -> None:
        self.saved.drop(self.tensor)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Live(TorchDispatchMode):
    """Storages that operators make inside ``with Live()``; ``peak`` is the most bytes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):  # older than this, or from outside of torch
            self._seen.setdefault(storage, 0)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._seen:
                size = self._seen[storage] = storage.nbytes() * (storage.device.type != "meta")
                weakref.finalize(storage, self._free, size)
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
        return out

    def _free(self, size: int) -> None:
        self.bytes -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (x.untyped_storage() for x in tree_iter(values) if isinstance(x, Tensor))


@dataclass
class Measured:
    """Bytes of items and phases on this rank, seconds of phases, and what was computed."""

    load: Load
    items: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


PHASE_OF = {  # phase of a step -> phase of the prediction
    "time/publish": "publish",
    "time/rollout": "rollout",
    "time/old_logprobs": "logprobs",
    "time/ref_logprobs": "logprobs",
    "time/teacher_logprobs": "logprobs",
    "time/update": "update",
}


class Bench:
    """A run's step, measured.

    Attributes:
        longest: prompt of the newest step and what may follow it [tokens].
    """

    def __init__(self, plan: Plan, topo: Topology):
        self.plan = plan
        self.topo = topo
        self.step = build_step(plan, topo)
        self.policy = self.step.policy
        self.reference = self.step.reference
        self.longest = 0

    def run(self, number: int, phase: Phase) -> BatchShard:
        """One step as `train` makes it; ``phase`` surrounds each phase of the prediction."""

        def phases(name: str) -> AbstractContextManager:
            return phase(PHASE_OF[name]) if name in PHASE_OF else nullcontext()

        step = self.step
        step.sync_weights(number, phases)
        rollout = step.take(number, phases)
        step.onload(phases)
        self.longest = (
            int((rollout.index.seqlens + 1 - rollout.index.sampled).max())
            + self.plan.rollout.max_new_tokens
        )
        shard, _ = step.score(step.batch_of(rollout, phases), rollout.index, phases)
        step.update(shard, phases)
        return shard

    def held(self) -> dict[str, int]:
        """Item -> bytes that are held all the time."""
        found = tensors_of(self.policy)
        if self.reference is not None:
            for name, module in self.reference.modules.items():
                of = "" if module is self.reference.module else f" of {name}"
                found[f"reference{of}"] = _parameters(module)
        model = getattr(self.step.engine, "model", None)
        if isinstance(model, torch.nn.Module):
            for name, tensor in model.named_parameters():
                kind = "adapters" if ".lora_" in name else "weights"
                found.setdefault(f"engine {kind}", []).append(tensor)
        return {name: sum(x.nbytes for x in tensors) for name, tensors in found.items()}

    def largest(self, shard: BatchShard) -> tuple[int, int]:
        """The microbatch with the most rows on this rank, and their number; the padding of an empty
        microbatch does not count. An encoder's own rank has none."""
        role = shard.role
        if role.grid_rank < 0:
            return 0, 0
        groups = [shard.schedule.group_of(m, role.grid_rank) for m in range(len(shard.schedule))]
        rows = [layout_of(g, shard.lengths, role).num_local if g.samples else 0 for g in groups]
        return rows.index(max(rows)), max(rows)

    def routes(self, shard: BatchShard, number: int) -> int:
        """Bytes of a microbatch's routes, as they come to the device and as routers take them."""
        replay = self.policy.llm.replay
        prefetch = MicrobatchPrefetcher(shard, self.topo, replay, self.plan.replay.train)
        _, ready = next(islice(prefetch.microbatches(0), number, None))
        if (routes := ready.routes) is None:
            return 0
        taken = [x.ids for x in routes.of_layers(replay.layers) if x is not None]
        return sum(x.nbytes for x in (routes.ids, routes.rows, routes.from_engine, *taken))


def tensors_of(policy: Policy) -> dict[str, list[Tensor]]:
    """Item -> its tensors; those of the optimizer are there after its first step."""
    found: dict[str, list[Tensor]] = {}
    for name, module in policy.modules.items():
        of = "" if module is policy.module else f" of {name}"
        weights = found[f"weights{of}"] = _parameters(module)
        if module.optimizer is None:
            continue
        held = {_storage(x)[0] for x in weights}
        parameters = [x for c in module.chunks for x in c.parameters() if x.requires_grad]
        found[f"gradients{of}"] = [x.main_grad for x in parameters]
        found[f"optimizer{of}"] = [
            x
            for x in state_tensors(module.optimizer)
            # in float32 the weights are stepped; a count of steps is no tensor of parameters
            if _storage(x)[0] not in held and x.dim()
        ]
    return found


def _parameters(module: TrainedModule) -> list[Tensor]:
    return [x.detach() for chunk in module.chunks for x in chunk.parameters()]


# Measuring --------------------------------------------------------------------------------------


def measure(plan: Plan, topo: Topology) -> tuple[Measured, StageMemory]:
    """Measure what this rank held and took in a step, next to the prediction for its rows.

    Communicates, Syncs: as steps of the run.
    """
    bench = Bench(plan, topo)
    found = Measured(Load.most(plan))
    bench.run(0, Clock())
    clock = Clock()
    saved = Saved(x for tensors in tensors_of(bench.policy).values() for x in tensors)

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        inner = saved.watched() if name == "update" else nullcontext()
        with _peak(bench, found.phases, name), clock(name), inner:
            yield

    shard = bench.run(1, counted)
    found.items = bench.held()
    number, rows = bench.largest(shard)
    found.load = Load(rows, int(shard.lengths.starts[-1]), bench.longest)
    found.items["activations"] = saved.peak
    clock.take()
    bench.run(2, clock)
    if "routes" in shard.stored:
        found.items["routes of the batch"] = shard.stored["routes"].nbytes
        if plan.replay.train:
            found.items["routes"] = bench.routes(shard, number)
    for name, images in shard.images.items():
        if images.patches is not None:
            found.items["patches of the batch"] = images.patches.nbytes
        if place := topo.of(name):
            work = images.work
            sizes = images.work.images.patches
            each = [sizes[work.ids(m, place.dp_rank)].sum() for m in range(len(work.schedule))]
            most = max(1, int(max(each)))
            keys = plan.modules[name].model_copy(update={"patches_per_microbatch": most})
            plan = plan.model_copy(update={"modules": plan.modules | {name: keys}})
    found.seconds = clock.take()
    stages = [each for each in stage_memory(plan, found.load) if each.module == topo.module]
    return found, stages[topo.pp_rank]


@contextmanager
def _peak(bench: Bench, phases: dict[str, int], name: str) -> Iterator[None]:
    """Put the most bytes held inside the ``with`` block into ``phases``, at ``name``."""
    gc.collect()  # graphs of earlier phases that hold themselves in a circle
    before = sum(bench.held().values())
    with Live() as live:
        yield
    phases[name] = max(phases.get(name, 0), before + live.peak)


def predicted_item(memory: StageMemory, name: str) -> int:
    """Bytes that an item of `Measured.items` is to be compared with."""
    names = [i.name for i in memory.items if name == "activations" and f"{name} of " in i.name]
    return sum(map(memory.bytes_of, (name, *names)))


def report(topo: Topology, found: Measured, memory: StageMemory) -> dict[str, Any]:
    """Predicted and measured, as plain numbers."""
    return {
        "rank": topo.rank,
        "stage": memory.stage,
        "module": memory.module,
        "items": {
            name: {"predicted": predicted_item(memory, name), "measured": size}
            for name, size in found.items.items()
        },
        "phases": {
            name: {
                "predicted": memory.held(name) + memory.held(name, host=True),
                "measured": found.phases[name],
                "seconds": found.seconds[name],
            }
            for name in found.phases  # those of a step
        },
    }
