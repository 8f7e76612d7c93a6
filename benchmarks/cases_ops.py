"""Operators of a layer, both passes, next to torch's, transformers' and megatron-core's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks.measure import Case, near
from pyrl_ext import ops
from pyrl_ext.ops import digest
from pyrl_ext.ops.digest import digest_on_device
from pyrl_ext.ops.expert_rows import op, reference

EPS = 1e-6
SCALE = 1.8  # of the experts that a router chooses


def forward(run: Callable, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """A call of ``run``, which gives one tensor or several."""

    def call() -> list[Tensor]:
        out = run(*inputs)
        return [out] if isinstance(out, Tensor) else [*out]

    return call


def gradients(
    run: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """A forward and a backward pass; ``grads``: of the first tensors that ``run`` gives."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    run = forward(run, leaves)
    return lambda: [*torch.autograd.grad(run()[: len(grads)], leaves, grads)]


def both(
    name: str,
    runs: Mapping[str, Callable],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    moved: tuple[int, int],
    written: tuple[int, int],
    bars: tuple[Mapping[str, float], ...] = ({}, {}),
    of: str = "",
    **options: Any,
) -> Iterator[Case]:
    """The case of a forward pass, and that of a forward and a backward pass.

    Args:
        runs: ours, which comes first, and others.
        moved, written, bars: of the cases; ``bars`` are `Case.at_least`.
        of: what the name of a case begins with.
    """
    calls = {"forward": forward, "forward and backward": partial(gradients, grads=grads)}
    for index, (kind, call) in enumerate(calls.items()):
        ours, *others = (call(run, inputs) for run in runs.values())
        yield Case(
            f"{of}{kind}, {name}",
            ours,
            dict(zip([*runs][1:], others, strict=True)),
            moved=moved[index],
            written=written[index],
            at_least=bars[index],
            **options,
        )


def rounded(dtype: torch.dtype) -> Callable[[Any, Any], bool]:
    """Equal up to a few rounding steps of the largest: torch rounds every step."""
    return partial(near, bound=32 * torch.finfo(dtype).eps)


def swiglu(device: str, shrink: int = 1) -> Iterator[Case]:
    """The gated unit of routed experts, and the same in torch, as megatron writes it: of a wide MoE
    layer of 8 experts a token, and of GLM-4.7-Flash's widths."""

    def in_torch(gate_up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) * up * weight[:, None]).to(gate_up.dtype)

    for width, dtype in ((256, torch.float32), (1536, torch.bfloat16)):
        rows = 32768 // shrink
        gate_up = torch.randn(rows, 2 * width, device=device, dtype=dtype)
        weight = torch.rand(rows, device=device)
        grad = torch.randn(rows, width, device=device, dtype=dtype)
        one = grad.nbytes
        yield from both(
            f"{rows} x {width}, {str(dtype)[6:]}",
            {"ours": ops.swiglu, "torch": in_torch},
            (gate_up, weight),
            [grad],
            moved=(3 * one + 4 * rows, 8 * one + 12 * rows),
            written=(one, 2 * one + 4 * rows),
            agree=rounded(dtype),
        )


def digests(device: str, shrink: int = 1) -> Iterator[Case]:
    """Digests of the experts of a layer of GLM-4.7-Flash, and whether they are finite."""
    experts = 64
    shapes = [(1536, 2048), (1536, 2048), (2048, 1536)] * experts
    tensors = [torch.randn(r // shrink, c, device=device).bfloat16() for r, c in shapes]

    def one_by_one() -> list[Tensor]:
        sums = torch.stack([digest_on_device(tensor) for tensor in tensors])
        return [sums, torch.stack([torch.isfinite(tensor).all() for tensor in tensors])]

    yield Case(
        f"{len(tensors)} tensors of {experts} experts, bfloat16",
        lambda: [*digest.digests(tensors, finite=True)],
        {"one by one": one_by_one},
        moved=sum(tensor.nbytes for tensor in tensors),
        written=9 * len(tensors),
    )


# rows, heads, width, dtype: hidden rows of a wide MoE layer and of GLM-4.7-Flash, keys of Qwen3-30B
NORMS = [
    (8192, 1, 512, torch.float32),
    (16384, 1, 2048, torch.bfloat16),
    (16384, 4, 128, torch.bfloat16),
]


def rms_norm(device: str, shrink: int = 1) -> Iterator[Case]:
    """Rows over the root of their mean square, and torch's ``F.rms_norm``; both passes also with a
    gradient of the rows themselves to add."""

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, EPS)

    def in_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, EPS)

    for rows, heads, width, dtype in NORMS:
        rows //= shrink
        wide = torch.randn(rows, 10 * heads if heads > 1 else 1, width, device=device, dtype=dtype)
        x = wide[:, -heads:]
        weight = torch.rand(width, device=device, dtype=dtype)
        grads = torch.randn(2, *x.shape, device=device, dtype=dtype).unbind()
        name = f"{rows} x {f'{heads} of {10 * heads} x ' * (heads > 1)}{width}, {str(dtype)[6:]}"
        one = grads[0].nbytes
        runs = {"ours": ours, "torch": in_torch}
        sizes = (2 * one, 5 * one), (one, one)
        yield from both(name, runs, (x, weight), grads[:1], *sizes, agree=rounded(dtype))
        if heads == 1:
            yield Case(
                f"both and a residual's gradient, {name}",
                gradients(partial(ops.rms_norm_residual, eps=EPS), (x, weight), grads),
                {"torch": gradients(lambda x, w: (in_torch(x, w), x), (x, weight), grads)},
                moved=6 * one,
                written=one,
                agree=rounded(dtype),
            )


