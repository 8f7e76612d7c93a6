"""Every preset under any split of a minibatch, against one process and one microbatch
(`make parity`): microbatches, data-parallel and context-parallel ranks, pipeline stages. And
trajectories of several turns as a sample a turn, or merged to a fork, against one sample each."""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end import index_of
from pyrl_ext.loss.registry import build_advantage, build_loss
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import TeacherHead
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.schema.objective import Objective, presets, with_preset
from pyrl_ext.schedule import Schedule
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.trainer.token_weights import weigh_tokens
from tests import parity
from tests.helpers import forms, passes, tiny
from tests.helpers.deadline import DEADLINE
from tests.helpers.passes import WholeBatch
from tests.helpers.ranks import run_ranks

LENGTHS = (1, 30, 2, 17, 9, 24, 5, 12, 40, 3, 8, 21, 2, 14, 6, 11)
BOUNDS = {"loss": 1e-6, "grad": 2e-5}
MICROBATCHES = (1, 2, 5, 8)
GRIDS = [(dp, cp, 1) for dp in (1, 2, 4) for cp in (1, 2)] + [(1, 1, 2), (1, 2, 2)]
# by world size: dp, cp, pp and microbatches
SPLITS = {
    n: [(*grid, m) for grid in GRIDS if math.prod(grid) == n for m in MICROBATCHES]
    for n in (1, 2, 4, 8)
}
TEACHER_WIDTH = 24
FEW = {1: [(1, 1, 1, 1), (1, 1, 1, 8)], 4: [(2, 2, 1, 5), (1, 2, 2, 5)]}
MORE: dict[str, dict[str, Any]] = {
    "every correction": {
        **{"tis": "sequence", "tis_cap": 1.3, "tis_floor": 0.8, "mask_ratio": [0.5, 2.0]},
        **{"sequence_bounds": [0.9, 1.1], "veto": 0.4, "opsm": 0.02, "kl_coef": 0.1},
    },
    "prompt": {"reduction": "prompt", "loss": "cispo", "ratio": "sequence", "dual_clip": None},
    "a teacher and rewards": {"distill_coef": 0.3, "distill_clip": 0.5, "reduction": "sequence"},
    **{kind: {"distill_coef": 0.3, "distill": kind} for kind in ("forward", "reverse")},
    "kl in the reward": {"kl_coef": 0.1, "kl_in": "reward", "kl": "k2", "advantage": "rloo"},
}
# objectives of trajectories: (rows, group, reward) of each
OF_TURNS = ("grpo", "dapo", "dr_grpo", "cispo", "icepop", "icepop, sequences", "kl in the reward")
TRAJECTORIES = [
    (12, 0, 1.0),
    (30, 0, 0.0),
    (9, 0, 0.5),
    (24, 1, 1.0),
    (5, 2, 0.0),
    (17, 2, 1.0),
    (8, 2, 0.0),
    (21, 2, 1.0),
]


def objectives() -> dict[str, Objective]:
    """Presets with a KL and an entropy bonus, and parts that no preset has."""
    common = {"reduction_constant": 11, "entropy_coef": 0.02, "kl_coef": 0.05}
    named = {name: common | {"preset": name} for name in presets()}
    bounds = {"sequence_bounds": [0.9, 1.1], "veto": 0.4, "tis": "sequence", "tis_cap": 1.3}
    named["icepop, sequences"] = named["icepop"] | bounds | {"reduction": "sequence"}
    sections = {name: with_preset(s) for name, s in (named | MORE).items()}
    return {name: Objective.model_validate(section) for name, section in sections.items()}


def batch_of(plan: Plan, lengths: Sequence[int] = LENGTHS) -> WholeBatch:
    """Samples of so many rows, with all log-probs, and gaps that all corrections see."""
    batch = parity._batch(plan, [*lengths], plan.router_layers, torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)

    def near(base: Tensor, scale: float) -> Tensor:
        return (base + scale * torch.randn(len(base), generator=g)).clamp(max=-0.01)

    old = near(torch.full((len(batch.tokens),), -4.0), 0.5)
    advantages = torch.randn(len(lengths), generator=g)
    return replace(
        batch,
        old_logprobs=old,
        rollout_logprobs=near(old, 0.3),
        ref_logprobs=near(old, 0.3),
        teacher_logprobs=near(old, 0.6),
        teacher_hidden=torch.randn(len(batch.tokens), TEACHER_WIDTH, generator=g),
        advantages=advantages.repeat_interleave(torch.tensor(lengths)),
    )


def teacher_head(plan: Plan) -> TeacherHead:
    """The LM head of a teacher with the policy's vocabulary."""
    size = plan.sizes.vocab_size
    g = torch.Generator().manual_seed(3)
    return TeacherHead(torch.randn(size, TEACHER_WIDTH, generator=g), size)


