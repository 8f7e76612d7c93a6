"""The work of ``pyrl eval``: its target, the plan that follows, and the table of results."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pyrl_ext.megatron import checkpoint
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.atomic_write import no_link
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.parallel.hf_download import fetch
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.user_code import find_modules_in
from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.compile import changed_plan
from pyrl_ext.rollout.evaluation import Estimate, Evaluation
from pyrl_ext.rollout.recorded import Recorder
from pyrl_ext.tools.saved import find, on_one_rank
from pyrl_ext.trainer.step import RolloutStep

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Target:
    """Weights to evaluate.

    Args:
        plan: that they belong to.
        saved: checkpoint that holds them; None: they are the plan's initial weights.
        out: default folder of results.
    """

    plan: Plan
    saved: Path | None
    out: Path


def target_of(path: Path, step: int | None, config: Path | None) -> Target:
    """The weights in the folder ``path``.

    Raises:
        ValueError, FileNotFoundError: it holds none, or options do not fit.
        ConfigError: the config does not hold with these weights.
    """
    if (path / checkpoint.PLAN).exists() and (path / checkpoint.COUNTERS).exists():
        return _of_checkpoint(path, path.parent.parent)
    if (path / "checkpoints").is_dir():
        return _of_checkpoint(find(path, step, "eval"), path)
    weights = path.resolve()
    names = []
    if (path / "adapter_config.json").exists():
        names = [f"lora.weights={weights}"]
    elif (path / "config.json").exists():
        names = [f"model.{key}={weights}" for key in ("weights", "tokenizer")]
        names.append(f"model.config={weights / 'config.json'}")
    if not names:
        raise ValueError(
            f"eval: {path}, expected a run folder, a checkpoint, a Hugging Face folder or an "
            "exported adapter"
        )
    if config is None:
        raise ValueError(
            f"eval: {path} has no plan, expected --config FILE: its data, reward and rollout "
            "sections say what is asked and how responses are scored"
        )
    return Target(compile_plan(config, names), None, Path("runs") / f"eval-{weights.name}")


def _of_checkpoint(saved: Path, run: Path) -> Target:
    plan = Plan.read(saved / checkpoint.PLAN)
    if plan.lora is None:  # a checkpoint has all weights, or adapters on those of the model
        plan = plan.model_copy(update={"model": plan.model.model_copy(update={"weights": None})})
    return Target(plan, saved, run / "eval")


def plan_of(target: Target, out: Path, options: argparse.Namespace) -> Plan:
    """The target's plan for one process, with the options of the command.

    Raises: ConfigError with what does not hold; ValueError if the plan has no rollouts.
    """
    saved = target.plan
    if not saved.has_rollouts:
        raise ValueError(
            "eval: the plan fine-tunes on records without rollouts, expected one with prompts and "
            "a reward. Name one: --config FILE, with the exported weights"
        )
    changes = on_one_rank(saved) | {"run": str(out)}
    overrides = ["rollout.offload_trainer=none"]
    for key in ("samples", "temperature", "prompts"):
        if (value := getattr(options, key)) is not None:
            overrides.append(f"evaluate.{key}={value}")
    if options.pass_k is not None:
        overrides.append(f"evaluate.pass_k=[{options.pass_k}]")
    for text in options.set:
        name, equals, file = text.partition("=")
        if not equals:
            raise ValueError(f"eval: --set {text}, expected NAME=FILE")
        overrides.append(f"evaluate.sets.{name}.file={Path(file).resolve()}")
    plan = changed_plan(saved, changes, [*overrides, *options.overrides], resumes=False)
    if differences := plan.model_diff(saved):
        raise ValueError(
            f"eval: {differences[0]}, expected the model of the weights. Leave that override out"
        )
    return plan


def evaluate(plan: Plan, saved: Path | None, out: Path) -> dict[str, Evaluation] | None:
    """The results of every set; None on other ranks than the first. Samples go to ``out``.

    Communicates: as a step of a run.
    """
    with topology.start(plan) as topo, heartbeats(topo):
        plan = fetch(plan, topo)
        console = Console(stderr=True)
        with console.status("starting") as status:
            initial = saved is None
            step = RolloutStep.build(plan, topo, status.update, trainable=False, initial=initial)
            with closing(step):
                number = 0
                if saved is not None:
                    step.policy.start_from(saved, optimizer=False)
                    number = checkpoint.read_counters(saved)["step"]
                status.update("sending weights to the engine")
                step.sync_weights(number, Clock())
                results, samples = step.rollouts.evaluate()
                for name, own in samples.items():
                    Recorder(out / name, topo, number).save(number, own)
        if not topo.is_main:
            return None
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "weights": str(saved or plan.model.weights),
            "step": number,
            "evaluate": plan.evaluate.model_dump(mode="json"),
            "sets": {name: result.to_json() for name, result in results.items()},
        }
        with open(out / RESULTS, "a", opener=no_link) as file:
            file.write(json.dumps(row) + "\n")
        return results


def table(results: Mapping[str, Evaluation]) -> Table:
    """A row for each set."""
    ks = sorted({k for result in results.values() for k in result.passes})
    found = Table()
    found.add_column("set", no_wrap=True)
    for title in ("prompts", "n", "mean reward", *(f"pass@{k}" for k in ks), "truncated", "tokens"):
        found.add_column(title, justify="right", no_wrap=True)
    for name, result in results.items():
        passes = [_shown(result.passes[k]) if k in result.passes else "" for k in ks]
        found.add_row(
            name,
            f"{result.prompts}",
            f"{result.samples}",
            _shown(result.reward),
            *passes,
            f"{result.truncated:.1%}",
            f"{result.length:.1f}",
        )
    return found


def _shown(estimate: Estimate) -> str:
    error = "" if math.isnan(estimate.error) else f" ± {estimate.error:.3f}"
    return f"{estimate.mean:.3f}{error}"


def run(options: argparse.Namespace) -> int:
    """Evaluate what the options of the command say; returns its exit code."""
    try:
        target = target_of(options.target, options.step, options.config)
        out = options.out or target.out
        plan = plan_of(target, out.resolve(), options)
        if plan.unsupported:
            raise ValueError("\n".join(plan.unsupported))
        find_modules_in(plan.resolve("."))
        results = evaluate(plan, target.saved, out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if results is not None:
        print(f"weights: {target.saved or options.target}")
        Console(width=None if sys.stdout.isatty() else 160).print(table(results))
        print(f"results: {out / RESULTS}; samples: a folder for each set next to it")
    return 0
