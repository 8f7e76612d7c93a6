"""Declaration of an operator: one schema, one fake, one gradient, any number of backends.

An operator is local and pure: it touches no process group and mutates no argument. Collectives
live one layer up, in the functions that call operators.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu

# Globals: autograd computes gradients on a GPU in another thread, with an empty context.
_named: str | None = None
_on_gpu = "auto"


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _accept(*args: Any) -> str | None:
    return None


def _behind_first(refuse: Callable[..., str | None], _first: Tensor, *args: Any) -> str | None:
    return refuse(*args)


def refuse_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> str | None:
    """Why a backend that knows ``dtypes`` cannot take the argument ``name``, or None."""
    if tensor.dtype not in dtypes:
        return f"{name} is {tensor.dtype}, expected one of {list(dtypes)}"
    return None


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

    def backend(
        self, name: str, run: Callable[..., Any], *, refuse: Callable[..., str | None] = _accept
    ) -> None:
        """Add a backend after those already added: list the fastest first, the reference last."""
        self.backends.append(Backend(name, run, refuse))

    def serve(self, package: str, *names: str, function: str = "") -> None:
        """Add the backends of modules of ``package``, the fastest first, the reference last.

        A module is imported at its first call, Triton's only where Triton can run. It defines
        ``function`` (by default the operator's name), and it may define ``refuse_<function>``, or
        ``refuse`` for all its functions. A gradient's ``refuse`` gets all arguments but the first.
        """
        function = function or self.name
        for name in names:
            self.backends.append(self._backend_of(package, name, function))

    def _backend_of(self, package: str, name: str, function: str) -> Backend:
        @cache
        def loaded() -> tuple[Callable[..., Any], Callable[..., str | None]]:
            module = import_module(f"{package}.{name}")
            refuse = getattr(module, "refuse", _accept)
            if function.endswith("_grad"):
                refuse = partial(_behind_first, refuse)
            return getattr(module, function), getattr(module, f"refuse_{function}", refuse)

        def run(*args: Any, **how: Any) -> Any:
            return loaded()[0](*args, **how)

        def refuse(*args: Any) -> str | None:
            reason = self._refuse_triton(args) if name == "triton" else None
            return reason or loaded()[1](*args)

        return Backend(name, run, refuse)

    def _refuse_triton(self, args: tuple[Any, ...]) -> str | None:
        """Why Triton cannot run on the device of the first argument, or None."""
        first, *_ = _tensors(args)
        if not on_gpu(first) and os.environ.get("TRITON_INTERPRET") != "1":
            argument = self.overload._schema.arguments[0].name
            return f"{argument} is on {first.device}, expected cuda"
        return None if find_spec("triton") else "triton is not installed"

    def gradient(
        self, backward: Callable[..., Any], save: Callable[..., None] = _save_arguments
    ) -> None:
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
    return _on_gpu if any(map(on_gpu, _tensors(args))) else "auto"


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of a call, those of lists among them."""
    flat = (x for arg in args for x in (arg if isinstance(arg, list) else [arg]))
    return [x for x in flat if isinstance(x, Tensor)]


def serve_gpu_from(name: str) -> None:
    """Serve calls with a tensor on a GPU from the backend ``name``, or raise where it declines.

    ``auto``: from the first that accepts. `use_backend` and ``PYRL_BACKEND`` take precedence.
    """
    global _on_gpu
    _on_gpu = name


@contextmanager
def use_backend(name: str) -> Generator[None]:
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
