"""`install`: the functions that it replaces, the modules that get them, when it refuses, and how
its partition of samples compares with verl's."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils import seqlen_balancing

from pyrl_ext.integrations import patches, report, uninstall, verl
from tests.helpers.deadline import DEADLINE

pytestmark = pytest.mark.multiprocess

REPLAY = "verl.utils.megatron.router_replay_utils"
ENGINE = "verl.workers.engine.megatron.transformer_impl"


@pytest.fixture(autouse=True)
def restored():
    yield
    uninstall()


def test_install_reaches_every_module_and_twice_is_once():
    from verl.models.mcore import model_forward, util

    theirs = util.preprocess_thd_engine
    first = verl.install()
    ours = util.preprocess_thd_engine
    assert ours is not theirs and ours.__wrapped__ is theirs
    assert model_forward.preprocess_thd_engine is ours
    assert verl.install() == first and util.preprocess_thd_engine is ours
    held = {each.theirs: each.holders for each in first}
    assert held[f"{REPLAY}:set_router_replay_data"] == (REPLAY, ENGINE)
    assert held[f"{ENGINE}:MegatronEngine.forward_backward_batch"] == (f"{ENGINE}.MegatronEngine",)
    assert {each.ours.split(".")[-2] for each in first} == {"verl"}
    originals = [getattr(sys.modules[m], f).__wrapped__ for m, f in functions(held)]
    assert not [m for m in verls() if any(x is y for x in vars(m).values() for y in originals)]
    uninstall()
    assert util.preprocess_thd_engine is theirs is model_forward.preprocess_thd_engine


def functions(names):
    """(module, function) of those that are no methods."""
    return [name.split(":") for name in names if "." not in name.partition(":")[2]]


def verls():
    return [module for name, module in list(sys.modules.items()) if name.startswith("verl.")]


def test_install_only_replaces_what_it_names():
    names = {each.theirs.split(":")[0] for each in verl.install(["balance"])}
    assert names == {"verl.utils.seqlen_balancing"}
    line = "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions -> "
    line += "pyrl_ext.integrations.verl.balanced_partitions, in verl.utils.seqlen_balancing"
    assert report().startswith(line) and len(report().splitlines()) == 1
    uninstall()
    assert report() == "integrations: nothing is replaced"
    with pytest.raises(ValueError, match=r"only has \['balances'\], expected some of \['replay'"):
        verl.install(["balances"])


def test_install_refuses_other_versions(monkeypatch):
    monkeypatch.setattr(verl, "VERSION", "0.9.0")
    with pytest.raises(RuntimeError, match=r"installed in version 0\.9\.1, expected 0\.9\.0"):
        verl.install()


def test_replace_refuses_what_is_not_there():
    with pytest.raises(RuntimeError, match="expected a function to replace"):
        patches.replace("verl.utils.seqlen_balancing:no_such", print)


def test_external_modules_of_verl_install():
    script = (
        "import sys, verl; later = 'verl.trainer.distillation.megatron.losses';"
        "assert later not in sys.modules; from verl.trainer.distillation.megatron import losses;"
        "print(losses.preprocess_thd_engine.__pyrl_ext__)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "pyrl_ext.integrations.verl"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["pyrl_ext.integrations.verl.preprocess_thd_engine"]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.randoms(use_true_random=False), st.booleans())
def test_balance_is_never_worse_than_theirs(parts, each, random, equal):
    loads = [random.randint(1, 10 ** random.randint(1, 6)) for _ in range(parts * each)]

    def largest(found):
        return max(sum(loads[i] for i in ids) for ids in found)

    theirs = seqlen_balancing.get_seqlen_balanced_partitions(loads, parts, equal)
    verl.install(["balance"])
    ours = seqlen_balancing.get_seqlen_balanced_partitions(loads, parts, equal)
    uninstall()
    assert sorted(i for ids in ours for i in ids) == list(range(len(loads)))
    assert all(ids == sorted(ids) for ids in ours)
    assert largest(ours) <= largest(theirs)
    if equal:
        assert {len(ids) for ids in ours} == {each}
    else:
        assert ours == theirs


def test_balance_of_long_tails_is_better_than_theirs():
    loads = [2**n for n in range(8)] * 2
    theirs = seqlen_balancing.get_seqlen_balanced_partitions(loads, 4, True)
    verl.install(["balance"])
    ours = seqlen_balancing.get_seqlen_balanced_partitions(loads, 4, True)
    spread = [[sum(loads[i] for i in ids) for ids in found] for found in (theirs, ours)]
    assert max(spread[1]) <= max(spread[0])
