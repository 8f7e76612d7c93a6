"""A checkpoint of any layout goes on under any other: bit for bit, and with the same numbers."""

import errno
import shutil
import traceback
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from pyrl_ext.megatron import checkpoint
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.checkpoints import assert_goes_on, content
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

VOCAB = 125  # odd: tp 2 pads it
COMMON = ("optimizer.eps=1e-3", "batching.tokens_per_microbatch=128")
BF16 = "model.dtype=bfloat16"
DISTRIBUTED = "optimizer.distributed=true"
MUON = "optimizer.name=muon"
MOMENTS = "optimizer.moments=bfloat16"
SAVED_BY = {  # in one process
    "one": (),
    "bf16 one": (BF16,),
    "muon one": (MUON,),
    "moments one": (MOMENTS,),
}


class Job(NamedTuple):
    """Load the checkpoint of ``source``, save it again as it is, make a step, and save that."""

    source: str
    overrides: tuple[str, ...] = ()


DP2, TP2, PP2, CP2, EP2 = (f"parallel.{n}=2" for n in ("dp", "tp", "pp", "cp", "ep"))
VPP2 = "parallel.vpp=2"
TWO = {
    "tp2": Job("one", (TP2,)),
    "cp2": Job("one", (CP2,)),
    "pp2 vpp2": Job("one", (PP2, VPP2)),
    "dp2 ep2": Job("one", (DP2, EP2)),
    "tp2 ep2": Job("dp2 ep2", (TP2, EP2, "parallel.etp=1")),
    "distributed": Job("one", (DP2, DISTRIBUTED)),
    "distributed ep2": Job("dp2 ep2", (DP2, EP2, DISTRIBUTED)),
    "bf16 tp2": Job("bf16 one", (TP2, BF16)),
    "bf16 ep2": Job("bf16 one", (DP2, EP2, BF16)),
    "bf16 distributed": Job("bf16 ep2", (DP2, BF16, DISTRIBUTED)),
    "muon tp2 ep2": Job("muon one", (TP2, EP2, "parallel.etp=1", MUON)),
    "moments distributed": Job("moments one", (DP2, DISTRIBUTED, MOMENTS)),
    "moments tp2 ep2": Job("moments distributed", (TP2, EP2, "parallel.etp=1", MOMENTS)),
}
FOUR = {
    "tp2 to pp2 ep2": Job("tp2", (DP2, PP2, EP2)),
    "vpp2 to distributed vpp2": Job("pp2 vpp2", (DP2, PP2, VPP2, EP2, DISTRIBUTED)),
}
KEPT = (BF16, MUON, MOMENTS)
ONE = {
    f"{name} to one": Job(name, tuple(o for o in (TWO | FOUR)[name].overrides if o in KEPT))
    for name in (
        "tp2 ep2",
        "distributed ep2",
        "bf16 ep2",
        "muon tp2 ep2",
        "moments tp2 ep2",
        "vpp2 to distributed vpp2",
    )
}
JOBS = TWO | FOUR | ONE
SOURCES = {job.source for job in JOBS.values()}


def plan_of(folder, *overrides):
    return tiny_plan(f"model.config={folder / 'config.json'}", *COMMON, *overrides)


def step(policy):
    """One update on the same rows in every layout."""
    batch = random_batch()
    batch = replace(batch, tokens=batch.tokens % VOCAB, targets=batch.targets % VOCAB)
    schedule = Scheduler(policy.plan).schedule(batch.seqlens)
    _, metrics = passes.step(policy, batch, schedule)
    return metrics, {name: tensor.clone() for name, tensor in policy.weights()}


def add_reference(policy):
    """A frozen copy with the initial weights, which checkpoints of ``policy`` hold too."""
    policy.reference = Policy.build(policy.plan, policy.topo, trainable=False)
    return policy.reference


def go_on(folder, name):
    """(updates, metrics, weights) after the step of a job, on this rank."""
    job = JOBS[name]
    plan = plan_of(folder, *job.overrides)
    with passes.built(plan) as policy:
        add_reference(policy)
        policy.load(folder / job.source)
        if name not in ONE:
            policy.save(folder / f"{name}, loaded")
        metrics, weights = step(policy)
        if name in SOURCES:
            policy.save(folder / name)
        return policy.updates, metrics, weights


