"""Functions of the user: loading them, and what they may not do to the process."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyrl_ext.data.rewards import number_match
from pyrl_ext.parallel.user_code import (
    SettingsChanged,
    UserExit,
    describe,
    guarded,
    load_function,
    printable,
)
from pyrl_ext.samples import Prompt


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a module of the user; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_load_function_takes_what_is_importable(module):
    reward: Any = load_function("data.reward", "pyrl_ext.data.rewards:number_match", 3)
    assert reward.__wrapped__ is number_match and reward.__qualname__ == "number_match"
    assert reward(Prompt(0, (1,), "3"), "it is 3", []) == 1.0
    name = module(
        "given_a", "class R:\n @staticmethod\n def f(a, scale, config): return a * config"
    )
    assert load_function("k", f"{name}:R.f", 2, config=3, other=4)(2, 0) == 6


WRONG = [
    ("my_a", "expected grpo or package.module:function"),
    ("my_a:", "expected grpo or package.module:function"),
    (":f", "expected grpo or package.module:function"),
    ("my_z:length", "no module 'my_z', expected one on the Python path"),
    ("my.z:length", "no module 'my', expected one on the Python path"),
    ("os.no_such:f", "no module 'os.no_such'"),
    ("my_a:len", "no 'len' in my_a, expected one of: length, limit"),
    ("my_a:limit", "a int, expected a function"),
    ("my_a:length", r"takes \(prompt\), expected 3 positional arguments"),
    ("my_b:f", "module my_b imports 'does_not_exist_anywhere'"),
    ("my_c:f", r"my_c.py:2: SyntaxError: .*, expected a module that imports"),
    ("my_d:f", r"my_d.py:1: module my_d raised KeyError: 'at import', expected a module"),
    ("my_e:f", r"my_e.py:2: module my_e raised SystemExit: 0, expected a module that imports"),
    ("my_k:f", r"my_k.py:2: module my_k raised KeyboardInterrupt, expected a module that imports"),
    ("builtins:max", r"no signature found .*, expected a Python function of 3 positional"),
]


@pytest.mark.parametrize(("name", "message"), WRONG, ids=[name for name, _ in WRONG])
def test_load_function_explains_what_does_not_load(module, name: str, message: str):
    module("my_a", "limit = 3\ndef length(prompt): return 1\n")
    module("my_k", "pass\nraise KeyboardInterrupt\n")
    module("my_b", "import does_not_exist_anywhere\n")
    module("my_c", "\ndef f(:\n")
    module("my_d", "raise KeyError('at import')\n")
    module("my_e", "import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=f"data.reward: '{name}'?.*{message}"):
        load_function("data.reward", name, 3, builtin=("grpo",))


def test_load_function_refuses_a_module_that_changes_settings(module):
    module("my_f", "import torch\ntorch.set_default_dtype(torch.float64)\ndef f(a): pass\n")
    with pytest.raises(SettingsChanged, match=r"importing my_f: changed torch.get_default_dtype"):
        load_function("data.reward", "my_f:f", 1)
    assert torch.get_default_dtype() == torch.float32


def quiet(_number: int, _frame: Any) -> None: ...


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.is_grad_enabled() from True to False": lambda: torch.set_grad_enabled(False),
    "torch.get_default_dtype() from torch.float32 to torch.float16": lambda: (
        torch.set_default_dtype(torch.float16)
    ),
    "torch.get_default_device() from cpu to meta": lambda: torch.set_default_device("meta"),
    "torch.get_deterministic_debug_mode() from 1 to 0": lambda: torch.use_deterministic_algorithms(
        False
    ),
    "torch.get_num_threads() from": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.backends.cudnn.benchmark from": lambda: setattr(
        torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark
    ),
    "torch.backends.cudnn.deterministic from": lambda: setattr(
        torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic
    ),
    "torch.backends.cuda.matmul.fp32_precision from": lambda: torch.set_float32_matmul_precision(
        "medium"
    ),
    "os.getcwd() from": lambda: os.chdir("/"),
    "signal.getsignal(SIGINT) from": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "signal.getsignal(SIGTERM) from": lambda: signal.signal(signal.SIGTERM, quiet),
}


def settings() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        os.getcwd(),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_guarded_restores_and_reports_a_changed_setting(change: str):
    before = settings()
    with pytest.raises(SettingsChanged) as caught, guarded("data.reward: 'mine:fn'"):
        CHANGES[change]()
    assert settings() == before
    message = str(caught.value)
    assert message.startswith("data.reward: 'mine:fn': changed ") and change in message
    assert message.endswith("Restore them in the function")


def test_guarded_restores_settings_where_the_code_raises():
    before = settings()
    with pytest.raises(KeyError), guarded("k: 'mine:fn'"):
        torch.set_grad_enabled(False)
        raise KeyError
    assert settings() == before


def test_guarded_leaves_what_is_restored_in_peace():
    with guarded("k: 'mine:fn'"):
        with torch.no_grad():
            assert not torch.is_grad_enabled()
        random.random()


def test_guarded_gives_user_code_generators_of_its_own():
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)

    seed()
    wanted = [draws(), draws()]
    seed()
    first = draws()
    with guarded("k: 'mine:fn'"):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        theirs = draws()
    second = draws()
    assert [first, second] == wanted
    with guarded("k: 'mine:fn'"):  # its streams go on where they were
        more = draws()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert [draws(), draws()] == [theirs, more]


class Stop(BaseException): ...


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), GeneratorExit(), Stop("now")])
def test_guarded_never_lets_user_code_end_the_process(error: BaseException):
    name = type(error).__name__
    message = f"'mine:fn': raised {name}.*expected it to return"
    with pytest.raises(UserExit, match=message), guarded("k: 'mine:fn'"):
        raise error


def test_load_function_passes_ctrl_c_while_a_module_is_imported(module):
    module("my_s", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        load_function("k", "my_s:f", 1)
    assert signal.getsignal(signal.SIGINT) is handler


def test_guarded_reports_a_destroyed_process_group():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(SettingsChanged, match=r"^fn: destroyed .* group, expected"), guarded("fn"):
        dist.destroy_process_group()


def test_guarded_passes_ctrl_c():
    with pytest.raises(KeyboardInterrupt), guarded("k: 'mine:fn'"):
        raise KeyboardInterrupt


def test_printable_cuts_and_escapes():
    assert printable("a" * 3, 3) == "aaa"
    assert printable("a" * 5_000_000, 3) == "aaa... (5,000,000 characters)"
    assert printable("x\ud800\u00e9") == "x\\ud800\u00e9"


def test_describe_survives_an_error_without_a_message():
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(Odd()) == "Odd: its message raised ValueError"
    assert describe(KeyError()) == "KeyError"
