"""The list of process groups that a rank is in: the run makes them, and the forecast counts them.

NCCL gives each group whose tensors are on GPUs a communicator, with buffers on every member, at its
first use. So groups of the same ranks are one group, unless two threads or two kinds of messages
use them at the same time (`Role.own`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.cp_sizes import cp_group, cp_sizes

# Groups that carry numbers of the host only, or that megatron-core asks for and never uses with the
# layers and losses that a plan may have.
HOST_ONLY = ("dp", "tp_cp")
# Norms of gradients are summed in one of these: with a distributed optimizer in the first.
WITH_DISTRIBUTED = ("intra_dist_opt",)
WITHOUT_DISTRIBUTED = ("mp", "tp_ep_pp")
# Gradients are reduced in these, with optimizer.overlap_grad_reduce during a backward pass.
REDUCED = ("dp_cp", "expt_dp")

# torch's group of all ranks. Its only messages on devices are unbatched ones between two ranks.
WORLD = "world"


class Role(NamedTuple):
    """One purpose of a group."""

    name: str
    """Module and kind, such as ``llm dp_cp``."""
    ranks: tuple[int, ...]
    """Rising."""
    on_device: bool = True
    """True if it carries tensors on the device."""
    own: bool = False
    """True if no other role may use its group, although the ranks are the same."""
    pairs: tuple[tuple[int, int], ...] = ()
    """This rank and each that it sends to without a batch: each pair has a communicator, too."""


@dataclass(frozen=True)
class RankGroup:
    """A process group of some ranks for one or several roles.

    Args:
        ranks: rising.
        roles: names of what it is for, in the order of the list.
        on_device: True if it carries tensors on the device.
        pairs: as for `Role`.
    """

    ranks: tuple[int, ...]
    roles: tuple[str, ...]
    on_device: bool
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def communicators(self) -> int:
        """Number of NCCL communicators with buffers. That of a rank alone has none: NCCL copies."""
        return (self.on_device and len(self.ranks) > 1) + len(self.pairs)


class Foreign(NamedTuple):
    """A communicator that vLLM makes in the trainer's process, or that weights are sent through."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the trainer."""
    suspended: bool = False
    """True if its memory is free while the engine sleeps."""


def groups_of(plan: Plan, rank: int) -> tuple[RankGroup, ...]:
    """The groups that `rank` is in, in the order in which all ranks make them and first use them.

    Two ranks that share two groups have them in the same order: it is that of the roles, which is
    the same on all ranks, and a rank is in one group at most for each role.
    """
    merged: dict[tuple[tuple[int, ...], str], list[Role]] = {}
    for role in roles_of(plan, rank):
        alone = role.own and len(role.ranks) > 1  # a rank alone sends to nobody
        merged.setdefault((role.ranks, role.name if alone else ""), []).append(role)
    return tuple(
        RankGroup(
            ranks,
            tuple(role.name for role in roles),
            any(role.on_device for role in roles),
            tuple(pair for role in roles for pair in role.pairs),
        )
        for (ranks, _), roles in merged.items()
    )


def roles_of(plan: Plan, rank: int) -> Iterator[Role]:
    """The roles that `rank` has a part in, in order."""
    for grid in plan.grids.values():
        if rank in grid.ranks:
            yield from _roles_in(plan, grid, rank)
    for role in _roles_between(plan):
        if rank in role.ranks:
            yield role
    if pairs := _pairs_of_two_stages(plan, rank):
        yield Role(WORLD, tuple(range(plan.world_size)), False, True, pairs)


def communicators(plan: Plan, rank: int) -> int:
    """Number of NCCL communicators of `groups_of`."""
    return sum(group.communicators for group in groups_of(plan, rank))


