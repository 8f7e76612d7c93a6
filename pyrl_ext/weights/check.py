"""Whether the engine computes with the trainer's weights: by the bytes, and by the log-probs."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.metrics.glossary import GLOSSARY
from pyrl_ext.ops.digest import digest_on_device, read
from pyrl_ext.pack.batch import Batch
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.trainer.policy import Policy, Scores

# nat. Two float32 implementations of a model differ by 1e-7 to 1e-5; with bfloat16 in either,
# `benchmarks.replay_effect` finds up to 0.024, and 0.16 where routers choose for themselves.
FLOAT32_BOUND, ROUNDED_BOUND, ROUTED_BOUND = 1e-4, 0.1, 0.5
SHOWN = 8


class Sent:
    """Digests of tensors as they left the trainer.

    Args:
        names: of the tensors to note
        dtype: of the engine's weights; it may hold a tensor in this type or as it came
    """

    def __init__(self, names: Collection[str], dtype: torch.dtype):
        self.names, self.dtype = names, dtype
        self._exact: dict[str, Tensor] = {}
        self._rounded: dict[str, Tensor] = {}

    def noted(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes all tensors on."""
        wanted = set(self.names)
        for name, tensor in named:
            if name in wanted:
                self._exact[name] = self._rounded[name] = digest_on_device(tensor)
                if tensor.dtype != self.dtype:
                    self._rounded[name] = digest_on_device(tensor.to(self.dtype))
            yield name, tensor

    def unlike(self, held: Mapping[str, int]) -> dict[str, str]:
        """Name -> what is wrong with the tensor in the engine.

        Syncs: once.
        """
        exact, rounded = read(self._exact), read(self._rounded)
        owner = {number: name for found in (exact, rounded) for name, number in found.items()}
        wrong = {}
        for name in self.names:
            expected, found = (exact.get(name), rounded.get(name)), held.get(name)
            if found is None or expected[0] is None:
                wrong[name] = "was not sent" if found is not None else "is not in the engine"
            elif found not in expected:
                whose = owner.get(found)
                wrong[name] = f"has digest {found:016x}, expected {expected[0]:016x}" + (
                    f"; it holds what was sent as {whose}" if whose else ""
                )
        return wrong


def publish(
    engine: Engine, policy: Policy, version: int, only: Set[str] | None = None
) -> dict[str, float]:
    """Hands the policy's weights over and compares ``rollout.check_tensors`` of them.

    Args:
        only: names of the tensors that changed; None: all are sent.

    Returns: metrics: ``publish/checked``, the tensors compared.

    Communicates: see `Policy.weights`. Syncs: twice, for the digests.

    Raises: RuntimeError on the rank whose engine holds another tensor than was sent.
    """
    if not engine.capabilities.weights:
        engine.load_weights(policy.weights(only), version, only)
        return {}
    plan = policy.plan
    names = [name for name in tensors(policy) if only is None or name in only]
    names = chosen(names, plan.rollout.check_tensors, plan.seed, version)
    sent = Sent(names, getattr(torch, plan.rollout_dtype))
    engine.load_weights(sent.noted(policy.weights(only)), version, only)
    if wrong := sent.unlike(engine.checksums(names)):
        raise RuntimeError(
            f"publish: rank {policy.topo.rank}, version {version}: {len(wrong)} of {len(names)} "
            "tensors differ in the engine, expected every one as the trainer sent it; samples "
            "would come from other weights" + _lines(wrong)
        )
    return {"publish/checked": len(names)}


def tensors(policy: Policy) -> list[str]:
    """Names of the checkpoint's tensors that an engine holds: no multi-token-prediction layers."""
    layers = policy.plan.sizes.num_hidden_layers
    names = [name for weight in policy.table for name in weight.hf]
    return [name for name in names if (layer := layer_of(name)) is None or layer < layers]


