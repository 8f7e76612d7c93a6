"""The plan's list of tensors, the buckets, and that every layout publishes one model."""

import json
import math
import os
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.publish import one_by_one
from pyrl_ext.models.weight_table import RandomWeights
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.parallel import heartbeat, topology
from pyrl_ext.parallel.buckets import ALIGNMENT
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan.model.counts import mtp_parameters, parameters
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.hf.destinations import Destinations
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights import gather
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets
from tests.helpers import passes
from tests.helpers.configs import hf_of
from tests.helpers.measured_step import Live
from tests.helpers.models import COUNTED, FEWER, MODELS
from tests.helpers.published import in_given_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

TINY = hf_of()
TINY_QWEN3 = hf_of("tiny_qwen3")


def written(folder, name, hf):
    path = folder / name.replace(" ", "_").replace("|", "_")
    path.mkdir(exist_ok=True, parents=True)
    partial = path / f"{os.getpid()}"
    partial.write_text(json.dumps(hf))
    partial.rename(path / "config.json")
    return f"model.config={path}/config.json"


def with_limit(plan, limit):
    rollout = plan.rollout.model_copy(update={"bucket_bytes": limit})
    return plan.model_copy(update={"rollout": rollout})


def bytes_of(rows, each=4):
    return sum(
        math.prod(size) * (4 if row.float32 else each) for row in rows for size in row.shapes
    )


# the table ---------------------------------------------------------------------------------------


def fewer(hf):
    """Four layers; of a pattern, one of each kind."""
    kinds = "".join(dict.fromkeys(hf.get("hybrid_override_pattern", "")))
    pattern = {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds)}
    return hf | (pattern if kinds else FEWER)


TRAINED = {n: fewer(hf) for n, hf in COUNTED.items() if not read_sizes(fewer(hf)).unsupported()}


@pytest.mark.parametrize("hf", TRAINED.values(), ids=list(TRAINED))
def test_weight_table_has_the_names_and_shapes_of_transformers(hf):
    with torch.device("meta"):
        config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
        views = Destinations(AutoModelForCausalLM.from_config(config)).parts
    table = read_sizes(hf).weights(0)
    ours = {
        name: size for row in table for name, size in zip(row.hf_names, row.shapes, strict=True)
    }
    assert ours == {name: tuple(view.shape) for name, (view,) in views.items()}


@pytest.mark.parametrize("hf", MODELS.values(), ids=list(MODELS))
def test_weight_table_adds_up_to_the_sizes_of_the_plan(hf):
    sizes = read_sizes(hf)

    def count(mtp_layers):
        rows = [r for r in sizes.weights(mtp_layers) if not r.megatron_name.endswith("expert_bias")]
        return bytes_of(rows) // 4

    assert count(0) == parameters(sizes).total
    if sizes.router_layers and not sizes.state_mixer:  # whose plans refuse MTP layers
        assert count(2) - count(0) == 2 * mtp_parameters(sizes).total


# buckets -----------------------------------------------------------------------------------------

PLANNED = (
    "parallel.dp=1",
    "parallel.dp=4,parallel.ep=4",
    "parallel.tp=2,parallel.pp=2",
    "parallel.tp=4,parallel.ep=2,parallel.etp=2",
    "parallel.pp=2,parallel.vpp=2",
    "parallel.tp=2,parallel.pp=2,parallel.ep=2,parallel.etp=1,model.dtype=bfloat16",
)


@cache
def planned(overrides):
    plan = tiny_plan("replay=off", *overrides.split(","))
    return plan, plan.sizes.weights(0)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(PLANNED),
    st.integers(1, 1 << 20),
    st.sets(st.integers(0, 10**6), max_size=30) | st.none(),
)
def test_plan_buckets_cuts_the_table_in_order(overrides, limit, chosen):
    plan, table = planned(overrides)
    names = [name for row in table for name in row.hf_names]
    only = None if chosen is None else {names[i % len(names)] for i in chosen}
    buckets = plan_buckets(with_limit(plan, limit), table, only=only)
    asked = [slot.name for b in buckets for slot in b.bucket.slots]
    assert asked == [name for name in names if only is None or name in only]

    each = 2 if plan.model.dtype == "bfloat16" else 4
    layers = [
        [p.row.megatron_name.partition(".local_experts.")[0] for p in b.shards] for b in buckets
    ]
    assert len({n for here in layers for n in here}) == sum(len({*here}) for here in layers)
    held = [bytes_of([p.row for p in b.shards], each) for b in buckets]
    assert all(size <= limit or len({*here}) == 1 for size, here in zip(held, layers, strict=True))
    for (one, other), (size, _), here in zip(
        pairwise(buckets), pairwise(held), layers[1:], strict=True
    ):
        first = [p.row for p, n in zip(other.shards, here, strict=True) if n == here[0]]
        assert one.stage != other.stage or size + bytes_of(first, each) > limit, "could be one"
    for bucket in buckets:
        check_buffer(plan, bucket)


