"""Triton kernels compiled before the run: which ones a plan launches, and how a run loads them.

`python -m pyrl_ext.plan CONFIG --build FOLDER` compiles them (:mod:`pyrl_ext.tools.prebuild`).
Imported by runs that use prebuilt kernels: it needs Triton.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from pyrl_ext.ops._triton import Launch
from pyrl_ext.ops.expert_rows import triton as expert_rows
from pyrl_ext.ops.gather_routes import triton as gather_routes
from pyrl_ext.ops.gather_rows import triton as gather_rows
from pyrl_ext.ops.latent_keys import triton as latent_keys
from pyrl_ext.ops.replay_probs import triton as replay_probs
from pyrl_ext.ops.rms_norm import triton as rms_norm
from pyrl_ext.ops.rotary import triton as rotary
from pyrl_ext.ops.sum_rows import triton as sum_rows
from pyrl_ext.ops.swiglu import triton as swiglu
from pyrl_ext.ops.token_logprob import triton as token_logprob
from pyrl_ext.plan import Plan

MANIFEST = "pyrl_kernels.json"


def launches(plan: Plan, config: Mapping[str, Any]) -> Iterator[Launch]:
    """Every Triton kernel that any rank of ``plan`` launches.

    Args:
        plan:   the plan.
        config: its model as megatron's TransformerConfig arguments, ``Family.config`` of the sizes.

    Returns:
        (name, a call with the given number of rows) of each.
    """
    ops = gather_routes, replay_probs, token_logprob, gather_rows, sum_rows, swiglu
    for op in (*ops, rotary, rms_norm, latent_keys, expert_rows):
        yield from op.launches(plan, config)


def facts(plan: Plan, config: Mapping[str, Any], target: int) -> dict[str, Any]:
    """The facts that prebuilt kernels depend on; ``target``: compute capability, 90 for sm_90."""
    names = [name for name, _ in launches(plan, config)]
    return {"triton": triton.__version__, "target": f"sm_{target}", "launches": names}


def use(plan: Plan, config: Mapping[str, Any], folder: Path) -> int:
    """Let this process load kernels from ``folder``; returns how many launches it was built for.

    Raises:
        ValueError: it was built for other kernels, another Triton or another GPU; says which.
    """
    file = folder / MANIFEST
    advice = f"Build it again: python -m pyrl_ext.plan {plan.source} --build {folder}"
    if not file.is_file():
        raise ValueError(
            f"kernels.prebuilt: {folder} holds no {MANIFEST}, expected what --build wrote. {advice}"
        )
    target = "{}{}".format(*torch.cuda.get_device_capability())
    built = json.loads(file.read_text())
    wanted = facts(plan, config, int(target))
    for name, value in wanted.items():
        if built.get(name) != value:
            raise ValueError(
                f"kernels.prebuilt: {folder} was built for {_difference(name, built, wanted)}; "
                f"kernels would be compiled during the run. {advice}"
            )
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    knobs.compilation.listener = _report_miss
    return len(wanted["launches"])


def _difference(name: str, built: dict[str, Any], wanted: dict[str, Any]) -> str:
    if name != "launches":
        return f"{name} {built.get(name)}, expected {wanted[name]}"
    missing = [each for each in wanted[name] if each not in built.get(name, ())]
    extra = [each for each in built.get(name, ()) if each not in wanted[name]]
    return f"another plan: it lacks {missing}, and has {extra} that this one does not launch"


def _report_miss(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        print(f"kernels: {src.name} was compiled during the run, not prebuilt", flush=True)
