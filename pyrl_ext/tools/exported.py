"""The work of ``pyrl export``: the plan that follows from a run's, and the files of its weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyrl_ext.megatron import checkpoint
from pyrl_ext.models.hf_folder import save_checkpoint_hf
from pyrl_ext.models.peft_folder import save_adapter
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.buckets import BucketStream
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.parallel.hf_download import fetch
from pyrl_ext.plan import ConfigError, Plan
from pyrl_ext.plan.compile import changed_plan
from pyrl_ext.tools.saved import find, on_one_rank
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets


def smallest(saved: Plan, overrides: Sequence[str]) -> Plan:
    """A plan of one rank on the CPU, or as ``overrides`` say, for what ``saved`` trained.

    Raises: ConfigError with what does not hold.
    """
    return changed_plan(saved, on_one_rank(saved) | {"device": "cpu"}, overrides)


def export(
    plan: Plan,
    saved: Path,
    out: Path,
    dtype: str | None,
    tokenizer: str | None,
    adapter: bool = False,
) -> bool:
    """Write the checkpoint ``saved`` to ``out``; whether this is the main rank.

    Args:
        adapter: write only the adapters.

    Communicates: as `Policy.load` and `Policy.weights`. Raises: as they do; FileNotFoundError when
        the run's tokenizer is gone.
    """
    if adapter and plan.sizes.mlp_matrices == 2:
        raise ValueError(
            f"export: --adapter with model.family {plan.model.family}, expected a family whose "
            "layers have gates; PEFT's files are not written for others. Export merged weights"
        )
    # a checkpoint has all weights, or adapters on those of the model
    weights = plan.model.weights if plan.lora else None
    names = {"weights": weights, "tokenizer": tokenizer or plan.model.tokenizer}
    source = plan.model_copy(update={"model": plan.model.model_copy(update=names)})
    with topology.start(plan) as topo, heartbeats(topo):
        source = fetch(source, topo)
        folder = source.tokenizer_path
        if folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(
                f"export: the tokenizer {folder} is not there, expected its folder, which is "
                "copied. Name where it is now: --tokenizer FOLDER"
            )
        plan = plan.model_copy(update={"fetched": source.fetched})
        policy = Policy.build(plan, topo, trainable=False, initial=False)
        policy.load(saved)
        if adapter:
            save_adapter(out, factors(policy), source, topo, dtype)
        else:
            save_checkpoint_hf(out, policy.weights(), source, topo, dtype)
        return topo.is_main


def factors(policy: Policy) -> BucketStream:
    """Every factor of the adapters, whole on every rank. Communicates: see `GatheredWeights`."""
    module = policy.llm
    assert module.adapters is not None
    buckets = plan_buckets(policy.plan, module.adapters.table)
    return GatheredWeights(buckets, module.adapters.live(), module.topo)


def run(options: argparse.Namespace) -> int:
    """Write the files that the options of ``pyrl export`` name; returns the exit code."""
    try:
        saved = find(options.run, options.step, "export")
        plan = smallest(Plan.read(saved / checkpoint.PLAN), options.overrides)
        if plan.unsupported:
            raise ValueError("\n".join(plan.unsupported))
        if options.adapter and plan.lora is None:
            raise ValueError(f"export: {saved} has no adapters; leave --adapter out")
        files = options.dtype, options.tokenizer, options.adapter
        if export(plan, saved, options.out, *files):
            print(f"wrote {options.out} from {saved}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