def schedule_of(samples: int, number: int, dp: int, cp: int) -> Schedule:
    """The samples dealt out to so many microbatches, and in each to its ranks; some get none."""
    places = [(i % number, i // number % dp) for i in range(samples)]
    bins = [
        [[i for i, place in enumerate(places) if place == (m, d)] for d in range(dp)]
        for m in range(number)
    ]
    return tiny.schedule_of(*bins, cp_size=cp)


def result(
    policy: Policy, batch: WholeBatch, index: BatchIndex, objective: Objective, number: int
) -> tuple[dict, dict]:
    """(metrics, gradients) of one minibatch in so many microbatches."""
    plan = policy.plan
    sizes = policy.plan.parallel
    policy.llm.plan = plan.model_copy(update={"objective": objective})
    shard = passes.shard_of(policy, batch, schedule_of(len(index), number, sizes.dp, sizes.cp))
    if objective.compares_distributions and shard.role.last_stage:
        shard = replace(shard, teacher_head=teacher_head(plan))
    advantage = build_advantage(objective)
    shard, weighed = weigh_tokens(shard, index, policy.llm.plan, policy.topo, advantage)
    metrics = policy.accumulate(shard, build_loss(objective))
    policy.llm.plan = plan
    return metrics | weighed, {n: grad.clone() for n, grad in policy.gradients()}


def results(policy: Policy, number: int) -> dict[str, tuple[dict, dict]]:
    """Objective -> its result; with several turns, objective and form."""
    batch = batch_of(policy.plan)
    index = index_of(batch)
    index.groups[:] = [i // 4 for i in range(len(LENGTHS))]
    index.rewards[:] = [i % 3 for i in range(len(LENGTHS))]
    known = objectives()
    found = {name: result(policy, batch, index, o, number) for name, o in known.items()}
    if policy.topo.pp_size > 1:
        return found
    lengths, groups, rewards = zip(*TRAJECTORIES, strict=True)
    whole = batch_of(policy.plan, lengths)
    alone = policy.topo.world_size == number == 1
    for form in forms.FORMS if alone else forms.FORMS[1:]:
        samples, rows = forms.cut(whole, groups, rewards, form)
        for name in OF_TURNS:
            parts = forms.batch_of(whole, samples, rows, build_advantage(known[name]))
            found[f"{name}, {form}"] = result(policy, *parts, known[name], number)
    return found


def on_ranks(group: Any, splits: list[tuple[int, int, int, int]], folder: Path) -> list[dict]:
    os.environ["WORLD_SIZE"] = str(group.size())
    rows_found: list[dict] = []
    for dp, cp, pp, number in splits:
        sizes = (f"parallel.dp={dp}", f"parallel.cp={cp}", f"parallel.pp={pp}")
        plan = parity.compiled("qwen", folder, sizes)
        with topology.start(plan) as topo:
            got = results(Policy.build(plan, topo), number)
        if group.rank():
            continue
        path = folder / "one.pt"
        if not path.exists():
            torch.save(got, path)
        want = torch.load(path, weights_only=False)
        for name, (metrics, grads) in got.items():
            objective, _, form = name.rpartition(", ")
            losses, whole = want[f"{objective}, concatenated" if form in forms.FORMS else name]
            off = max((abs(metrics[m] - losses[m]), m) for m in losses)
            grad = max((parity.apart(grads[n], whole[n]), n) for n in whole)
            row = {"name": name, "dp": dp, "cp": cp, "pp": pp, "microbatches": number}
            row |= {"loss": off, "grad": grad}
            rows_found.append(row)
            print(line(row), flush=True)
            assert math.isfinite(grad[0]) and any(bool(g.any()) for g in whole.values()), name
    return rows_found


def line(row: dict) -> str:
    text = (
        f"{row['name']:31s} {row['dp']:3d} {row['cp']:3d} {row['pp']:3d} {row['microbatches']:13d}"
    )
    text += f" {row['loss'][0]:9.1e} {row['grad'][0]:9.1e}"
    return text + (f"   TOO FAR {row['loss'][1]}, {row['grad'][1]}" if too_far(row) else "")


def too_far(row: dict) -> bool:
    return any(not row[name][0] <= bound for name, bound in BOUNDS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="the splits of CI")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="world sizes")
    options = parser.parse_args(arguments)
    table = FEW if options.few else {n: SPLITS[n] for n in sorted({1, *options.ranks})}
    print(f"{'objective':31s}  dp  cp  pp  microbatches      loss      grad", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for ranks, splits in table.items()
            for row in run_ranks(on_ranks, ranks, splits, Path(folder), timeout=DEADLINE)[0]
        ]
    far = [line(row) for row in rows if too_far(row)]
    worst = ", ".join(f"{name} {max(row[name][0] for row in rows):.1e}" for name in BOUNDS)
    print(f"{len(rows)} rows, {len(far)} too far from one process and one microbatch; {worst}")
    return bool(far)


if __name__ == "__main__":
    sys.exit(main())
