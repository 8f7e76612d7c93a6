"""Proof that the engine computes with the trainer's weights: by tensor digests and by log-probs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.metrics.glossary import GLOSSARY
from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.buckets import Named, names_here, observed
from pyrl_ext.parallel.collective_errors import AgreedError, gather_objects
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.draft_layers import is_draft
from pyrl_ext.rollout.engine import Engine

# nat. Two float32 implementations of a model differ by 1e-7 to 1e-5; with bfloat16 in either,
# `benchmarks.replay_effect` finds up to 0.024, and 0.16 where routers choose for themselves.
FLOAT32_LIMIT = 1e-4
ROUNDED_LIMIT = 0.1
ROUTED_LIMIT = 0.5
QUANTIZED_LIMIT = 0.2  # weights of the engine in 8 bits: up to 0.08 in a step of docs/rollouts.md
MAX_SHOWN = 8


class SentTensors:
    """Digests of tensors as they left the trainer.

    Args:
        names: the tensors to record
        dtype: of the engine's weights; it may hold a tensor in this type or in the type it came in

    Attributes:
        bytes: of all tensors that left
    """

    def __init__(self, names: Sequence[str], dtype: torch.dtype):
        self.names = names
        self.dtype = dtype
        self.bytes = 0
        self._wanted = set(names)
        self._exact = DigestLog()
        self._rounded = DigestLog()

    def recording(self, named: Named) -> Named:
        """``named``, with the digests of ``names`` recorded as they pass; where some come on other
        ranks, they are no longer in ``names``."""
        self.names = names_here(named, self.names)
        return observed(named, self._record)

    def _record(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.bytes += tensor.nbytes
            if name in self._wanted:
                self._exact.add(name, tensor)
                if tensor.dtype != self.dtype:
                    self._rounded.add(name, tensor.to(self.dtype))
        self._exact.flush()  # their memory may be filled again
        self._rounded.flush()

    def mismatches(self, in_engine: Mapping[str, int]) -> dict[str, str]:
        """Compares the engine's digests with the recorded ones.

        Args:
            in_engine: name -> digest of the engine's tensor

        Returns: name -> what is wrong with the tensor in the engine.

        Syncs: twice.
        """
        exact = self._exact.numbers()
        rounded = exact | self._rounded.numbers()
        sent_as = {number: name for sent in (exact, rounded) for name, number in sent.items()}
        wrong: dict[str, str] = {}
        for name in self.names:
            expected = (exact.get(name), rounded.get(name))
            digest = in_engine.get(name)
            if digest is None or expected[0] is None:
                wrong[name] = "was not sent" if digest is not None else "is not in the engine"
            elif digest not in expected:
                other = sent_as.get(digest)
                wrong[name] = f"has digest {digest:016x}, expected {expected[0]:016x}" + (
                    f"; the engine holds what was sent as {other}" if other else ""
                )
        return wrong


def sync_weights(
    engine: Engine,
    named: Named,
    names: Sequence[str],
    version: int,
    *,
    dtype: torch.dtype,
    check: int | Literal["all"] = "all",
    seed: int = 0,
    only: Set[str] | None = None,
) -> dict[str, float]:
    """Send weights to the engine and compare the digests of some of its tensors.

    Args:
        named: (checkpoint name, tensor); with ``only`` just these
        names: all tensors that the engine holds, in checkpoint order (`engine_tensor_names`)
        version: number of these weights; the engine keeps it on each sample
        dtype: of the engine's weights
        check: how many tensors are compared; successive versions take turns (`rotating_sample`)
        seed: of the order in which tensors take turns
        only: names of the tensors that changed; None: all are sent

    Returns: metrics: ``publish/checked``, the number of tensors compared, and
        ``publish/tensor_bytes``, of all that were sent; nothing if the engine has no weights.

    Communicates: as ``named`` does. Syncs: three times, for the digests.

    Raises: RuntimeError on the rank whose engine holds a tensor that differs from the one sent; or
        `Engine.samples_stale` does.
    """
    if not engine.capabilities.weights:
        engine.load_weights(named, version, only)
        return {}
    sendable = [name for name in names if only is None or name in only]
    compared = rotating_sample(sendable, check, seed, version)
    sent = SentTensors(compared, dtype)
    engine.load_weights(sent.recording(named), version, only)

    def check_digests() -> None:
        if sent.names and (wrong := sent.mismatches(engine.checksums(sent.names))):
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise RuntimeError(
                f"sync_weights: rank {rank}, version {version}: {len(wrong)} of {len(sent.names)} "
                "tensors differ in the engine, expected every one as the trainer sent it; samples "
                "would come from other weights" + _lines(wrong)
            )

    engine.verify_weights(check_digests)
    return {"publish/checked": len(compared), "publish/tensor_bytes": sent.bytes}


def engine_tensor_names(names: Iterable[str], num_layers: int, drafts: bool = False) -> list[str]:
    """The checkpoint tensors that an engine holds.

    Args:
        names: all tensors of the checkpoint
        num_layers: decoder layers of the model; MTP layers are numbered from there on
        drafts: the engine holds MTP layers too
    """
    return [name for name in names if drafts or not is_draft(name, num_layers)]


def rotating_sample(
    names: Sequence[str], count: int | Literal["all"], seed: int, version: int
) -> list[str]:
    """``count`` of the names: consecutive versions take consecutive parts of one random order, so
    that every name has its turn."""
    if count == "all" or int(count) >= len(names):
        return list(names)
    order = list(names)
    random.Random(seed).shuffle(order)
    start = version * int(count)
    return [order[(start + i) % len(order)] for i in range(int(count))]


def full_check(
    engine: Engine,
    stream: Callable[[], Named],
    names: Sequence[str],
    version: int,
    *,
    dtype: torch.dtype,
    slept: bool = False,
) -> dict[str, str]:
    """Reload the engine and compare every tensor with what was sent, and its internal tensors
    before and after.

    Args:
        stream: returns the trainer's (checkpoint name, tensor) once more
        names: all tensors that the engine holds (`engine_tensor_names`)
        version: of the trainer's weights
        dtype: of the engine's weights
        slept: the engine gave its memory back since it generated, so only the reload is compared

    Returns: name -> what is wrong. Afterwards the engine holds the trainer's weights.

    Communicates: as the stream does. Syncs: a few times, for the digests.
    """
    if not engine.capabilities.weights:  # no engine on this rank: it only takes part in the stream
        engine.load_weights(stream(), version)
        return {}
    sent = SentTensors(names, dtype)
    before = {} if slept else engine.checksums(None)
    engine.load_weights(sent.recording(stream()), version)
    after = engine.checksums(None)
    wrong = sent.mismatches(after) | (sent.mismatches(before) if before else {})
    changed = {name for name in before if name not in names and before[name] != after[name]}
    return wrong | dict.fromkeys(sorted(changed), "changed when the weights were loaded again")


def mismatch_limit(plan: Plan) -> float | None:
    """Largest mean |log-prob difference| [nat] that a batch may have; None: nothing to compare."""
    rollout = plan.rollout
    if rollout.engine == "recorded":
        return None
    if rollout.max_mismatch is not None:
        return rollout.max_mismatch
    if rollout.accept_truncated_sampling and (rollout.top_p < 1 or rollout.top_k):
        return None
    if {plan.model.dtype, plan.rollout_dtype} == {"float32"}:
        return FLOAT32_LIMIT
    if plan.router_layers and not plan.replay.old:
        return ROUTED_LIMIT
    return ROUNDED_LIMIT if rollout.quantization is None else QUANTIZED_LIMIT


def check_batch(
    shard: BatchShard,
    logprobs: Tensor,
    limit: float | None,
    find_mismatches: Callable[[], Mapping[str, str]],
    *,
    step: int,
    agreement: Mapping[int, float],
    topo: Topology,
) -> None:
    """Stop before the update if trainer and engine log-probs of the same tokens disagree.

    Args:
        shard: of this rank; tokens generated with the weights that the trainer has now are compared
        logprobs: [N] float32, the trainer's log-prob of each row's target; empty before the last
            stage
        limit: largest mean |difference| over the loss tokens [nat] (`mismatch_limit`); None: no
            check
        find_mismatches: `full_check` of this rank's engine; called only if the limit is exceeded
        step: for the message
        agreement: layer id -> share of the engine's routed experts that the trainer's router also
            chose

    Communicates: two numbers; before it raises, what ``find_mismatches`` does, and its results.

    Raises: AgreedError: the mean difference, the largest one, and the tensors that differ or, if
        none does, the first layer whose routers chose other experts.
    """
    if limit is None:
        return
    gap, counted = gaps(shard, logprobs, step)
    # prompt rows would dilute the mean over all rows
    total, number = sum_over_ranks(torch.stack([gap.sum(), counted]), topo)
    mean = float(total / number.clamp(min=1))
    if not number and topo.is_main:
        print(f"step {step}: no loss token is of this version: nothing to compare", flush=True)
    if mean <= limit:
        return
    reports = gather_objects((_largest(shard, logprobs, gap), find_mismatches()), topo.world)
    _, largest = max((place for place, _ in reports), key=lambda place: place[0])
    wrong = {
        f"rank {rank}: {name}": problem
        for rank, (_, problems) in enumerate(reports)
        for name, problem in problems.items()
    }
    raise AgreedError(
        f"rollout.max_mismatch: step {step}: the mean log-prob difference between trainer and "
        f"engine is {mean:.3g}, expected at most {limit:g}; nothing was trained on this "
        f"batch. {largest}. {_cause(wrong, agreement)}"
    )


def gaps(shard: BatchShard, logprobs: Tensor, version: int) -> tuple[Tensor, Tensor]:
    """Differences between the log-probs of trainer and engine.

    Args:
        logprobs: [N] float32, the trainer's; empty before the last stage
        version: of the weights that sampled the tokens, where the shard knows it

    Returns: [N] float64 |difference| of each loss token of the version, 0 elsewhere; their number.
    """
    if not shard.role.last_stage:
        return torch.zeros(0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    mask = shard.columns["loss_mask_0"]
    if (versions := shard.columns.get("versions")) is not None:
        mask = mask & (versions == version)
    gap = (logprobs - shard.columns["rollout_logprobs"]).abs().double()
    return torch.where(mask, gap, 0.0), mask.sum().double()


def _largest(shard: BatchShard, logprobs: Tensor, gap: Tensor) -> tuple[float, str]:
    """The largest difference on this rank, and where it is."""
    if not gap.numel():
        return -1.0, ""
    at = int(gap.nan_to_num(torch.inf).argmax())
    row = shard.rows.tokens[at : at + 1]
    sample = int(shard.lengths.sample_of(row)[0])
    return float(gap[at].nan_to_num(torch.inf)), (
        f"The largest difference is at sample {sample}, token "
        f"{int(row[0] - shard.lengths.starts[sample]) + 1} (id "
        f"{int(shard.columns['targets_0'][at])}): {logprobs[at]:.4f} in the trainer, "
        f"{shard.columns['rollout_logprobs'][at]:.4f} in the engine"
    )


def _cause(wrong: Mapping[str, str], agreement: Mapping[int, float]) -> str:
    if wrong:
        return f"{len(wrong)} tensors in the engine differ from the trainer's:" + _lines(wrong)
    text = "Every tensor in the engine is the trainer's: suspect the engine's own computation"
    band = GLOSSARY["route/agree_topk"].band
    assert band is not None
    for layer, share in sorted(agreement.items()):
        if share < band[0]:
            return f"{text}, up to layer {layer}: its routers agree on {share:.1%} of the experts"
    return text + (", not the routers, which agree in every layer" if agreement else "")


def _lines(wrong: Mapping[str, str]) -> str:
    lines = [f"\n  {name} {problem}" for name, problem in list(wrong.items())[:MAX_SHOWN]]
    more = len(wrong) - MAX_SHOWN
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
