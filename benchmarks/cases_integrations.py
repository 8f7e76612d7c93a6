"""The works of `benchmarks.integrations`: ours, and what a right result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.cases_logprob import ERROR, VOCAB, both
from benchmarks.cases_pack import CP, pad, pad_removal_loop
from benchmarks.dynamic_cp import Groups, Lengths, affine, quality
from benchmarks.lengths import lognormal
from benchmarks.peers_logprob import Pair, eager_as_is
from benchmarks.per_sequence import nemo_rl
from pyrl_ext.loss import vocab_parallel
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack import TokenLayout
from pyrl_ext.replay import RoutedExperts
from pyrl_ext.schedule import plan_microbatches

TRAINERS = {"verl": "verl", "skyrl": "SkyRL"}
LINEAR = 24576
"""Tokens at which attention costs as much as everything else, as verl sets it."""
PEER_ERROR = 0.5
"""Largest error of other trainers against float64; a larger one means another function."""


class Work(NamedTuple):
    """A task that several codes do, and the check of their results.

    Args:
        runs:   the codes by name, "ours" and other options of ours first.
        judge:  (name of a code, its result) -> what the table says. Raises ValueError if the result
            is wrong.
        faster: bar, at least how many times as long as ours every other code takes; None: no bar.
    """

    name: str
    runs: dict[str, Callable[[], Any]]
    judge: Callable[[str, Any], str]
    faster: float | None


def missing() -> dict[str, str]:
    """Trainer -> how to install it, for each one that is not installed."""
    return {
        trainer: f"{name} is not installed: make .venv/{name}"
        for name, trainer in TRAINERS.items()
        if find_spec(name) is None
    }


def versions() -> list[str]:
    """Those of the trainers that are installed."""
    return [f"{trainer} {version(name)}" for name, trainer in TRAINERS.items() if find_spec(name)]


@cache
def peers() -> list[Any]:
    """The modules with the code of those trainers that are installed."""
    return [import_module(f"benchmarks.peers_{name}") for name in TRAINERS if find_spec(name)]


def expect(right: bool, work: str, code: str, expected: str) -> None:
    if not right:
        raise ValueError(f"benchmarks.integrations: {work}: {code} is wrong, expected {expected}")


def logprobs(group: dist.ProcessGroup, dtype: torch.dtype, shrink: int) -> Work:
    """Log-probs, entropies and the gradient of both, of a shard of the vocabulary.

    Args:
        group: megatron's tensor-parallel one.
    """
    tokens = 128 // shrink
    vocab = VOCAB // shrink
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(tokens, vocab, generator=g).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=g)
    grads = torch.randn(2, tokens, generator=g)
    exact: list[Any] = [*both(whole.double(), targets, grads, eager_as_is)()]
    own, exact[2] = (x.chunk(group.size(), 1)[group.rank()].clone() for x in (whole, exact[2]))
    name = f"log-probs, {tokens} x {vocab} {str(dtype)[6:]}, {group.size()} ranks"

    def judge(code: str, found: Sequence[Tensor]) -> str:
        pairs = zip(found, exact, strict=True)
        errors = [float((mine.double() - right).abs().max()) for mine, right in pairs]
        bounds = [ERROR, ERROR, 4 * torch.finfo(dtype).eps] if code == "ours" else [PEER_ERROR] * 3
        right = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
        expect(right, name, code, f"errors of at most {bounds}, found {errors}")
        return " ".join(f"{error:.0e}" for error in errors)

    def ours(logits: Tensor, targets: Tensor) -> Pair:
        return vocab_parallel.logprobs(logits, targets, group, with_entropy=True)

    methods: dict[str, Any] = {"ours": ours}
    for peer in peers():
        methods |= peer.logprobs(group)
    # a copy each: verl's backward writes to the logits, and restores them up to rounding
    runs = {code: both(own.clone(), targets, grads, method) for code, method in methods.items()}
    return Work(name, runs, judge, 3)


def packing(shrink: int) -> Work:
    """Six columns of padded sequences to the packed rows of a context-parallel rank."""
    width = 1024 // shrink
    lengths = lognormal(512 // shrink, width, 65_900 // shrink)
    dtypes = [torch.int64] * 3 + [torch.bool] + [torch.float32] * 2
    rows = sum(lengths)
    ragged = [torch.empty(rows).random_(2**20).remainder(997).to(dtype) for dtype in dtypes]
    padded = [pad(column, lengths, width)[0] for column in ragged]
    mask = pad(ragged[0], lengths, width)[1]
    right = [pad_removal_loop(column, mask) for column in padded]
    name = f"packing, {len(lengths)} sequences, {rows} rows, CP {CP}, 6 columns"

    def ours() -> Sequence[Tensor]:
        first = mask.view(torch.uint8).argmax(1) + width * torch.arange(len(mask))
        seqlens, starts = (tuple(each.tolist()) for each in (mask.sum(1), first))
        layout = TokenLayout(seqlens, CP, starts=starts)
        return gather_fields([x.view(-1) for x in padded], layout.rows(0), [0] * 6).views

    def judge(code: str, found: Sequence[Tensor]) -> str:
        expect(all(map(torch.equal, found, right)), name, code, "the rows of a loop")
        return "equal"

    runs: dict[str, Callable[[], Any]] = {"ours": ours}
    for peer in peers():
        runs |= peer.packing(padded, mask, ragged, lengths)
    return Work(name, runs, judge, 10)


def replay(layers: int, held: int, topk: int, experts: int, shrink: int) -> Work:
    """Routes of a padded batch to the last ``held`` of ``layers`` routers, of a rank of CP 2."""
    width = 512 // shrink
    lengths = lognormal(512 // shrink, width, 65_900 // shrink)
    g = torch.Generator().manual_seed(0)
    first = torch.randint(experts, (sum(lengths), layers, 1), generator=g, dtype=torch.int16)
    ragged = (first + torch.arange(topk, dtype=torch.int16)) % experts
    padded, mask = pad(ragged, lengths, width)
    right = nemo_rl(padded[:, :, -held:], mask, torch.int64, (CP, 0, 1, 0))
    real = pad_removal_loop(mask.long(), mask).bool()
    kept = range(layers - held, layers)
    name = f"replay, {len(lengths)} sequences, {held} of {layers} layers x {topk}, CP {CP}"

    def ours(check: bool) -> list[Tensor]:
        routes = RoutedExperts.from_padded(
            padded, mask, num_experts=experts, layers=kept, cp_size=CP, check=check
        )
        return [each.ids for each in routes.of_layers(kept) if each is not None]

    def judge(code: str, found: Sequence[Tensor]) -> str:
        ids = torch.stack([*found]).long()
        expect(torch.equal(ids[:, real], right[:, real]), name, code, "the routes of a loop")
        repeated = (ids[:, ~real].sort().values.diff() == 0).any(-1).any(0)
        if code.startswith("ours"):
            expect(not repeated.any(), name, code, "distinct experts in every row of padding")
        return f"{int(repeated.sum())} of {len(repeated)}"

    stages = layers // held
    parallel_state.set_pipeline_model_parallel_rank(stages - 1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=experts,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    # the others do not check the experts that they get
    runs: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, True),
        "ours, no check": partial(ours, False),
    }
    for peer in peers():
        runs |= peer.replay(padded, mask, ragged, lengths, config, held)
    return Work(name, runs, judge, 5)


def balance(drawn: Lengths, samples: int, ranks: int, shrink: int) -> Work:
    """Microbatches of at most 16384 tokens of every rank."""
    limit = 16384
    lengths = drawn.drawn(samples // shrink, limit, seed=1)
    name = f"balance, {drawn.name}, {len(lengths)} samples, {ranks} ranks"
    cost = affine(limit, LINEAR)

    def ours() -> list[Groups]:
        plan = plan_microbatches(lengths, ranks, limit, cost=cost)
        return [[(group.cp_size, group.samples) for group in each] for each in plan.microbatches]

    def judge(code: str, plan: Sequence[Groups]) -> str:
        bins = [ids for groups in plan for _, ids in groups]
        once = sorted(i for ids in bins for i in ids) == [*range(len(lengths))]
        expect(once, name, code, "every sample once")
        fullest = max(sum(lengths[i] for i in ids) for ids in bins)
        expect(fullest <= limit, name, code, f"at most {limit} tokens in a microbatch")
        found = quality(plan, lengths, ranks, limit, LINEAR)
        return f"{found.balance:.3f} {found.microbatches:.2f}"

    runs: dict[str, Callable[[], Any]] = {"ours": ours}
    for peer in peers():
        runs |= peer.balance(lengths, ranks, limit)
    return Work(name, runs, judge, None)
