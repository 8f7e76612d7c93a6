"""The effect of routing replay on language: sampled answers of a model that `upcycle` wrote.

    python -m benchmarks.replay_language build/smollm/moe-8 --engine vllm

In bf16 the engine answers questions in English. The trainer scores the answers three times with the
same weights: its routers choose for themselves, they use these experts again (R2), and they use the
engine's (R3). Agreement is that of the experts with the engine's, and with R3 that of the trainer's
own choice.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from torch import Tensor

from benchmarks.smollm import CONFIG
from benchmarks.tables import show
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.trainer.step import RolloutStep, compare

SHOWN = ("mismatch/k3", "mismatch/abs_mean", "mismatch/ess", "route/agree_topk", "route/exact_set")


def measured(plan: Plan, topo: Topology) -> tuple[int, dict[str, dict[str, float]]]:
    """Number of sampled tokens, and metrics by whose routes the trainer used."""
    clock = Clock()
    step = RolloutStep.build(plan, topo, trainable=False)
    try:
        step.sync_weights(0, clock)
        shard = step.batch_of(step.take(0, clock), clock)
        off = step.policy.scores(shard, replay=False, record=True)
        assert off.recorded is not None
        again = shard.with_routes(plan.router_layers, *off.recorded)
        scores = {
            "off": off,
            "trainer's (R2)": step.policy.scores(again),
            "engine's (R3)": step.policy.scores(shard),
        }
    finally:
        step.close()
    found = {name: compare(shard, each, topo) for name, each in scores.items()}
    agreement = agreement_of(again.columns["routes"], shard.columns["routes"])
    found["off"] |= agreement
    found["trainer's (R2)"] |= agreement
    return int(shard.columns["loss_mask_0"].sum()), found


def agreement_of(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Share of the experts that both have, and of rows in which all are the same.

    Args:
        ours, theirs: [R, L, K] ids.
    """
    shared = (ours[..., :, None] == theirs[..., None, :]).sum((-1, -2))
    topk = ours.shape[-1]
    return {
        "route/agree_topk": float((shared / topk).mean()),
        "route/exact_set": float((shared == topk).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_language")
    parser.add_argument("model", type=Path, help="folder of a model with routers")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--prompts", type=int, default=32, help="two answers each [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer [%(default)s]")
    parser.add_argument("--task", default="syllogism", help="of reasoning-gym [%(default)s]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.yaml")
        config.write_text(CONFIG, encoding="utf-8")
        options = [
            f"run={folder}/run",
            f"model.path={given.model.resolve()}",
            "model.dtype=bfloat16",
            f"rollout.engine={given.engine}",
            f"rollout.max_new_tokens={given.tokens}",
            f"batching.prompts={given.prompts}",
            "batching.samples_per_prompt=2",
            f"data.task=reasoning_gym:{given.task}",
            "data.task_options={}",
            "data.reward=null",  # the scorer of the task
            "data.max_prompt_tokens=256",
        ]
        plan = compile_plan(config, options)
        with topology.start(plan) as topo:
            tokens, found = measured(plan, topo)
    print(
        f"{given.model}, {given.engine} engine, {2 * given.prompts} answers, {tokens} tokens, bf16"
    )
    rows = []
    for mode, metrics in found.items():
        rows.append((mode, *(f"{metrics[name]:.4g}" for name in SHOWN)))
    columns = [name.partition("/")[2] for name in SHOWN]
    show(("routes", *columns), rows)


if __name__ == "__main__":
    main()