def check_buffer(plan, bucket):
    """Parts do not lie over one another, and fill the buffer but for padding."""
    ends = 0
    parts = 0
    for at, place in sorted((at, i) for i, p in enumerate(bucket.shards) for at in p.starts):
        size = math.prod(bucket.shards[place].shape) * bucket.shards[place].dtype.itemsize
        assert at >= ends and at % ALIGNMENT == 0
        ends = at + size
        parts = parts + size
    assert ends <= bucket.scratch
    padding = ALIGNMENT * sum(len(p.starts) for p in bucket.shards)
    even = plan.parallel.ep == 1 or all(p.owner is None for p in bucket.shards)
    assert not even or bucket.scratch <= parts + padding
    live = {p.row.shard for p in bucket.shards if not p.starts}
    assert plan.parallel.pp == 1 or not live
    assert plan.parallel.tp == 1 or live <= {"same"} or plan.parallel.etp_size == 1


# ranks -------------------------------------------------------------------------------------------

MTP = ("model.mtp=true", "parallel.pp=4", "parallel.pipeline_model_parallel_layout=Et|tt|tm|L")
WIDE = {"n_routed_experts": 64, "vocab_size": 8192}  # 1.6 MB of experts a layer, 2 MB of embedding
CASES = {
    "tp2 pp2": (TINY, "parallel.tp=2", "parallel.pp=2"),
    "dp4 ep4": (TINY, "parallel.dp=4", "parallel.ep=4"),
    "tp2 dp2 ep2": (TINY, "parallel.tp=2", "parallel.dp=2", "parallel.ep=2"),
    "tp4 ep2 etp2": (TINY, "parallel.tp=4", "parallel.ep=2", "parallel.etp=2"),
    "tp2 pp2 ep2 etp1, bf16": (
        TINY,
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.ep=2",
        "parallel.etp=1",
        "model.dtype=bfloat16",
    ),
    "pp2 vpp2 dp2": (TINY, "parallel.pp=2", "parallel.vpp=2", "parallel.dp=2"),
    "cp2 dp2 ep2": (TINY, "parallel.cp=2", "parallel.dp=2", "parallel.ep=2"),
    "layer ahead": (TINY | {"num_nextn_predict_layers": 1}, *MTP),
    "tied, odd vocabulary": (
        TINY | {"vocab_size": 127, "tie_word_embeddings": True},
        "parallel.tp=2",
        "parallel.etp=1",
        "parallel.pp=2",
    ),
    "grouped queries, odd vocabulary": (
        TINY_QWEN3 | {"vocab_size": 127},
        "parallel.tp=2",
        "parallel.pp=2",
    ),
}
UPDATED = {"tp2 pp2", "dp4 ep4", "tp4 ep2 etp2"}
SMALL = 20_000  # bytes, less than a layer's experts


def plan_of(folder, name, hf, *overrides):
    path = written(folder, name, hf)
    qwen = {"config": QWEN3} if hf["model_type"] == "qwen3_moe" else {}
    return tiny_plan(path, "replay=off", "batching.tokens_per_microbatch=128", *overrides, **qwen)


def differing(named, expected):
    """Names whose tensors are not ``expected``'s, bit for bit; every name once and in its order."""
    expected = iter(expected)
    wrong = []
    for name, tensor in named:
        other, value = next(expected)
        if name != other or tensor.dtype != value.dtype or not torch.equal(tensor, value):
            wrong.append(name)
    return wrong + [name for name, _ in expected]


def drawn(policy):
    """The initial weights as they are drawn, without any rank."""
    plan = policy.plan
    read = RandomWeights(policy.llm.table, plan.sizes.initializer_range, plan.seed)
    dtype = dtype_of(plan.model.dtype)
    for row in policy.llm.table:
        for name in row.hf_names:
            yield name, read(name).to(torch.float32 if row.float32 else dtype)


def check_case(policy, updated):
    """Kind of publishing -> names that it got wrong."""
    topo = policy.topo
    found = {"one bucket": differing(policy.weights(), drawn(policy))}
    buckets = plan_buckets(with_limit(policy.plan, SMALL), policy.llm.table)
    small = GatheredWeights(buckets, policy.llm.named_parameters(), topo)
    kept = list(small)  # as engines do that fuse tensors
    found["small buckets"] = differing(kept, drawn(policy))
    found["in given memory"] = differing(in_given_memory(small), drawn(policy))
    with patch.object(gather, "_gather_in_turn", gather._gather_at_once):  # as on a GPU
        found["as on a GPU"] = differing(policy.weights(), drawn(policy))
    only = {name for i, (name, _) in enumerate(drawn(policy)) if i % 5 == 2}
    some = [(name, tensor) for name, tensor in drawn(policy) if name in only]
    found["some"] = differing(policy.weights(only), some)
    if updated:
        batch = random_batch(9)
        schedule = plan_microbatches(batch.seqlens, topo.dp_size, 128, cp_size=topo.cp_size)
        passes.step(policy, batch, schedule, replay=False)
        assert len(differing(policy.weights(), drawn(policy))) > 100
        exact = [(name, tensor.clone()) for name, tensor in one_by_one(policy)]
        found["updated"] = differing(policy.weights(), exact)
        found["updated, in given memory"] = differing(in_given_memory(policy.weights()), exact)
    return found, len(buckets)


