"""The effect of routing replay on the mismatch of engine and trainer.

`python -m benchmarks.replay_effect [--engine vllm]`: a run in bf16, where the two round apart. At
every step the same samples are scored by the same weights twice, with the engine's routes forced
and with the routers choosing for themselves, so that nothing but the routing differs between the
columns. The model has GLM-4.7-Flash's routing (64 experts, 4 of them a token, in every layer but
the first) at the tiny model's width. Its random weights give nearly flat distributions, in which no
token's probability can double; those of `--std 0.2` are sharp enough for it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from rich.progress import track

from benchmarks.configs import TINY, hf_config, write_config
from benchmarks.tables import show
from pyrl_ext.metrics.mismatch import mismatch
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.trainer.policy import Scores
from pyrl_ext.trainer.step import RolloutStep

MODEL = {
    "num_hidden_layers": 8,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
}
SHOWN = ("k3", "abs_mean", "p99", "max", "prob_abs_mean", "f2")


def run_steps(
    plan: Plan, topo: Topology, steps: int
) -> tuple[list[dict], list[dict], list[Scores]]:
    """Mismatch without and with replay of each step's samples, and the replayed scores."""
    step = RolloutStep.build(plan, topo)
    clock = Clock()
    native = []
    replayed = []
    scores = []
    for number in track(range(steps), "steps"):
        step.sync_weights(number, clock)
        rollout = step.take(number, clock)
        shard = step.batch_of(rollout, clock)
        own = step.policy.scores(shard, replay=False)
        shard, old = step.score(shard, rollout.index, clock)
        if old is None:  # a step with one update scores in it
            old = step.policy.scores(shard, step.plan.replay.old)
        engine = shard.columns["rollout_logprobs"]
        mask = shard.columns["loss_mask_0"]
        for rows, each in ((native, own), (replayed, old)):
            rows.append(mismatch(each.logprobs, engine, mask))
        scores.append(old)
        step.update(shard, clock)
    return native, replayed, scores


def show_effect(native: Sequence[dict], replayed: Sequence[dict], scores: Sequence[Scores]) -> None:
    rows = []
    for name in SHOWN:
        off, on = (
            sum(r[f"mismatch/{name}"] for r in each) / len(each) for each in (native, replayed)
        )
        ratio = f"{off / on:.2f}x" if on else "-"
        rows.append((f"mismatch/{name}", f"{off:.3e}", f"{on:.3e}", ratio))
    show(("mean over steps", "without replay", "with replay", "ratio"), rows)
    layers = []
    for layer in scores[0].agreement:
        share, exact, n = (sum(s.agreement[layer][i] for s in scores) for i in range(3))
        layers.append((f"{layer}", f"{share / n:.4f}", f"{exact / n:.4f}"))
    title = "what the routers would have chosen"
    show(("layer", "agree_topk", "exact_set"), layers, title=title)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_effect")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of tiny.yaml")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--std", type=float, default=0.05, help="of the initial weights [%(default)s]"
    )
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        hf = hf_config("tiny") | MODEL | {"initializer_range": given.std}
        options = (write_config(folder, hf), "model.dtype=bfloat16", f"run={folder}/run")
        engine = f"rollout.engine={given.engine}"
        plan = compile_plan(TINY, (*options, engine, *given.overrides))
        with topology.start(plan) as topo:
            native, replayed, scores = run_steps(plan, topo, given.steps)
        print(f"{given.engine} engine, {given.steps} steps, initial weights of std {given.std}")
        show_effect(native, replayed, scores)


if __name__ == "__main__":
    main()
