"""Growth with the number of ranks: host memory, traffic, the store and start-up, by count.

The layout keeps its tp, pp, cp, ep and etp, and dp grows; so does that of encoders with ranks for
themselves. Samples have the lengths of `workload.step_samples`. `tests/scale.py` compares
the counts with ranks that run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pyrl_ext.plan.forecast.encoder import encoder_parameters
from pyrl_ext.plan.forecast.lora import published_numbers
from pyrl_ext.plan.forecast.parameters import (
    copies,
    rank_parameters,
    stage_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.forecast.workload import Sample, step_samples
from pyrl_ext.plan.groups import WORLD, groups_of
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.plan import Plan

WORLDS = (8, 64, 512, 4096)

# Bytes of one row of a batch: on every stage, of a target (one more with every MTP layer), on the
# last stage, and of a row that a router sees, besides top-k experts of every layer.
TOKEN = 4
TARGET = 4 + 1
LOSS = {"log-prob of the engine": 4, "advantage": 4}
ROUTE_MASK = 1
KEPT_ID = 4  # of a kept set, and its size
INDEX_BYTES = 57
MTP_BYTES = 4
"""The numbers of one sample that all ranks know; with every MTP layer."""
EXCHANGE_PARTS = 4
"""Messages of an owner to a rank, at most: `pack.exchange.PARTS`."""
OBJECT_BYTES = 24
"""A small pickled tuple in an all-gather, which also sends its size in 8 bytes."""
METRICS = 13
"""Metrics of the loss, each a sum and a count in float64."""
HEARTBEAT_KEYS = 3
"""Keys that a rank other than rank 0 reads, in `parallel.heartbeat`."""


class Row(NamedTuple):
    """One quantity of a rank, or of the store, by number of ranks."""

    part: str
    name: str
    unit: str
    values: tuple[float | None, ...]
    """None where the layout does not fit that many ranks."""
    why: str
    """The source of the number, and the reason if it grows."""

    @property
    def growth(self) -> Literal["no", "log", "yes"]:
        """True if the number grows with the ranks, at the largest numbers of them."""
        known = [(w, v) for w, v in zip(WORLDS, self.values, strict=True) if v is not None]
        if len(known) < 2 or known[-1][1] <= known[-2][1] * 1.05:
            return "no"
        (few, before), (many, after) = known[-2:]
        return "log" if after <= before * math.log2(many) / math.log2(few) else "yes"


@dataclass(frozen=True)
class World:
    """A plan on some number of ranks."""

    plan: Plan
    """With `dp` of that number."""
    samples: tuple[Sample, ...]
    """The samples that a step of the given plan has."""
    times: float = 1.0
    """Samples of a step, for each of `samples`."""

    @classmethod
    def of(cls, plan: Plan, ranks: int, grows: bool, samples: Sequence[Sample]) -> World | None:
        """`plan` with `ranks` ranks of the language model and those of its encoders; None: the
        layout does not fit them.

        Args:
            plan: as given
            ranks: of the language model; encoders with ranks for themselves grow in proportion
            grows: the batch is in proportion to dp; otherwise it stays as it is
            samples: of a step of `plan`
        """
        given = plan.parallel
        dp, odd = divmod(ranks, given.tp * given.pp * given.cp)
        if odd or ranks % (given.pp * given.ep * given.etp_size):
            return None
        parallel = given.model_copy(update={"dp": dp})
        modules = {
            name: each.model_copy(
                update={"parallel": each.parallel.model_copy(update={"dp": more})}
            )
            for name, each in plan.modules.items()
            for more in [math.ceil(each.parallel.dp * dp / given.dp)]
            if each.ranks == "own"
        }
        update = {"parallel": parallel, "modules": plan.modules | modules}
        moved = plan.model_copy(update=update)
        return cls(moved, tuple(samples), dp / given.dp if grows else 1.0)

    @property
    def ranks(self) -> int:
        """Ranks of all modules."""
        return self.plan.world_size

    @property
    def llm_ranks(self) -> int:
        """Ranks of the language model, which hold engines."""
        return self.plan.parallel.world_size

    @property
    def grid(self) -> int:
        """Data- times context-parallel ranks: each computes as many rows."""
        return self.plan.parallel.dp * self.plan.parallel.cp

    @cached_property
    def rows(self) -> float:
        """Rows of the step's samples."""
        return self.times * sum(sample.rows for sample in self.samples)

    @property
    def number(self) -> float:
        """Samples of the step."""
        return self.times * len(self.samples)

    def route_bytes(self, layers: int) -> float:
        """The experts of one row in so many layers."""
        if not self.replays:
            return 0.0
        return self.plan.sizes.route_bytes_per_token / len(self.plan.router_layers) * layers

    @property
    def replays(self) -> bool:
        """True if rows have routes."""
        return self.plan.replay.enabled and bool(self.plan.router_layers)

    # The batch ----------------------------------------------------------------------------------

    @property
    def generated_bytes(self) -> float:
        """Rows that this rank's engine generated, with the routes of all layers."""
        engines = self.llm_ranks / (1 if self.plan.remote_engines else self.plan.rollout.tp)
        routed = ROUTE_MASK + self.route_bytes(len(self.plan.router_layers))
        loss = sum(LOSS.values()) + self.kept_bytes(1)
        return self.rows / engines * (self.token_bytes + loss + routed)

    def kept_bytes(self, tp: int) -> float:
        """A row's kept set, its size and ``top_k`` ids of which a shard has an equal part; a plan
        without ``top_k`` has a note."""
        if not self.plan.trains_on_sampling_mask:
            return 0.0
        return KEPT_ID + KEPT_ID * self.plan.rollout.top_k / tp

    @property
    def token_bytes(self) -> int:
        """A row's token and targets."""
        return TOKEN + TARGET * (1 + self.plan.num_mtp_layers)

    def row_bytes(self, stage: int) -> float:
        """A row of a rank of a stage; its routers see a tensor-parallel part of the rows."""
        routers = set(self.plan.router_layers)
        chunks = self.plan.stages[stage]
        layers = sum(layer in routers for chunk in chunks for layer in chunk.layers)
        routed = ROUTE_MASK + self.route_bytes(layers) if layers and self.replays else 0
        loss = sum(LOSS.values()) + self.kept_bytes(self.plan.parallel.tp)
        loss *= stage == self.plan.parallel.pp - 1
        return self.token_bytes + loss + routed / self.plan.parallel.tp

    @property
    def computed_bytes(self) -> float:
        """Rows that a rank of the fullest stage computes."""
        return self.rows / self.grid * max(map(self.row_bytes, range(self.plan.parallel.pp)))

    @property
    def batch_bytes(self) -> float:
        return self.generated_bytes + self.computed_bytes

    @property
    def exchange_bytes(self) -> float:
        """Received from other hosts: rows of the same host are read from shared memory."""
        here = min(1.0, self.plan.hardware.gpus_per_node / self.ranks)
        return self.computed_bytes * (1 - here)

    @property
    def exchange_messages(self) -> float:
        """A message of each part from each rank of another host that generated samples of it."""
        others = EXCHANGE_PARTS * max(0, self.ranks - self.plan.hardware.gpus_per_node)
        return min(others, math.ceil(self.number * self.plan.parallel.cp / self.grid))

    @property
    def index_bytes(self) -> float:
        return (INDEX_BYTES + MTP_BYTES * self.plan.num_mtp_layers) * self.number

    @property
    def index_head_bytes(self) -> int:
        """Sent by a rank before its samples: their number and layers, and discarded tokens."""
        layers = len(self.plan.router_layers) if self.replays else 0
        return 4 * 4 + 2 * layers + 8 * self.plan.has_rollouts

    @property
    def gathered_index_bytes(self) -> float:
        """The numbers of every rank's samples, and their size; all ranks send as much as the one
        with most samples, which generates whole groups."""
        group = self.plan.batching.samples_per_prompt or 1
        most = group * math.ceil(self.number / group / self.llm_ranks)
        each = self.index_bytes / self.number * most
        return self.ranks * (8 + self.index_head_bytes + each)

    @property
    def schedule_bytes(self) -> float:
        """An id of every sample, and a group of every microbatch and group of ranks."""
        batching = self.plan.batching
        rows = self.rows / batching.minibatches / self.grid
        each = math.ceil(rows / batching.tokens_per_microbatch) * batching.minibatches
        return 40 * self.number + 136 * each * self.plan.parallel.dp

    # Traffic ------------------------------------------------------------------------------------

    @cached_property
    def reduced(self) -> list[tuple[int, int]]:
        """(parameters, ranks that hold them) of the summed gradients, on the fullest stage."""
        trained = (trained_of_stage(self.plan, stage) for stage in range(self.plan.parallel.pp))
        stages = [rank_parameters(self.plan, each) for each in trained]
        held = max(stages, key=lambda stage: stage.total)
        pairs = zip(held, copies(self.plan), strict=True)
        return [(count, ranks) for count, ranks in pairs if count and ranks > 1]

    @property
    def gradient_bytes(self) -> float:
        """A ring sends each part (n - 1) / n times, twice unless parts stay where they are."""
        passes = self.plan.batching.minibatches * (1 if self.plan.optimizer.distributed else 2)
        return passes * sum(4 * count * (n - 1) / n for count, n in self.reduced)

    @property
    def weight_bytes(self) -> float:
        """Weights that the optimizer updated, to the ranks that hold them too."""
        passes = self.plan.batching.minibatches * self.plan.optimizer.distributed
        each = DTYPE_BYTES[self.plan.model.dtype]
        return passes * sum(each * count * (n - 1) / n for count, n in self.reduced)

    @property
    def gradient_messages(self) -> float:
        """A ring takes n - 1 steps each way, for dense parameters and for experts."""
        minibatches = self.plan.batching.minibatches
        chunks = self.plan.parallel.vpp_size
        return 2 * minibatches * chunks * sum(n - 1 for _, n in self.reduced)

    @property
    def publish_bytes(self) -> float:
        """The part of the whole model that a rank does not hold itself."""
        if not self.plan.has_rollouts:
            return 0
        whole = parameters(self.plan.sizes).total
        sent = published_numbers(self.plan)
        total = sent + encoder_parameters(self.plan)
        held = max(rank_parameters(self.plan, stage).total for stage in stage_parameters(self.plan))
        held = held * sent // whole
        return DTYPE_BYTES[self.plan.model.dtype] * (total - min(held, total))

    @property
    def agreement_bytes(self) -> float:
        return self.ranks * (OBJECT_BYTES + 8)

    @property
    def metrics_bytes(self) -> float:
        """Sums of the loss's metrics and of replay, twice around a ring."""
        layers = self.plan.sizes.num_hidden_layers + self.plan.num_mtp_layers
        replay = 32 * layers if self.plan.replay.enabled else 0
        return 2 * (self.plan.batching.minibatches * 16 * METRICS + replay)

    # The store and start-up ---------------------------------------------------------------------

    @property
    def keys_read(self) -> float:
        return HEARTBEAT_KEYS if self.ranks > 1 else 0

    @cached_property
    def groups(self) -> list[int]:
        """Ranks of every group that the first rank is in, each made by its members alone."""
        made = (group for group in groups_of(self.plan, 0) if WORLD not in group.roles)
        return [len(group.ranks) for group in made]

    @property
    def group_entries(self) -> float:
        """Ranks of all groups that a rank is in, with the world."""
        return self.ranks + sum(self.groups)

    @property
    def start_requests(self) -> float:
        """To every group and the world its own address, and those of the others."""
        return self.group_entries