# lengths of sequences, value heads, columns of a key and of a value: minibatches of
# configs/tiny_qwen3_next.yaml, of longer responses, and one long response of the 80B's heads
SEQUENCES = [((17,) * 64, 8, 16), ((20, 100, 400, 500), 8, 16), ((100, 924), 4, 128)]


def gated_delta_rule(device: str, shrink: int = 1) -> Iterator[Case]:
    """Packed sequences in chunks, and transformers' torch form of a batch of sequences that are as
    long as the longest; equal to the rounding of float32 over a sequence."""

    def padded(*rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
        batch = [pad_sequence([*each.split(lengths)], batch_first=True) for each in rows]
        out = torch_chunk_gated_delta_rule(*batch)[0]
        return torch.cat([each[:length] for each, length in zip(out, lengths, strict=True)])

    for lengths, heads, width in SEQUENCES:
        lengths = tuple(max(length // shrink, 1) for length in lengths)
        shape = sum(lengths), heads
        q, k = (F.normalize(torch.randn(*shape, width, device=device), dim=-1) for _ in range(2))
        v, grad = torch.randn(2, *shape, width, device=device)
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        one = v.nbytes
        yield from both(
            f"{len(lengths)} sequences, {sum(lengths)} rows, {heads} heads of {width}",
            {
                "ours": partial(ops.gated_delta_rule, cu_seqlens=ends),
                "transformers": partial(padded, lengths=lengths),
            },
            (q, k, v, -torch.rand(shape, device=device), torch.rand(shape, device=device)),
            [grad],
            moved=(4 * one, 11 * one),
            written=(one, one),
            bars=({}, {"transformers": 1}),
            agree=partial(near, bound=1e-4),
        )


def expert_rows(device: str, shrink: int = 1) -> Iterator[Case]:
    """The rows of a layer's experts, and torch's operators and megatron's sort: of a wide MoE
    layer, of one of GLM-4.7-Flash and of DeepSeek-V3."""

    def by_sort(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Weights and rows as megatron-core's ``permute`` finds them; it has no inverse."""
        order = routing_map.T.contiguous().reshape(-1).argsort(descending=True, stable=True)
        order = order[: len(routing_map) * top_k]
        return probs.T.contiguous().reshape(-1)[order], order % len(routing_map)

    def ours(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, ...]:
        return op(routing_map, probs, top_k)

    def in_torch(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, ...]:
        return reference.expert_rows(routing_map, probs, top_k)

    def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(ours, theirs))

    for tokens, experts, top_k in [(8192, 64, 4), (16384, 64, 4), (32768, 256, 8)]:
        tokens //= shrink
        probs = torch.rand(tokens, experts, device=device)
        ids = probs.topk(top_k).indices
        chosen = torch.zeros(tokens, experts, dtype=torch.bool, device=device).scatter(1, ids, True)
        runs = {"ours": ours, "torch": in_torch, "sort": by_sort}
        rows = tokens * top_k
        dense = tokens * experts
        written = 28 * rows + 8 * tokens
        yield from both(
            f"{tokens}, {top_k} of {experts}",
            {name: partial(run, routing_map=chosen, top_k=top_k) for name, run in runs.items()},
            [probs],
            [torch.rand(rows, device=device)],
            moved=(written + dense + 4 * rows, written + 5 * dense + 28 * rows),
            written=(written, written + 4 * dense),
            bars=({"torch": 2, "sort": 2}, {}),
            agree=equal,
        )


class Given:
    """Hands megatron's routing function the experts of ``ids``, as its own replay does."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def get_replay_topk(self, scores: Tensor, *_args: object, **_kwargs: object) -> tuple:
        return scores.gather(1, self.ids), self.ids


def replay_probs(device: str, shrink: int = 1) -> Iterator[Case]:
    """A router with replayed experts: the operator alone, against the same steps in torch; then a
    whole router from its logits, against megatron-core's. Ours takes ids as they are stored, uint8;
    megatron's need int64."""

    def in_torch(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values = scores.gather(1, ids)
        values = values / (values.sum(-1, keepdim=True) + 1e-20) * SCALE
        chosen = torch.zeros_like(scores).int().scatter(1, ids, 1).bool()
        return torch.zeros_like(scores).scatter(1, ids, values), chosen

    def ours(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ops.replay_probs(scores, ids, "sum", SCALE, scores.dtype)

    def router(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ours(logits.sigmoid(), ids)

    def megatron(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        given: Any = Given(ids)
        return topk_routing_with_score_function(
            logits,
            ids.shape[1],
            scaling_factor=SCALE,
            score_function="sigmoid",
            router_replay=given,
        )

    for experts, top_k in [(64, 4), (160, 8)]:
        tokens = 65536 // shrink
        logits = torch.randn(tokens, experts, device=device)
        scores = logits.sigmoid()
        grad = torch.randn_like(logits)
        wide = torch.rand_like(logits).topk(top_k).indices
        ids = wide.to(torch.uint8)
        dense = tokens * experts
        chosen = tokens * top_k
        name = f"{tokens} x {experts}, top {top_k}"
        yield Case(
            f"probs and map from scores, {name}",
            forward(ours, (scores, ids)),
            {"torch": forward(in_torch, (scores, wide))},
            moved=5 * dense + 5 * chosen,
            written=5 * dense,
        )
        yield from both(
            name,
            {"ours": partial(router, ids=ids), "megatron": partial(megatron, ids=wide)},
            [logits],
            [grad],
            moved=(9 * dense + chosen, 13 * dense + 6 * chosen),
            written=(5 * dense, 9 * dense),
            of="router ",
        )
