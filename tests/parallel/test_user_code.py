"""Functions of the user: loading them, and showing their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.data.rewards import number_match
from pyrl_ext.parallel.user_code import (
    describe,
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
    ("builtins:max", r"no signature found .*, expected a Python function of 3 positional"),
]


@pytest.mark.parametrize(("name", "message"), WRONG, ids=[name for name, _ in WRONG])
def test_load_function_explains_what_does_not_load(module, name: str, message: str):
    module("my_a", "limit = 3\ndef length(prompt): return 1\n")
    module("my_b", "import does_not_exist_anywhere\n")
    module("my_c", "\ndef f(:\n")
    module("my_d", "raise KeyError('at import')\n")
    module("my_e", "import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=f"data.reward: '{name}'?.*{message}"):
        load_function("data.reward", name, 3, builtin=("grpo",))


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
