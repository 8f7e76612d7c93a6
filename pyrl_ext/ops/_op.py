"""How an operator is declared: one schema, one fake, one gradient, any number of backends.

An operator is local and pure: it touches no process group and mutates no argument. Collectives
live one layer up, in the functions that call operators.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pyrl_ext.ops.on_gpu import on_gpu

# Globals: autograd computes gradients on a GPU in another thread, with an empty context.
_named: str | None = None
_on_gpu = "auto"


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _accept(*args: Any) -> str | None:
    return None


def refuses_first(
    name: str, dtypes: Collection[torch.dtype], refuse_device: Callable[[torch.Tensor], str | None]
) -> Callable[..., str | None]:
    """``refuse`` of a backend that looks at its first argument alone.

    Args:
        name: of the argument, for messages
        dtypes: that it may have; none given: any
        refuse_device: why the backend cannot run on the argument's device, or None
    """

    def refuse(first: torch.Tensor, *_: Any) -> str | None:
        if dtypes and first.dtype not in dtypes:
            return f"{name} is {first.dtype}, expected one of {list(dtypes)}"
        return refuse_device(first)

    return refuse


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation; ``refuse`` says why it cannot take the arguments, or None."""

    name: str
    run: Callable[..., Any]
    refuse: Callable[..., str | None] = _accept


class Op:
    """A ``torch.library`` operator served by the first backend that accepts the call.

    Args:
        schema: ``name(Tensor src, ...) -> Tensor``, registered as ``pyrl_ext::name``.
        fake:   output metadata without data, for ``torch.compile`` and ``meta`` tensors.
    """

    def __init__(self, schema: str, *, fake: Callable[..., Any]):
        name = schema.partition("(")[0]
        self.name = name
        self.qualname = f"pyrl_ext::{name}"
        self.backends: list[Backend] = []
        torch.library.define(self.qualname, schema.removeprefix(name))
        torch.library.impl(self.qualname, ("cpu", "cuda"), self._run)
        torch.library.register_fake(self.qualname, fake)
        self.overload = getattr(torch.ops.pyrl_ext, name).default

    def backend(self, name: str, run: Callable, *, refuse: Callable = _accept) -> None:
        """Add a backend after those already added: list the fastest first, the reference last."""
        self.backends.append(Backend(name, run, refuse))

    def serve(self, *modules: ModuleType, function: str = "") -> None:
        """Add the backends in ``modules``, the fastest first, the reference last.

        Each module holds ``function``, by default the operator's name, and may hold ``refuse``, or
        ``refuse_grad`` for a gradient. The module's name is the backend's.
        """
        for module in modules:
            run = getattr(module, function or self.name)
            refuse = getattr(module, "refuse", _accept)
            if run.__name__.endswith("_grad"):
                refuse = getattr(module, "refuse_grad", refuse)
            self.backend(module.__name__.rpartition(".")[2], run, refuse=refuse)

    def gradient(self, backward: Callable, save: Callable = _save_arguments) -> None:
        """Add the derivative (``backward`` and ``setup_context`` of ``torch.library``); by
        default all arguments are saved, which are then tensors or None."""
        torch.library.register_autograd(self.qualname, backward, setup_context=save)

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def _run(self, *args: Any) -> Any:
        wanted = _named or os.environ.get("PYRL_BACKEND") or _wanted(args)
        refusals = []
        for backend in self.backends:
            if wanted not in ("auto", backend.name):
                continue
            reason = backend.refuse(*args)
            if reason is None:
                return backend.run(*args)
            refusals.append(f"{backend.name}: {reason}")
        tried = "; ".join(refusals) or f"the backends are {[b.name for b in self.backends]}"
        raise NotImplementedError(
            f"{self.qualname}: no backend took the call, expected {wanted!r} to; {tried}"
        )


def _wanted(args: tuple[Any, ...]) -> str:
    if _on_gpu == "auto":
        return _on_gpu
    tensors = (x for arg in args for x in (arg if isinstance(arg, list) else [arg]))
    any_on_gpu = any(isinstance(x, torch.Tensor) and on_gpu(x) for x in tensors)
    return _on_gpu if any_on_gpu else "auto"


def serve_gpu_from(name: str) -> None:
    """Serve calls with a tensor on a GPU from the backend ``name``, or raise where it declines.

    ``auto``: from the first that accepts. `use_backend` and ``PYRL_BACKEND`` take precedence.
    """
    global _on_gpu
    _on_gpu = name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Serve every operator called inside from the backend ``name``, or raise where it declines.

    It holds in every thread of the process, so that gradients taken inside are served by it, too.

    The environment variable ``PYRL_BACKEND`` does the same for a whole process; ``auto`` is the
    first that accepts. The choice is made each time the operator runs, in compiled graphs too.
    """
    global _named
    before = _named
    _named = name
    try:
        yield
    finally:
        _named = before
