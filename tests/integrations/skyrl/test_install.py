"""`install` reaches every module of SkyRL that holds a function, once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper

from pyrl_ext.integrations import report, skyrl


def test_every_holder_has_the_replacement():
    first = skyrl.install()
    assert [each.ours.rpartition(".")[0] for each in first] == [skyrl.__name__] * len(first)
    for each in first:
        module, _, path = each.theirs.partition(":")
        if "." in path:
            continue  # of a class
        new: Any = getattr(sys.modules[module], path)
        assert module in each.holders
        for name, loaded in list(sys.modules.items()):
            if name.startswith("skyrl."):
                assert new.__wrapped__ not in list(vars(loaded).values()), name


def test_the_model_wrapper_holds_what_it_calls():
    holders = {each.theirs.partition(":")[2]: each.holders for each in skyrl.install()}
    for name in (
        "get_forward_backward_func",
        "setup_per_microbatch_replay_forward",
        "vocab_parallel_entropy",
        "_fused_vocab_parallel_entropy_from_hidden",
        "_fused_lm_head_output_processor",
        "preprocess_packed_seqs",
    ):
        assert megatron_model_wrapper.__name__ in holders[name], name


def test_install_twice_changes_nothing():
    first = skyrl.install()
    before: Any = megatron_model_wrapper.preprocess_packed_seqs
    assert skyrl.install() == first
    assert len(report().splitlines()) == len(first)
    assert all(f"{each.theirs} -> {each.ours}, in " in report() for each in first)
    assert megatron_model_wrapper.preprocess_packed_seqs is before
    assert not hasattr(before.__wrapped__, "__wrapped__")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(skyrl, "VERSION", "0.1.0")
    message = r"skyrl.install: skyrl is installed in version 0.3.0, expected 0.1.0. Run: pip"
    with pytest.raises(RuntimeError, match=message):
        skyrl.install()