def foreign(plan: Plan, rank: int) -> tuple[Foreign, ...]:
    """Communicators of `rank` that are not those of `groups_of`, on GPUs."""
    if plan.device != "cuda" or not plan.has_rollouts:
        return ()
    rollout = plan.rollout
    inside = plan.transport == "inprocess"
    if rollout.transport == "broadcast" or plan.transport == "broadcast":
        holds = plan.engine_of_rank[rank] is not None
        sends = rank < rollout.senders if plan.remote_engines else holds
        return (Foreign("sender", (rank,)),) if sends else ()
    if (
        rollout.engine != "vllm"
        or not inside
        or rollout.tp == 1
        or rank not in plan.grids["llm"].ranks
    ):
        return ()
    first = rank // rollout.tp * rollout.tp
    ranks = tuple(range(first, first + rollout.tp))
    options = rollout.engine_options
    suspended = plan.engine_sleeps and options.get("enable_nccl_comm_suspend") is True
    found = [Foreign("vllm tp", ranks), Foreign("vllm tp PyNccl", ranks, suspended)]
    if plan.sizes.num_experts:
        found.append(Foreign("vllm ep PyNccl", ranks, suspended))
    if options.get("enable_expert_parallel"):
        found.append(Foreign("vllm ep", ranks))
    return tuple(found)


# inside a module ---------------------------------------------------------------------------------


def _roles_in(plan: Plan, grid: Grid, rank: int) -> Iterator[Role]:
    """Every kind of group of a module's grid, the sizes of dynamic context parallelism, and the
    stages that hold the same embedding."""
    unused = {*HOST_ONLY, *_unused_norms(plan)}
    for kind, ranks in grid.groups_of(rank).items():
        pairs = tuple[tuple[int, int], ...]()
        if kind == "pp" and grid.parallel.vpp is not None:
            pairs = neighbours(ranks, rank)  # megatron sends in batches but in this schedule
        elif kind == "cp":
            pairs = _ring(plan, ranks, rank)
        own = kind in REDUCED and _overlaps(plan, grid)
        yield Role(f"{grid.name} {kind}", ranks, kind not in unused, own, pairs)
    for size, ranks in dynamic_cp_groups(grid, rank).items():
        yield Role(f"{grid.name} cp {size}", ranks, pairs=_ring(plan, ranks, rank))
    embedding = embedding_ranks(plan, grid, rank)
    if rank in embedding:
        yield Role(f"{grid.name} embd", embedding)


def _pairs_of_two_stages(plan: Plan, rank: int) -> tuple[tuple[int, int], ...]:
    """Between two stages of several chunks each megatron sends one way in the pipeline's group, and
    the other way in that of all ranks, so that neither waits (p2p_communication.py:75)."""
    llm = plan.grids["llm"]
    if rank not in llm.ranks or llm.parallel.vpp is None or llm.parallel.pp != 2:
        return ()
    return neighbours(llm.group(rank, "pp"), rank)


def _overlaps(plan: Plan, grid: Grid) -> bool:
    """True if the module reduces gradients during its backward pass; on shared ranks none does."""
    shared = grid.name != "llm" and plan.modules[grid.name].ranks == "shared"
    return plan.optimizer.overlap_grad_reduce and not shared


def _unused_norms(plan: Plan) -> tuple[str, ...]:
    return WITHOUT_DISTRIBUTED if plan.optimizer.distributed else WITH_DISTRIBUTED


def dynamic_cp_groups(grid: Grid, rank: int) -> dict[int, tuple[int, ...]]:
    """Size -> the context-parallel group of `rank` of each of the `cp_sizes` that a microbatch may
    take, without the smallest, which is the grid's.

    A group of c ranks holds neighbours in the grid of data- and context-parallel ranks, from a
    multiple of c on. Ranks behind the last multiple are in no group of c.
    """
    smallest = grid.parallel.cp
    dynamic = grid.parallel.dynamic_cp
    ranks = grid.group(rank, "dp cp")
    found = dict[int, tuple[int, ...]]()
    at = ranks.index(rank)
    count = len(ranks)
    for size in cp_sizes(count, smallest, dynamic or smallest)[1:]:
        members = cp_group(at, count, size)
        if len(members) == size:
            found[size] = tuple(ranks[i] for i in members)
    return found


