"""The native extension: its sources; its instruction set, read once, so in other processes."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest

from pyrl_ext.ops import _native, check_extension
from pyrl_ext.ops._native import C, Outdated, loaded, sources_hash

pytestmark = pytest.mark.multiprocess

ISAS = [isa for isa in ("avx512", "avx2", "portable") if C.has_isa(isa)]

# statistics of one row by "auto" and by every instruction set
STATS = """
import sys
from array import array
from random import Random
from pyrl_ext import _C as C

logits = array("f", [Random(0).gauss(0, 1) for _ in range(4001)])
target, scale = array("q", [7]), array("f", [1])
at = lambda buffer: buffer.buffer_info()[0]
shard = C.LogitsShard(
    logits=at(logits), dtype=C.DType.f32, tokens=1, columns=4001, width=4001,
    targets=at(target), first=0, scale=at(scale), keep=0,
)
for isa in ("auto", *sys.argv[1:]):
    stats = array("f", [0] * 4)
    C.token_logprob_stats_cpu(shard=shard, stats=at(stats), isa=isa, threads=1)
    print(stats.tobytes().hex())
"""


def run(script, isa, *args):
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "PYRL_ISA": isa},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("isa", ["", *ISAS])
def test_auto_isa_is_the_named_one_or_the_widest(isa):
    auto, *stats = run(STATS + "print(C.auto_isa())", isa, *ISAS).stdout.split()
    assert stats.pop() == (isa or ISAS[0])
    assert [auto] * len(ISAS) == stats, "instruction sets give the same bits"


@pytest.mark.parametrize(
    ("isa", "script"),
    [("avx1024", "import pyrl_ext.ops"), ("avx1024", STATS), ("AVX2", STATS), ("auto", STATS)],
)
def test_auto_isa_refuses_what_the_processor_does_not_have(isa, script):
    found = run(script, isa)
    assert found.returncode == 1
    assert f"PYRL_ISA is {isa}, expected what this processor has: {', '.join(ISAS)}" in found.stderr


REPOSITORY = Path(__file__).parents[2]


def test_loaded_refuses_an_extension_of_other_sources(tmp_path, monkeypatch):
    assert loaded(C, REPOSITORY) is C, "CMake and Python compute the same hash"
    copytree(REPOSITORY / "csrc", tmp_path / "csrc")
    assert loaded(C, tmp_path) is C
    changed = tmp_path / "csrc/gather_rows/api.hpp"
    changed.write_text(changed.read_text() + "\n")
    before_hashes = SimpleNamespace(__file__="_C.so")
    for extension, built in ((C, C.sources), (before_hashes, "older sources")):
        outdated = loaded(extension, tmp_path)
        assert isinstance(outdated, Outdated)
        monkeypatch.setattr(_native, "C", outdated)
        expected = f"built from {built}, expected {sources_hash(tmp_path)}, the hash of {tmp_path}"
        with pytest.raises(RuntimeError, match=expected) as refusal:
            check_extension()
        assert str(refusal.value).startswith(extension.__file__)
        assert str(refusal.value).endswith("Build it again with: pip install .")


def test_sources_hash_sees_every_file_and_its_name(tmp_path):
    assert sources_hash(tmp_path) is None, "a wheel brings no sources"
    copytree(REPOSITORY / "csrc", tmp_path / "csrc")
    hashes = [sources_hash(tmp_path)]
    (tmp_path / "csrc/new.hpp").write_text("")
    hashes.append(sources_hash(tmp_path))
    (tmp_path / "csrc/new.hpp").rename(tmp_path / "csrc/sum_rows/new.hpp")
    hashes.append(sources_hash(tmp_path))
    (tmp_path / "csrc/notes.txt").write_text("not compiled")
    assert len({*hashes}) == 3 and sources_hash(tmp_path) == hashes[-1]
