"""One answer under every layout: two rows of `make parity`, the loss scale, what an exception
leaves behind, and that each fix of megatron-core is needed."""

from collections import deque
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.parallel import topology
from pyrl_ext.plan.forecast.parameters import rank_parameters, trained_of_stage
from pyrl_ext.plan.model.freeze import is_named
from pyrl_ext.replay import router_hook
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests import parity
from tests.helpers import passes
from tests.helpers.frozen import FREEZE, PATTERNS, equal_names, frozen_run
from tests.helpers.probe import Probe
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import schedule_of
from tests.parity import (
    BOUNDS,
    LAYOUTS,
    apart,
    compiled,
)

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# microbatches a data-parallel rank, by world size; of 21 samples on 4 ranks 5 leaves one without
SPLITS = {1: (1, 2, 5), 2: (2, 5), 4: (1, 5)}
SPLIT_MODEL = "glm mtp 2"
SPLIT_LAYOUTS = {
    1: {"one process": ()},
    2: {"dp2": ("parallel.dp=2",), "cp2": ("parallel.cp=2",)},
    4: {
        "dp4": ("parallel.dp=4",),
        "dp2 cp2": ("parallel.dp=2", "parallel.cp=2"),
    },
}
# one of them with a first stage of which all is frozen
FROZEN = ("tp2 etp1", "pp2 first:1", "pp2 first:1 distributed overlapped", "dp2 ep2 distributed")
PARITY = {2: {"tp2 ep2 etp1, glm"}, 4: {"pp2 vpp2 cp2 recompute:full, glm"}}
PARITY = {
    2: {"tp2 ep2 etp1, glm", "tp2 ep2 etp1, glm muon", "tp2, qwen muon", "dp2 ep2, qwen muon"},
    4: {"pp2 vpp2 cp2 recompute:full, glm"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def ranks(folder):
    """world size -> what rank 0 found; every check of a world size shares its spawn."""
    chosen = {n: [x for x in LAYOUTS[n] if x.title in names] for n, names in PARITY.items()}
    models = sorted({x.model for some in chosen.values() for x in some} | {"glm"})
    found = {1: run_ranks(on_one, 1, models, folder)[0]}
    for size in (2, 4):
        found[size] = run_ranks(on_many, size, chosen[size], folder)[0]
    return found


def on_one(group, models, folder):
    parity.reference(group, models, folder)
    return {
        "split": gradients_by_split(folder, ()),
        "exception": after_an_exception(folder, ()),
        "frozen": {"one process": run_frozen(folder)},
    }


def on_many(group, layouts, folder):
    found = {
        "parity": parity.on_ranks(group, layouts, folder),
        "split": {
            name: gradients_by_split(folder, overrides)
            for name, overrides in SPLIT_LAYOUTS[group.size()].items()
        },
    }
    if group.size() == 2:
        found["exception"] = [
            after_an_exception(folder, (f"parallel.{name}=2",)) for name in ("dp", "cp")
        ]
        found["frozen"] = {line: run_frozen(folder, line) for line in FROZEN}
    return found


# parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_Policy_of_every_layout_equals_one_process(ranks, world_size):
    rows = ranks[world_size]["parity"]
    assert len(rows) == len(PARITY[world_size])
    assert not parity.too_far(rows)
    assert all(row["checked"] > 1000 for row in rows)


# the loss scale ------------------------------------------------------------------------------


def gradients_by_split(folder, overrides):
    """Splits -> (metrics, gradients) of one minibatch, with every term of the loss switched on."""
    terms = ("objective.kl_coef=0.1",)
    plan = compiled(SPLIT_MODEL, folder, (*terms, *overrides))
    with passes.built(plan) as policy:
        loss = build_loss(plan.objective)
        reference = Policy.build(plan, policy.topo, trainable=False)
        batch = parity.batches(plan, mtp_routes=True)[0]
        g = torch.Generator().manual_seed(1)
        noise = torch.randn(2, len(batch.tokens), generator=g) / 10
        found = {}
        for split in SPLITS[policy.topo.world_size]:
            schedule = deal(len(batch.seqlens), policy.topo.dp_size, split, policy.topo.cp_size)
            scores = passes.scores(reference, batch, schedule).logprobs
            policy.llm.load_initial_weights()  # the passes before it moved the routers' bias
            ready = replace(batch, old_logprobs=scores + noise[0], ref_logprobs=scores + noise[1])
            metrics = passes.accumulate(policy, ready, schedule, loss)
            found[split] = metrics, {n: t.clone() for n, t in policy.gradients()}
    return found


def deal(samples, dp_size, split, cp_size):
    """Samples dealt to rounds in turn; some microbatches are left without any."""
    bins = [[[] for _ in range(dp_size)] for _ in range(split)]
    for i in range(samples):
        bins[i // dp_size % split][i % dp_size].append(i)
    return schedule_of(*bins, cp_size=cp_size)


@pytest.mark.parametrize("layout", [n for some in SPLIT_LAYOUTS.values() for n in some])
def test_accumulate_has_one_loss_scale_for_every_split(ranks, layout):
    whole_metrics, whole = ranks[1]["split"][1]
    assert {"loss", "mtp_loss", "policy/entropy", "policy/ref_kl"} <= whole_metrics.keys()
    size = next(n for n, some in SPLIT_LAYOUTS.items() if layout in some)
    found = ranks[1]["split"] if size == 1 else ranks[size]["split"][layout]
    for split in SPLITS[size]:
        metrics, grads = found[split]
        assert metrics == pytest.approx(whole_metrics, rel=1e-6, abs=1e-6), split
        off, name = max((apart(grads[n], whole[n]), n) for n in whole)
        assert off < BOUNDS["grad"], (split, name, off)


# frozen weights ------------------------------------------------------------------------------


def run_frozen(folder, line=""):
    overrides = parity._layouts(line, "qwen")[0].overrides if line else ()
    freezes = compiled("qwen", folder, (FREEZE, *overrides))
    trains = compiled("qwen", folder, overrides)
    return frozen_run(freezes, trains, folder / f"frozen {line}")


@pytest.mark.parametrize("layout", ["one process", *FROZEN])
def test_Policy_keeps_frozen_weights_and_trains_the_others_as_if_theirs_had_no_gradient(
    ranks, layout
):
    """All to the bit, also after a checkpoint, which the first rank writes even if all of its
    weights are frozen."""
    alone = ranks[1]["frozen"]["one process"]
    run = alone if layout == "one process" else ranks[2]["frozen"][layout]
    frozen = {name for name in run.start if is_named(name, PATTERNS)}
    assert 30 < len(frozen) < 60
    assert equal_names(run.start, run.end) == frozen
    assert equal_names(run.end, run.resumed) == {*run.end}
    assert equal_names(run.end, run.cleared) == {*run.end}
    norms, cleared = run.norms
    assert norms == pytest.approx(cleared, rel=1e-6)
    assert all(apart(run.end[name], alone.end[name]) < 1e-6 for name in run.end)


@pytest.mark.parametrize("layout", ["", "tp2 etp1", "pp2 first:1"])
def test_trained_of_stage_is_what_gradient_buffers_hold_next_to_frozen_weights(
    ranks, folder, layout
):
    overrides = parity._layouts(layout, "qwen")[0].overrides if layout else ()
    plan = compiled("qwen", folder, (FREEZE, *overrides))
    run = ranks[2]["frozen"][layout] if layout else ranks[1]["frozen"]["one process"]
    assert run.trained == rank_parameters(plan, trained_of_stage(plan, 0)).total
    assert (run.trained == 0) == (layout == "pp2 first:1")


# state ---------------------------------------------------------------------------------------


def after_an_exception(folder, overrides):
    """True if replay is clear after a schedule that broke off, and how far apart the gradients of
    the next one are from those of a policy that never saw one."""
    plan = compiled("glm", folder, ("model.recompute=full", *overrides))
    with topology.start(plan) as topo:
        batch = parity.batches(plan, mtp_routes=False)[0]
        schedule = deal(len(batch.seqlens), topo.dp_size, 4, topo.cp_size)
        policy, other = (Policy.build(plan, topo) for _ in range(2))
        loss = build_loss(plan.objective)
        seen = []

        def breaks(*args):
            seen.append(1)
            if len(seen) == 3:
                raise ArithmeticError("in the middle of the schedule")
            return loss(*args)

        with pytest.raises(ArithmeticError):
            passes.accumulate(policy, batch, schedule, breaks)
        clear = policy.llm.replay.is_clear and other.llm.replay.is_clear
        grads = []
        for each in (policy, other):
            passes.accumulate(each, batch, schedule, loss)
            grads.append({n: t.clone() for n, t in each.gradients()})
        return clear, max(apart(grads[0][n], grads[1][n]) for n in grads[0])


def test_accumulate_leaves_nothing_behind_after_an_exception(ranks):
    for clear, off in [ranks[1]["exception"], *ranks[2]["exception"]]:
        assert clear
        assert off == 0


class Forgetful(deque):
    """Keeps no routes for recomputation, so that the newest microbatch's are used."""

    def append(self, _item):
        pass


@pytest.mark.parametrize("memory", [deque, Forgetful])
def test_router_hook_keeps_the_routes_of_a_microbatch_for_recomputation(folder, memory):
    """Two forward passes, then two backward passes, as in a pipeline."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    plan = compiled("glm", folder, ("model.recompute=full",))
    with topology.start(plan) as topo, patch.object(router_hook, "deque", memory):
        policy = Policy.build(plan, topo)
        batch = parity.batches(plan, mtp_routes=False)[0]
        schedule = plan_microbatches(batch.seqlens, 1, 200)
        assert len(schedule) == 2
        probe = Probe(policy)
        probe.expect(batch, schedule, training=True)
        prefetch = passes.prefetch(policy, batch, schedule, replayed=True)
        policy.llm.chunks[0].train()

        def backwards():
            outputs = []
            for _, ready in prefetch.microbatches(0):
                policy.llm.replay.use(0, ready.routes)
                inputs = ready.micro.tokens[None], ready.packed.positions[None], None
                outputs.append(policy.llm.chunks[0](*inputs, packed_seq_params=ready.packed))
            for output in outputs:
                output.sum().backward()

        with policy.llm.replay.session():
            if memory is deque:
                backwards()
                probe.finish(policy.llm.replay.layers)
            else:
                with pytest.raises((AssertionError, RuntimeError)):  # the probe, or a wrong length
                    backwards()
                assert is_checkpointing()  # what megatron leaves behind
        assert policy.llm.replay.is_clear and not is_checkpointing()


def test_update_says_once_that_gradients_are_zero(folder, capsys):
    plan = compiled("glm", folder, ())
    weights = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    with passes.built(plan) as policy:
        batch = parity.batches(plan, mtp_routes=False)[0]
        shard = passes.shard_of(policy, batch, deal(len(batch.seqlens), 1, 1, 1))
        for weight in weights:

            def weighed(logprobs, entropy, fields, weight=weight):
                count = fields.loss_mask.sum()
                return weight * torch.where(fields.loss_mask, -logprobs, 0).sum(), count, {}

            metrics = policy.update(shard, weighed)
            assert (metrics["grad_norm"] == 0) == (weight == 0)
    said = [line for line in capsys.readouterr().out.splitlines() if "is exactly 0" in line]
    assert [line.split(":")[0] for line in said] == ["update 1", "update 5"]