def on_rank(group, folder, names):
    return {name: go_on(folder, name) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_sizes(folder, hf_of() | {"vocab_size": VOCAB})
    return folder


@pytest.fixture(scope="module")
def never_stopped(folder):
    """Options that layouts share -> updates -> (metrics, weights) of one process. It writes a
    checkpoint after the second, with the weights after the first as those of the reference."""
    found = {}
    for name, kept in SAVED_BY.items():
        plan = plan_of(folder, *kept)
        with passes.built(plan) as policy:
            steps = {}
            for updates in range(1, 6):
                steps[updates] = step(policy)
                if updates == 1:
                    add_reference(policy).take_weights(policy)
                if updates == 2:
                    policy.save(folder / name)
        found[kept] = steps
    return found


@pytest.fixture(scope="module")
def two(folder, never_stopped):
    return run_ranks(on_rank, 2, folder, list(TWO), rules=True)


@pytest.fixture(scope="module")
def four(two, folder):
    return run_ranks(on_rank, 4, folder, list(FOUR), rules=True)


@pytest.fixture(scope="module")
def one(two, four, folder):
    return [{name: go_on(folder, name) for name in ONE}]


@pytest.fixture(scope="module")
def results(two, four, one):
    return {name: [r[name] for r in rs] for rs in (two, four, one) for name in rs[0]}


@pytest.mark.parametrize("name", JOBS)
def test_load_continues_with_the_numbers_of_an_uninterrupted_run(name, results, never_stopped):
    kept = tuple(o for o in JOBS[name].overrides if o in KEPT)
    # a moment in the middle between two of bfloat16 goes to one or the other: 2^-8 of an update
    rounded = 3e-3 / 256 if MOMENTS in kept else 0.0
    for updates, metrics, weights in results[name]:
        assert_goes_on(metrics, weights, never_stopped[kept][updates], BF16 in kept, rounded)


def unpadded(folder):
    """A checkpoint without the rows that pad the vocabulary."""
    is_vocab = ("word_embeddings.weight", "output_layer.weight")
    found = content(folder)
    return {k: t[:VOCAB] if k.endswith(is_vocab) else t for k, t in found.items()}


@pytest.mark.parametrize("name", TWO | FOUR)
def test_load_restores_what_save_wrote(name, results, folder):
    """Bit for bit, under names that no layout shows in; model, optimizer and reference."""
    source = JOBS[name].source
    saved = unpadded(folder / source)
    back = unpadded(folder / f"{name}, loaded")
    assert saved.keys() == back.keys()
    assert saved["optimizer"] == back["optimizer"] == {"step": results[name][0][0] - 1}
    kinds = ("optimizer.state.exp_avg_sq.", "optimizer.state.momentum_buffer.")
    moments = [key for key in saved if key.startswith(kinds)]
    assert len(moments) > 50 and all(saved[key].any() for key in moments)
    copies = {key.removeprefix("reference."): saved[key] for key in saved if "reference" in key}
    assert len(copies) > 50 and all(copies[key].shape == saved[key].shape for key in copies)
    assert not torch.equal(copies["output_layer.weight"], saved["output_layer.weight"])
    for key in saved.keys() - {"optimizer"}:
        if MOMENTS in JOBS[name].overrides and ".exp_avg" in key:  # float32 where it was gathered
            assert torch.equal(saved[key].float(), back[key].float()), key
            continue
        assert saved[key].dtype == back[key].dtype and torch.equal(saved[key], back[key]), key


def test_load_names_the_fields_of_another_plan(tmp_path):
    with passes.built(plan := tiny_plan()) as policy:
        policy.save(tmp_path / "step-0")
        same = compile_plan(plan.source, ["steps=7", "parallel.dp=2"])
        assert (same.fingerprint == plan.fingerprint) == (same.diff(plan) == ())
        other = plan.model_copy(update={"seed": 7})
        assert other.fingerprint != plan.fingerprint
        policy.llm.plan = other
        with pytest.raises(ConfigError, match="seed: 7 now, 0 in the saved plan, expected"):
            policy.load(tmp_path / "step-0")


# which checkpoint, and whether it is as it was written --------------------------------------------


def make(folder, *names, counters=True):
    for name in names:
        (folder / name).mkdir(parents=True)
        if counters:
            (folder / name / "counters.json").write_text("{}")


def test_latest_is_the_largest_number_written_to_its_end(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    make(
        tmp_path, "step-2", "step-10", "step-9", "step-12.writing", "step-abc", "step-013", "step-"
    )
    make(tmp_path, "step-11", counters=False)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-10"
    assert [p.name for p in checkpoint.whole(tmp_path)] == ["step-2", "step-9", "step-10"]
    assert checkpoint.incomplete(tmp_path) == [tmp_path / "step-11"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_prune_keeps_the_newest_whole_ones(tmp_path, keep):
    whole = ["step-2", "step-4", "step-10"]
    make(tmp_path, *whole, "step-12.writing", "step-4.replaced", "step-abc", "step-12.mine")
    make(tmp_path, "step-11", counters=False)
    checkpoint.prune(tmp_path, keep)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {*whole[-keep:], "step-abc", "step-11", "step-12.mine"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints of the same weights, in a folder."""
    folder = tmp_path_factory.mktemp("pair")
    with topology.start(tiny_plan()) as topo:
        Policy.build(tiny_plan(), topo).save(folder / "step-1")
    return shutil.copytree(folder / "step-1", folder / "step-2").parent


FILES = (".metadata", "__0_0.distcp", "metadata.json", "counters.json", "plan.json")


def test_load_names_the_file_with_a_changed_bit(pair):
    """Anywhere: in each file at its first and last byte and one in between, and in the digests."""
    newest = pair / "step-2"
    assert {p.name for p in newest.iterdir()} == {*FILES, "digests.json"}
    with topology.start(tiny_plan()) as topo:
        policy = Policy.build(tiny_plan(), topo, initial=False)
        for name in (*FILES, "digests.json"):
            file = newest / name
            whole = file.read_bytes()
            for place in (0, len(whole) // 2, len(whole) - 1):
                file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
                with pytest.raises(ValueError, match=f"{newest}/.*") as caught:
                    policy.load(newest)
                error = str(caught.value)
                assert f"{newest / name}: " in error or name == "digests.json", (place, error)
                assert f"before it, {pair / 'step-1'}, can be used: move {newest} away" in error
            file.write_bytes(whole[:-1])
            with pytest.raises(ValueError, match="can be used: move"):
                policy.load(newest)
            file.unlink()
            with pytest.raises(ValueError, match=f"{name}: missing, expected"):
                policy.load(newest)
            file.write_bytes(whole)
        policy.load(newest)


def damaged_on_ranks(group, folder):
    plan = tiny_plan(DP2)
    with passes.built(plan) as policy:
        policy.save(folder / "step-3")
        policy.load(folder / "step-3")
        torch.distributed.barrier()  # the other rank still reads the whole file
        if policy.topo.is_main:
            file = folder / "step-3" / "__0_0.distcp"
            file.write_bytes(file.read_bytes() + b"more")
        torch.distributed.barrier()
        with pytest.raises(ValueError, match="step-3 is damaged") as caught:
            policy.load(folder / "step-3")
        return str(caught.value)


def test_load_raises_the_same_on_every_rank(tmp_path):
    one, two = run_ranks(damaged_on_ranks, 2, tmp_path)
    assert one == two and "__0_0.distcp: its sha256 is" in one


def test_last_line_has_the_systems_words_for_a_full_disk():
    from torch.distributed.checkpoint.api import CheckpointException

    full = OSError(errno.ENOSPC, "No space left on device", "/runs/x/data")
    hidden = RuntimeError("writer failed")
    hidden.__cause__ = full
    for error in (full, hidden, CheckpointException("", {1: (hidden, traceback.StackSummary())})):
        assert checkpoint._last_line(error) == "No space left on device: /runs/x/data"
    assert checkpoint._last_line(ValueError("first\nlast")) == "last"
