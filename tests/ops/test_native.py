"""The instruction set of the native CPU kernels, in other processes: it is read once."""

import os
import subprocess
import sys

import pytest

from pyrl_ext.ops._native import C

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
