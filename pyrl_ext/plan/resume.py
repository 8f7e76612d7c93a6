"""Keys that a resumed run may change on request (`resume_allow`), and those that it never may.

Keys in neither table are in `FREE_ON_RESUME`: they may always change. The entry that is nearest to
a key decides, so that a section stands for all its keys but those that are listed separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pyrl_ext.plan.language.errors import Key, fields_of, show, suggest_path

ON_REQUEST = (
    "batching.epochs",
    "batching.minibatches",
    "batching.samples_per_prompt",
    "data",
    "model.config",
    "model.fp8",
    "model.router_bias_update_rate",
    "model.te_attention",
    "model.weights",
    "modules.*.lr",
    "objective",
    "optimizer.clip_grad",
    "optimizer.decay_steps",
    "optimizer.eps",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.moments",
    "optimizer.muon_rms",
    "optimizer.overlap_grad_reduce",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "replay",
    "rollout",
    "teacher",
    "teacher_hf",
    "turns",
)
_AT_START = "a run reads it once, before its first step"
_POSITION = "step n takes the records that follow those of n such steps; some would be left out"
NEVER = {
    "batching.prompts": _POSITION,
    "batching.samples": _POSITION,
    "data.held_out": "records that were trained on would be evaluated",
    "data.shuffle": "it orders the records of all steps",
    "hf": "the checkpoint holds weights of the old sizes",
    "init_from": _AT_START,
    "init_optimizer": _AT_START,
    "lora": "the checkpoint holds factors of the old shapes",
    "lora.alpha": "the saved factors were trained with the old scale",
    "lora.weights": _AT_START,
    "model.dtype": "the checkpoint holds weights of the old type",
    "model.family": "the checkpoint holds weights of the old family",
    "model.freeze": "the checkpoint holds the optimizer state of the weights that were trained",
    "model.megatron": "its fields change what the saved weights compute",
    "model.mtp": "it adds or removes layers with their optimizer state",
    "model.tokenizer": "the tokens that the weights know would mean other text",
    "modules": "the checkpoint holds the old encoders and their optimizer state",
    "optimizer.betas": "the saved moments are means with the old decays",
    "optimizer.muon_momentum": "the saved momentum is a mean with the old decay",
    "optimizer.name": "the checkpoint holds the state of the old optimizer",
    "seed": "it orders the records and draws the samples of all steps",
}


class Difference(NamedTuple):
    """A field that two plans hold different values for."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {show(self.now)} now, {show(self.saved)} in the saved plan"


def why_never(name: str) -> str | None:
    """Why a resumed run can never change the key `name`; None: it may, at least on request."""
    for entry in _entries(name):
        if entry in ON_REQUEST:
            return None
        if entry in NEVER:
            return NEVER[entry]
    return None


def is_allowed(name: str, allow: Sequence[str]) -> bool:
    """True if the keys or sections of `allow` let a resumed run change the key `name`."""
    listed = any(name == key or name.startswith(f"{key}.") for key in allow)
    return listed and why_never(name) is None


def refusal(differences: Sequence[Difference], allow: Sequence[str]) -> Iterator[str]:
    """A message for each key that may not differ now, and one that says what to do."""
    fixed = [each.name for each in differences if why_never(each.name)]
    others = [each.name for each in differences if not why_never(each.name)]
    for each in differences:
        reason = why_never(each.name)
        yield f"{each}, expected the same to resume" + (f"; {reason}" if reason else "")
    option = f"--allow {','.join(dict.fromkeys([*allow, *others]))}"
    if not fixed:
        many = len(others) > 1
        yield (
            f"{len(others)} {'keys differ' if many else 'key differs'} and may change on request. "
            f"To continue with the new value{'s' * many}, add to the same command: {option}. To "
            "start afresh, use another run folder"
        )
        return
    advice = f"Set {', '.join(fixed)} back to resume, or use another run folder to start afresh"
    if others:
        advice += f". To change only the others, add to the same command: {option}"
    yield advice


def allow_problems(allow: Sequence[str]) -> Iterator[str]:
    """What is wrong with the keys of `resume_allow`."""
    for name in allow:
        key = tuple(name.split("."))
        if reason := why_never(name):
            yield (
                f"{name}, expected keys that a resumed run can change; {reason}. Use another run "
                "folder to change it"
            )
        elif not fields_of(*key) and (problem := suggest_path(key)):  # sections may be named
            yield f"{name}: {problem}"


def _entries(name: str) -> Iterator[str]:
    """`name` and the sections around it, as the tables write them, the nearest first."""
    key: Key = tuple(name.split("."))
    if key[0] == "modules" and key[1:]:
        key = ("modules", "*", *key[2:])
    for depth in range(len(key), 0, -1):
        yield ".".join(key[:depth])
