"""Functions that a plan names as ``package.module:function``: loaded and called under a guard.

Such a function runs in the process that trains. If it changed a setting of that process, for
example by ``torch.set_grad_enabled(False)``, the run would train nothing or something else without
an error. So every import and every call is guarded: see `guarded`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SHOWN = 500  # characters of an error that user code raised


def printable(text: str, limit: int = _SHOWN) -> str:
    """``text`` cut after ``limit`` characters, with lone surrogates escaped so that it prints."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shown(value: object, limit: int = _SHOWN) -> str:
    """``repr(value)``, cut, on a line that prints."""
    try:
        return printable(repr(value), limit)
    except Exception as error:  # an int of 5,000 digits, or a repr of the user's
        return f"a {type(value).__name__} whose repr raised {type(error).__name__}"


def describe(error: BaseException) -> str:
    """``Type: message`` of an error that user code raised, on a line that prints."""
    try:
        message = str(error)
    except Exception as unprintable:
        message = f"its message raised {type(unprintable).__name__}"
    return f"{type(error).__name__}: {printable(message)}".removesuffix(": ")


def load_function(
    key: str, name: str, num_args: int, builtin: Sequence[str] = (), **given: Any
) -> Callable[..., Any]:
    """The function called ``name``, importable from where the run was started; calls are guarded.

    Args:
        key: the config key that holds the name, for messages.
        name: ``package.module:function``.
        num_args: positional arguments that it is called with.
        builtin: names that need no module, for messages.
        given: passed to the function if it has a parameter of that name.

    Raises:
        ValueError: the name has no colon; the module or the function is missing; the module does
            not import; the function does not take ``num_args`` positional arguments.
    """
    if not all(name.partition(":")):
        accepted = " or ".join([*builtin, "package.module:function"])
        raise ValueError(f"{key}: {name!r}, expected {accepted}")
    where = f"{key}: {name!r}"
    bound = _bound(where, load_callable(key, name), num_args, given)
    function = bound.func

    @wraps(function)
    def call(*args: Any) -> Any:
        with guarded(where):
            return bound(*args)

    return call


def load_callable(key: str, name: str) -> Callable[..., Any]:
    """The function or class called ``name`` as it is: nothing guards its calls.

    Raises:
        ValueError: as `load_function`, but for its arguments.
    """
    module_name, _, attribute = name.partition(":")
    where = f"{key}: {name!r}"
    function = _import(where, module_name)
    for part in attribute.split("."):
        if not hasattr(function, part):
            public = sorted(n for n in dir(function) if not n.startswith("_"))
            shown = printable(", ".join(public)) or "nothing"
            raise ValueError(f"{where}: no {part!r} in {module_name}, expected one of: {shown}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, expected a function")
    return function


def _import(where: str, module_name: str) -> Any:
    rule = "expected a module that imports"
    pressed = list[int]()
    try:
        with _ctrl_c_noted() as pressed, guarded(f"{where}: importing {module_name}"):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ValueError(
                f"{where}: module {module_name} imports {missing!r}, which is missing, {rule}"
            ) from error
        raise ValueError(
            f"{where}: no module {missing!r}, expected one on the Python path. Run from the folder "
            "that holds it, or set PYTHONPATH"
        ) from error
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise ValueError(f"{where}: {place}: {describe(error)}, {rule}") from error
    except SettingsChanged:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if pressed:
            raise
        cause = error.__cause__ if isinstance(error, UserExit) else error
        frames = traceback.extract_tb((cause or error).__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        raise ValueError(
            f"{where}: {place}: module {module_name} raised {describe(cause or error)}, {rule}"
        ) from error


@contextmanager
def _ctrl_c_noted() -> Generator[list[int]]:
    """A list that is empty as long as no SIGINT came: a KeyboardInterrupt is then user code's."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if callable(handler):
            handler(number, frame)

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, handler)


def _bound(
    where: str, function: Callable[..., Any], num_args: int, given: dict[str, Any]
) -> partial[Any]:
    """``function`` with the ``given`` arguments that it has parameters for, its signature checked.

    Raises:
        ValueError: it has no signature, or does not take ``num_args`` positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {describe(error)}, expected a Python function of {num_args} positional "
            "arguments. Wrap it in one"
        ) from error
    bound = partial(function, **{k: v for k, v in given.items() if k in signature.parameters})
    try:
        inspect.signature(bound).bind(*range(num_args))
    except TypeError as error:
        raise ValueError(
            f"{where} takes {signature}, expected {num_args} positional arguments"
        ) from error
    return bound


class UserExit(RuntimeError):
    """User code tried to end the process, for example by ``sys.exit``."""


def exit_in(where: str, error: BaseException) -> UserExit:
    """Stands for an ``error`` outside of `Exception` that ``where`` raised."""
    found = UserExit(
        f"{where}: raised {describe(error)}, expected it to return; ending the process would "
        "end the training unfinished. Raise an Exception to report a failure"
    )
    found.__cause__ = error
    return found


class SettingsChanged(ValueError):
    """User code changed a setting of the process."""