def embedding_ranks(plan: Plan, grid: Grid, rank: int) -> tuple[int, ...]:
    """Ranks of the pipeline of `rank` that hold the same embedding, whose gradients are summed.

    The first stage, the stage with MTP layers, and the last if its output is tied. (megatron's
    default is the first and the last: it would add the gradients of an embedding and an output.)
    """
    if grid.name != "llm":
        return ()
    tied = plan.sizes.tie_word_embeddings
    holders = (any(s.embedding or s.mtp or (s.loss and tied) for s in c) for c in plan.stages)
    pipeline = grid.group(rank, "pp")
    return tuple(each for each, holds in zip(pipeline, holders, strict=True) if holds)


def _ring(plan: Plan, ranks: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """Transformer Engine hands keys and values round a ring, not in batches if it has 3 or more."""
    around = plan.model.te_attention == "p2p" and len(ranks) > 2
    return neighbours(ranks, rank) if around else ()


def neighbours(ranks: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """The pairs that `rank` is in if `ranks` form a ring, rising; none for a rank alone."""
    at = ranks.index(rank)
    others = {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {rank}
    return tuple(sorted((min(rank, other), max(rank, other)) for other in others))


# between modules ---------------------------------------------------------------------------------


def _roles_between(plan: Plan) -> Iterator[Role]:
    """Weights on their way to engines of other ranks, edges of encoders, numbers of the ranks that
    hold an engine together, and a thread's numbers."""
    everyone = tuple(range(plan.world_size))
    for ranks in engine_ranks(plan) if plan.has_rollouts else ():
        yield Role("engine", ranks, on_device=False)
    if len(plan.grids) > 1:
        for grid in plan.grids.values() if plan.has_rollouts else ():
            others = (rank for rank in everyone if rank not in grid.ranks)
            ranks = (grid.first, *others)
            if len(ranks) > 1:
                yield Role(f"{grid.name} outward", tuple(sorted(ranks)))
        yield from _edges(plan)
    if plan.has_rollouts and plan.rollout.syncs_weights_in_background and plan.world_size > 1:
        yield Role("publish", everyone, on_device=False, own=True)  # of a thread


def engine_ranks(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The ranks of each rollout engine that several ranks hold together."""
    held = plan.engine_of_rank
    for number in sorted({engine for engine in held if engine is not None}):
        ranks = tuple(rank for rank, engine in enumerate(held) if engine == number)
        if len(ranks) > 1:
            yield ranks


def _edges(plan: Plan) -> Iterator[Role]:
    """One group a direction of each edge (`trainer/module_pipe.py`), so that neither waits for the
    other."""
    for grid in plan.grids.values():
        if grid.name == "llm":
            continue
        sources = source_ranks(grid)
        for depth in range(1 + plan.num_mtp_layers):
            ranks = tuple(sorted({*sources, *reading_ranks(plan, depth)}))
            for way in ("there", "back"):
                yield Role(f"{grid.name} {depth} {way}", ranks, own=True)


def source_ranks(encoder: Grid) -> list[int]:
    """The rank of each replica of an encoder that sends: the first one of the last stage."""
    last = encoder.parallel.pp - 1
    return [encoder.rank_of(dp=d, pp=last) for d in range(encoder.parallel.dp)]


def reading_stage(plan: Plan, depth: int) -> int:
    """The stage of the language model that embeds what an encoder sends: the first one, or with a
    `depth` the one with the MTP layers."""
    if not depth:
        return 0
    return next(i for i, chunks in enumerate(plan.stages) if any(c.mtp for c in chunks))


def reading_ranks(plan: Plan, depth: int) -> tuple[int, ...]:
    """Ranks of `reading_stage`."""
    llm = plan.grids["llm"]
    return llm.group(llm.rank_of(pp=reading_stage(plan, depth)), "dp cp tp")
