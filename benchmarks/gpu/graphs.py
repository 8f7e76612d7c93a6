"""CUDA graphs of the operators: ``python -m benchmarks.gpu.graphs``.

Each operator is captured once with each backend, its inputs are then changed, and what a replay
gives is compared with a plain call, bit for bit. ``--eager`` makes the plain calls alone, without a
GPU.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.gpu.rows import ABSENT, FAILED, OK, first_line, note
from pyrl_ext.loss import vocab_parallel
from pyrl_ext.loss.fused_head import linear_logprob
from pyrl_ext.ops import gather_fields, use_backend
from pyrl_ext.ops._op import Backend
from tests.helpers.contract_cases import CASES, every_op, results

ON_HOST = {"gather_routes": (2,)}  # arguments that stay on the host: layers
HOST_ONLY = ("expand_runs",)  # serves the host alone
BACKENDS = ("native", "triton")


class Captured(NamedTuple):
    """Something to capture: ``run(*args)`` gives tensors."""

    name: str
    run: Callable[..., Sequence[Tensor]]
    args: tuple[Any, ...]


def contract(device: torch.device) -> Iterator[tuple[str, list[Backend], tuple[Any, ...]]]:
    """(name, backends, arguments on ``device``) of the cases of the operators' contract."""
    for name, (qualname, args) in CASES.items():
        kept = ON_HOST.get(qualname, ())
        if qualname in HOST_ONLY or any(isinstance(x, Tensor) and not x.numel() for x in args):
            continue

        def move(x: Any) -> Any:
            return x.detach().clone().to(device) if isinstance(x, Tensor) else x

        moved = (x if i in kept else tree_map(move, x) for i, x in enumerate(args))
        yield name, every_op()[qualname].backends, tuple(moved)


def operators(device: torch.device) -> Iterator[Captured]:
    """The cases of the operators' contract."""
    for name, _, args in contract(device):
        op = every_op()[CASES[name][0]]
        if CASES[name][0] == "gather_fields":  # between fields its buffer holds whatever was there

            def views(fields: Sequence[Tensor], rows: Tensor, fills: Sequence[float], _: bool):
                return gather_fields(fields, rows, fills).views

            yield Captured(name, views, args)
        else:
            yield Captured(name, lambda *given, op=op: results(op, given), args)


def with_gradients(device: torch.device) -> Iterator[Captured]:
    """Log-probs with their gradients, from logits and from hidden states."""
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(1000, (64,), generator=g).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        logits, hidden, weight = (
            torch.randn(*shape, generator=g).to(device, dtype)
            for shape in ((64, 1000), (64, 128), (1000, 128))
        )

        def of_logits(x: Tensor, at: Tensor) -> Sequence[Tensor]:
            leaf = x.detach().requires_grad_()
            found = vocab_parallel.logprobs(leaf, at, with_entropy=True)
            ones = [torch.ones_like(each) for each in found]
            return [*found, *torch.autograd.grad(found, leaf, ones)]

        def of_hidden(x: Tensor, w: Tensor, at: Tensor) -> Sequence[Tensor]:
            leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
            found = linear_logprob(*leaves, at)
            ones = [torch.ones_like(each) for each in found]
            return [*found, *torch.autograd.grad(found, leaves, ones)]

        name = str(dtype)[6:]
        yield Captured(
            f"vocab_parallel.logprobs, both passes, {name}", of_logits, (logits, targets)
        )
        yield Captured(f"linear_logprob, both passes, {name}", of_hidden, (hidden, weight, targets))


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Equal bits, NaN where there is NaN."""
    return all(
        torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num()) if a.is_floating_point()
        else torch.equal(a.cpu(), b.cpu())
        for a, b in zip(ours, theirs, strict=True)
    )  # fmt: skip


def floats(args: Any) -> list[Tensor]:
    return [x for x in tree_flatten(args)[0] if isinstance(x, Tensor) and x.is_floating_point()]


def replayed(case: Captured) -> bool:
    """True if a replay with other inputs gives what a plain call gives."""
    first = [x.clone() for x in floats(case.args)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # loads the kernels
        case.run(*case.args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [x.detach() for x in case.run(*case.args)]
    for factor in (1.0, 0.5):
        others = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, case.args)
        for inputs in (case.args, others):
            for x, before in zip(floats(inputs), first, strict=True):
                x.copy_(before * factor)
        graph.replay()
        if not equal(out, case.run(*others)):
            return False
    return True


def capture(case: Captured, backend: str) -> None:
    """The row of a case."""
    name = f"{backend}: {case.name}"
    try:
        with use_backend(backend):
            same = replayed(case)
        note(name, OK if same else FAILED, "" if same else "a replay gives something else")
    except NotImplementedError as error:
        note(name, ABSENT, first_line(error))
    except Exception as error:
        note(name, FAILED, first_line(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="plain calls alone, on the host")
    eager = parser.parse_args().eager
    device = torch.device("cpu" if eager else "cuda")
    warnings.filterwarnings("ignore", module="megatron")
    for case in (*operators(device), *with_gradients(device)):
        if eager:
            note(case.name, results=len(case.run(*case.args)))
        else:
            for backend in BACKENDS:
                capture(case, backend)


if __name__ == "__main__":
    main()