@contextmanager
def guarded(where: str) -> Generator[None]:
    """Run user code so that it can neither end the process quietly nor change how it trains.

    - Settings that it leaves changed (grad mode, default dtype and device, deterministic mode,
      precision of float32 products, number of threads, working directory, handlers of SIGINT and
      SIGTERM) are set back, and the change is an error.
    - Random numbers come from separate generators, kept from call to call: what it draws or seeds
      does not affect the trainer.
    - ``sys.exit`` and other exceptions outside of `Exception` become a `UserExit`. Ctrl-C passes.

    Syncs: nothing; the states of generators, those of CUDA too, are in host memory.

    Args:
        where: names the function in messages.

    Raises:
        SettingsChanged: naming each setting, its value before and after.
        UserExit: the code raised SystemExit or the like.
    """
    before = _read_settings()
    grouped = dist.is_initialized()
    try:
        with _STREAMS.swapped_in():
            yield
    except (Exception, KeyboardInterrupt):
        _restore_settings(before)
        raise
    except BaseException as error:
        _restore_settings(before)
        if getattr(error, "passes_guard", False):
            raise
        raise exit_in(where, error) from error
    if grouped and not dist.is_initialized():
        raise SettingsChanged(
            f"{where}: destroyed torch.distributed's process group, expected it to leave the "
            "groups alone; the training communicates in them. Leave them as they are"
        )
    if changed := _restore_settings(before):
        raise SettingsChanged(
            f"{where}: changed {'; '.join(changed)}; expected it to leave the settings of the "
            "process alone, since the training runs in it. Restore them in the function"
        )


def _working_directory() -> str | None:
    with suppress(FileNotFoundError):  # deleted
        return os.getcwd()
    return None


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_deterministic(mode: int) -> None:
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _set_handler(number: int, handler: Any) -> None:
    if handler is not None:  # None: it was not installed from Python
        signal.signal(number, handler)


def _setter(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


_CUDNN, _CUDA, _ONEDNN = (getattr(torch.backends, n) for n in ("cudnn", "cuda", "mkldnn"))

# name in messages -> (how it is read, how it is set)
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, _set_default_device),
    "torch.get_deterministic_debug_mode()": (
        torch.get_deterministic_debug_mode,
        _set_deterministic,
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.backends.cudnn.deterministic": (
        lambda: _CUDNN.deterministic,
        _setter(_CUDNN, "deterministic"),
    ),
    "torch.backends.cudnn.benchmark": (lambda: _CUDNN.benchmark, _setter(_CUDNN, "benchmark")),
    "torch.backends.cuda.matmul.fp32_precision": (
        lambda: _CUDA.matmul.fp32_precision,
        _setter(_CUDA.matmul, "fp32_precision"),
    ),
    "torch.backends.mkldnn.matmul.fp32_precision": (
        lambda: _ONEDNN.matmul.fp32_precision,
        _setter(_ONEDNN.matmul, "fp32_precision"),
    ),
    "os.getcwd()": (_working_directory, lambda path: path and os.chdir(path)),
    "signal.getsignal(SIGINT)": (
        partial(signal.getsignal, signal.SIGINT),
        partial(_set_handler, signal.SIGINT),
    ),
    "signal.getsignal(SIGTERM)": (
        partial(signal.getsignal, signal.SIGTERM),
        partial(_set_handler, signal.SIGTERM),
    ),
}


def _read_settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS.values()]


def _restore_settings(before: list[Any]) -> list[str]:
    """Set back what differs from ``before``; returns the changes, ready for a message."""
    changes: list[str] = []
    for (name, (read, restore)), was in zip(_SETTINGS.items(), before, strict=True):
        if (now := read()) != was:
            changes.append(f"{name} from {was} to {now}")
            restore(was)
    return changes


class SharedSettings:
    """Settings that all threads of the process share, as they are when this is made.

    User code that runs in several threads at a time leaves no trace of who changed one: the call
    that ends next is taken for it.
    """

    _NAMES = ("torch.get_default_dtype()", "torch.get_deterministic_debug_mode()", "os.getcwd()")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = {name: _SETTINGS[name][0]() for name in self._NAMES}
        self._environ = dict(os.environ)

    def restore(self) -> list[str]:
        """Set back what differs; returns the changes, ready for a message."""
        changes: list[str] = []
        with self._lock:
            for name, was in self._before.items():
                read, restore = _SETTINGS[name]
                if (now := read()) != was:
                    changes.append(f"{name} from {was} to {now}")
                    restore(was)
            now = dict(os.environ)
            was = self._environ
            if now != was:
                keys = sorted(k for k in {*now, *was} if now.get(k) != was.get(k))
                changes.append(printable(f"os.environ at {', '.join(keys)}"))
                for key in keys:
                    if key in was:
                        os.environ[key] = was[key]
                    else:
                        del os.environ[key]
        return changes


class _Streams:
    """The global generators of python, numpy and torch as user code sees them."""

    def __init__(self) -> None:
        self._numpy: Any = None
        self._rest: tuple[Any, ...] | None = None
        self._inside = False

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """Inside, the global generators are those of user code; they begin as copies."""
        if self._inside:  # user code that calls a guarded function
            yield
            return
        if self._numpy is None:
            self._numpy = np.random.MT19937()
        numpy = np.random.get_bit_generator()
        rest = _read_generators()
        np.random.set_bit_generator(self._numpy)
        if self._rest is not None:
            _set_generators(self._rest)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._numpy = np.random.get_bit_generator()
            self._rest = _read_generators()
            np.random.set_bit_generator(numpy)
            _set_generators(rest)


_STREAMS = _Streams()


def _read_generators() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.get_rng_state(), cuda


def _set_generators(states: tuple[Any, ...]) -> None:
    python, cpu, cuda = states
    random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
