"""The tiny model's plan and batches of random rows: what the tests of the trainer start from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.batch import Batch
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.schedule import Group, Schedule
from tests.helpers.passes import WholeBatch

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"
QWEN3 = CONFIG.with_name("tiny_qwen3.yaml")
LAYERS = (1, 2, 3)
EXPERTS = 8
TOPK = 2
QUICK = (  # a training step in a second
    "batching.prompts=4",
    "batching.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "evaluate.prompts=8",
    "log.progress=false",
)


def tiny_plan(*overrides: str, config: Path = CONFIG) -> Plan:
    """configs/tiny.yaml with ``section.key=value`` overrides, through the real compiler."""
    return compile_plan(config, overrides)


def one_rank(plan: Plan) -> Topology:
    """Rank 0 of the plan's grid, without process groups: what a config is made from."""
    sizes: dict[str, Any] = {
        axis: getattr(plan.parallel, axis) for axis in ("dp", "tp", "pp", "cp", "ep")
    }
    return Topology(
        device=torch.device("cpu"),
        grid=plan.grids["llm"],
        grids=plan.grids,
        world_size=plan.world_size,
        rank=0,
        etp_size=plan.parallel.etp_size,
        vpp_size=plan.parallel.vpp,
        **{f"{axis}_size": size for axis, size in sizes.items()},
        dp_rank=0,
        tp_rank=0,
        pp_rank=0,
        cp_rank=0,
        groups=None,
        cp_groups={},
        hosts=(0,),
        make_group=_no_group,
    )


def _no_group(role: str, ranks: Sequence[int]) -> Any:
    """Nothing communicates on a topology without processes."""


def schedule_of(*bins: Sequence[Sequence[int]], cp_size: int = 1) -> Schedule:
    """One microbatch for each of ``bins`` ([dp rank] -> sample ids)."""
    microbatches = (
        tuple(Group(i * cp_size, cp_size, tuple(ids)) for i, ids in enumerate(each))
        for each in bins
    )
    return Schedule(len(bins[0]) * cp_size, tuple(microbatches))


def random_routes(rows: int, generator: torch.Generator) -> Tensor:
    """[rows, L, K] uint8, distinct experts in each (row, layer)."""
    scores = torch.rand(rows, len(LAYERS), EXPERTS, generator=generator)
    return scores.argsort(-1)[..., :TOPK].to(torch.uint8)


def random_batch(samples: int = 21, seed: int = 0, unrouted: float = 0.1) -> WholeBatch:
    """Sequences of 1 to 23 rows; a share ``unrouted`` of the rows has no route."""
    g = torch.Generator().manual_seed(seed)
    seqlens = tuple(torch.randint(1, 24, (samples,), generator=g).tolist())
    rows = sum(seqlens)
    return WholeBatch(
        seqlens=seqlens,
        tokens=torch.randint(3, 128, (rows,), generator=g),
        targets=torch.randint(3, 128, (rows,), generator=g),
        loss_mask=torch.rand(rows, generator=g) > 0.4,
        rollout_logprobs=-4 - torch.rand(rows, generator=g),
        advantages=torch.randn(rows, generator=g),
        routes=random_routes(rows, g),
        layer_ids=LAYERS,
        route_mask=torch.rand(rows, generator=g) >= unrouted,
    )


def random_sets(batch: Batch, largest: int, generator: torch.Generator) -> KeptSets:
    """One to ``largest`` tokens for each loss token, itself among them; none for other rows."""
    counts = list[int]()
    ids = list[int]()
    for target, mask in zip(batch.targets.tolist(), batch.loss_mask.tolist(), strict=True):
        size = int(torch.randint(0, largest, (), generator=generator))
        each = {target, *torch.randint(3, 128, (size,), generator=generator).tolist()}
        counts.append(len(each) if mask else -1)
        ids += sorted(each) if mask else []
    return KeptSets(*(torch.tensor(x, dtype=torch.int32) for x in (counts, ids)))