def layer_of(name: str) -> int | None:
    """``model.layers.<n>.`` -> n."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def chosen(names: Sequence[str], count: int | str, seed: int, version: int) -> list[str]:
    """``count`` of the names; those of consecutive versions follow each other in a random order,
    so that all are visited."""
    if count == "all" or int(count) >= len(names):
        return list(names)
    order = list(names)
    random.Random(seed).shuffle(order)
    start = version * int(count)
    return [order[(start + i) % len(order)] for i in range(int(count))]


def bound(plan: Plan) -> float | None:
    """Largest mean |log-prob difference| of the first batch, None where it says nothing."""
    rollout = plan.rollout
    if rollout.max_mismatch is not None:
        return rollout.max_mismatch
    if rollout.top_p < 1 or rollout.top_k:
        return None
    if {plan.model.dtype, plan.rollout_dtype} == {"float32"}:
        return FLOAT32_BOUND
    return ROUTED_BOUND if plan.router_layers and not plan.replay.old else ROUNDED_BOUND


def check_batch(
    engine: Engine, policy: Policy, batch: Batch, old: Scores, group: dist.ProcessGroup | None
) -> None:
    """Ends the run before its update if trainer and engine find the same tokens unlike.

    Args:
        batch: of the weights that the policy has now
        old: the policy's scores of it
        group: all ranks; None = this process alone

    Communicates: only before it raises: a publish, and the findings of all ranks.

    Raises: RuntimeError, alike on every rank: the mean difference, the largest one, and the tensors
        that differ or, if none does, the first layer whose routers chose otherwise.
    """
    limit = bound(policy.plan)
    if limit is None or policy.plan.rollout.engine == "recorded":
        return
    gap = (old.logprobs - batch.rollout_logprobs).abs().double()
    gap = torch.where(batch.loss_mask, gap, 0.0)
    mean = float(gap.sum() / batch.loss_mask.sum())
    if mean <= limit:
        return
    row = int(gap.nan_to_num(torch.inf).argmax())
    found = enumerate(_everywhere(engine, policy, group))
    wrong = {f"rank {r}: {name}": what for r, each in found for name, what in each.items()}
    raise RuntimeError(
        f"rollout.max_mismatch: step {policy.step}: trainer's and engine's log-probs differ by "
        f"{mean:.3g} in the mean, expected at most {limit:g}; nothing was trained on them. "
        f"{_worst(batch, old, row)}. {_cause(wrong, old)}"
    )


def _worst(batch: Batch, old: Scores, row: int) -> str:
    sample, start = 0, 0
    while start + batch.seqlens[sample] <= row:
        start, sample = start + batch.seqlens[sample], sample + 1
    return (
        f"The largest difference is at sample {sample}, token {row - start + 1} (id "
        f"{int(batch.targets[row])}): {old.logprobs[row]:.4f} in the trainer, "
        f"{batch.rollout_logprobs[row]:.4f} in the engine"
    )


def _cause(wrong: Mapping[str, str], old: Scores) -> str:
    if wrong:
        return f"{len(wrong)} tensors in the engine are not the trainer's:" + _lines(wrong)
    text = "Every tensor in the engine is the trainer's: suspect the engine's own processing"
    band = GLOSSARY["route/agree_topk"].band
    assert band is not None
    shares = {layer: share / count for layer, (share, _, count) in old.agreement.items() if count}
    for layer, share in sorted(shares.items()):
        if share < band[0]:
            return f"{text}, up to layer {layer}: its routers agree on {share:.1%} of the experts"
    return text + (", not the routers, which agree in every layer" if shares else "")


def _everywhere(
    engine: Engine, policy: Policy, group: dist.ProcessGroup | None
) -> list[dict[str, str]]:
    """Each rank's `faults`."""
    mine = faults(engine, policy)
    if group is None:
        return [mine]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def faults(engine: Engine, policy: Policy) -> dict[str, str]:
    """The complete check: every tensor of the engine against what is sent when it is loaded once
    more, and what else it computes with before against after.

    Returns: name -> what is wrong. The engine holds the policy's weights afterwards.

    Communicates: see `Policy.weights`. Syncs: twice, for the digests.
    """
    if not engine.capabilities.weights:  # this rank has no engine, and takes part
        engine.load_weights(policy.weights(), policy.step)
        return {}
    names = tensors(policy)
    sent = Sent(names, getattr(torch, policy.plan.rollout_dtype))
    asleep = policy.plan.engine_sleeps  # then nothing is left of what it generated with
    before = {} if asleep else engine.checksums(None)
    engine.load_weights(sent.noted(policy.weights()), policy.step)
    after = engine.checksums(None)
    wrong = sent.unlike(after) | (sent.unlike(before) if before else {})
    own = {name for name in before if name not in names and before[name] != after[name]}
    return wrong | dict.fromkeys(sorted(own), "is another one after the weights were loaded again")


def _lines(wrong: Mapping[str, str]) -> str:
    lines = [f"\n  {name} {what}" for name, what in list(wrong.items())[:SHOWN]]
    more = len(wrong) - SHOWN
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