def memory(folder, *overrides):
    """(bytes held at the peak of a publish, of the largest bucket, of the model), a few buckets."""
    plan = plan_of(folder, "wide", TINY | WIDE, "rollout.bucket_bytes=3MiB", *overrides)
    with passes.built(plan, trainable=False) as policy, Live() as held:
        for _ in policy.weights():
            pass
    return (
        held.peak,
        max(b.scratch for b in policy.tensors.buckets["llm"]),
        bytes_of(policy.llm.table),
    )


def on_ranks(group, folder):
    found = {}
    for name, (hf, *overrides) in CASES.items():
        plan = plan_of(folder, name, hf, *overrides)
        with topology.start(plan) as topo:
            policy = Policy.build(plan, topo, trainable=name in UPDATED)
            found[name] = check_case(policy, name in UPDATED)
    return found, [memory(folder, *CASES[name][1:]) for name in ("tp2 pp2", "dp4 ep4")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(on_ranks, 4, tmp_path_factory.mktemp("publish"))


@pytest.mark.parametrize("case", CASES)
def test_GatheredWeights_are_the_same_on_every_rank(ranks, case):
    for cases, _ in ranks:
        found, buckets = cases[case]
        assert not any(found.values()), found
        assert ("updated" in found) == (case in UPDATED) and buckets > 10


def test_GatheredWeights_take_less_than_two_buckets(ranks):
    for _, measured in ranks:
        for extra, bucket, model in measured:
            assert bucket <= extra < 2 * bucket < model


def test_GatheredWeights_of_one_process_are_its_parameters():
    plan, _ = planned(PLANNED[0])
    with passes.built(plan, trainable=False) as policy:
        live = {t.untyped_storage().data_ptr() for t in policy.llm.named_parameters().values()}
        copied = [n for n, t in policy.weights() if t.untyped_storage().data_ptr() not in live]
        assert not copied and not any(bucket.scratch for bucket in policy.tensors.buckets["llm"])
        assert not differing(policy.weights(), drawn(policy))


# what goes wrong ---------------------------------------------------------------------------------


def test_GatheredWeights_refuse_a_tensor_that_was_not_planned():
    plan, table = planned(PLANNED[0])
    name = "decoder.layers.2.mlp.router.weight"
    with passes.built(plan, trainable=False) as policy:
        buckets = plan_buckets(plan, table)
        live = policy.llm.named_parameters()
        for wrong, words in (
            (live[name][:-1], r"\[7, 64\] torch.float32 on rank 0, expected \[8, 64\]"),
            (live[name].bfloat16(), r"\[8, 64\] torch.bfloat16 on rank 0"),
        ):
            with pytest.raises(ValueError, match=f"GatheredWeights: {name} is {words}"):
                next(iter(GatheredWeights(buckets, live | {name: wrong}, policy.topo)))
        del live[name]
        with pytest.raises(ValueError, match=f"{name} is missing on rank 0, expected"):
            next(iter(GatheredWeights(buckets, live, policy.topo)))


def one_fails(group, folder):
    """Rank 1 raises between two buckets; rank 0 writes its last words to a file."""
    heartbeat.INTERVAL = 0.1
    rank, (hf, *_) = group.rank(), CASES["tp2 pp2"]
    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    plan = plan_of(folder, "fails", hf, "parallel.tp=2", f"rollout.bucket_bytes={SMALL}")
    own = passes.built(plan, trainable=False)
    with own as policy, heartbeat.heartbeats(policy.topo) as beats:
        clock = Clock(on_phase=beats.enter)
        beats.step = 3
        with clock("time/publish"):
            for i, _ in enumerate(policy.weights()):
                if rank == 1 and i == 20:
                    raise ValueError("bad luck")


def test_GatheredWeights_end_all_ranks_when_one_fails(tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1 of 2\n(.*\n)*ValueError: bad luck"):
        run_ranks(one_fails, 2, tmp_path)
    text = (tmp_path / "0.txt").read_text()
    assert "failed in publish of step 3: ValueError: bad luck\n  rank 0 ended in publish" in text
    assert "error: rank 1 (" in text