BATCH = "host memory of a rank"
STEP = "sent by a rank in a step"
STORE = "the store, every second"
START = "start-up of a rank"
DICT_BYTES = 100
"""An entry in a dictionary of ranks, about."""

Quantity = tuple[str, str, str, Callable[[World], float], str]
QUANTITIES: tuple[Quantity, ...] = (
    (BATCH, "rows of the batch", "byte", lambda w: w.batch_bytes,
     "those that it generated and those that it computes: tokens, masks, log-probs, routes"),
    (BATCH, "numbers of samples", "byte", lambda w: w.index_bytes,
     f"{INDEX_BYTES} bytes a sample: every rank plans the whole batch, so that no plan is sent"),
    (BATCH, "~ schedule", "byte", lambda w: w.schedule_bytes,
     "the same on every rank: an id a sample, and the groups of every microbatch, dp of them"),
    (BATCH, "~ ranks of its groups", "byte", lambda w: DICT_BYTES * w.group_entries,
     "torch keeps the ranks of every group that a rank is in, once in a run"),
    (STEP, "gradients", "byte", lambda w: w.gradient_bytes,
     "between GPUs, in float32; a ring's share (n - 1) / n approaches 1"),
    (STEP, "gradients", "message", lambda w: w.gradient_messages,
     "between GPUs, if a ring sums them: n - 1 steps each way; NCCL takes trees, 2 log2 n, where "
     "they are faster"),
    (STEP, "updated weights", "byte", lambda w: w.weight_bytes,
     "between GPUs, with the distributed optimizer"),
    (STEP, "weights for the engine", "byte", lambda w: w.publish_bytes,
     "between GPUs: gathered over tp, ep and pp, which stay as they are"),
    (STEP, "from other hosts", "byte", lambda w: w.exchange_bytes,
     "between hosts: rows that a rank computes; from its own host they come by shared memory"),
    (STEP, "from other hosts", "message", lambda w: w.exchange_messages,
     f"between hosts: from each rank that generated a sample of this one's, {EXCHANGE_PARTS} at "
     "most"),
    (STEP, "~ numbers of samples", "byte", lambda w: w.gathered_index_bytes,
     "between hosts: an all-gather of all of them, and of 24 bytes and the layers with routes of "
     "every rank"),
    (STEP, "numbers of samples", "message", lambda w: w.ranks - 1,
     "between hosts: gloo's all-gather is a ring; the bytes do not grow with its steps"),
    (STEP, "~ which ranks failed", "byte", lambda w: w.agreement_bytes,
     "between hosts: an all-gather of a line of text of each rank, if it failed, and a checksum"),
    (STEP, "~ metrics", "byte", lambda w: w.metrics_bytes,
     "sums, however many ranks add to them"),
    (STORE, "read by a rank", "key", lambda w: w.keys_read,
     "the heartbeat of rank 0, and two keys of all ranks, in one request"),
    (STORE, "by all ranks", "request", lambda w: 2 * w.ranks if w.ranks > 1 else 0,
     "two a rank: its heartbeat, and what it reads; one process answers tens of thousands"),
    (START, "groups that it makes", "call", lambda w: len(w.groups),
     "those that it is in, one for all kinds of the same ranks: members make them alone"),
    (START, "to the store", "request", lambda w: w.start_requests,
     "the address of every rank in its groups"),
    (START, "by all ranks", "request", lambda w: w.ranks * w.start_requests,
     "to the store, one process: once for every rank"),
    (START, "connections of gloo", "socket", lambda w: w.group_entries,
     "one to every other rank of a group, one that listens; with TORCH_GLOO_LAZY_INIT=1 only to "
     "ranks that it sends to, but a dead one is noticed late, so it is no default"),
)  # fmt: skip


GROWING = " *"
"""Ends the part of a row whose batch is in proportion to dp."""


def scale(plan: Plan) -> tuple[Row, ...]:
    """Every quantity at each of `WORLDS`: with the plan's batch at every number of ranks; then
    those that differ if the batch is in proportion to dp."""
    samples = step_samples(plan)
    same, growing = (_rows(plan, samples, grows) for grows in (False, True))
    pairs = zip(same, growing, strict=True)
    differ = (many for one, many in pairs if one.values != many.values)
    return (*same, *(row._replace(part=row.part + GROWING) for row in differ))


def _rows(plan: Plan, samples: Sequence[Sample], grows: bool) -> list[Row]:
    worlds = [World.of(plan, ranks, grows, samples) for ranks in WORLDS]
    return [
        Row(part, name, unit, tuple(w and of(w) for w in worlds), why)
        for part, name, unit, of, why in QUANTITIES
    ]
