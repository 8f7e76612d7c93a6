"""Plans with remote engines: their number and addresses, memory and weight syncs."""

from __future__ import annotations

import math
import re

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.engine_memory import engine_memory
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.model.counts import mtp_parameters, parameters
from pyrl_ext.plan.model.hardware import BROADCAST, GPUS, TCP
from tests.helpers.configs import CONFIGS
from tests.helpers.plan_pages import time_of

GLM47 = CONFIGS / "glm47.yaml"
TINY = CONFIGS / "tiny.yaml"
HOSTS = ("rollout.launch.hosts=[a, b]", "rollout.keys=keys", "rollout.gpu_memory_utilization=0.9")


def test_Plan_counts_the_engines_that_hosts_start():
    plan = compile_plan(GLM47, [*HOSTS, "rollout.launch.port=9000"])
    assert plan.addresses == ("http://a:9000", "http://a:9001", "http://b:9000", "http://b:9001")
    assert (plan.num_engines, plan.world_size) == (4, 8)
    assert (plan.transport, plan.shares_gpus, plan.engine_sleeps) == ("servers", False, False)
    assert plan.engine_of_rank == tuple(range(8))  # every rank asks all of them
    colocated = compile_plan(GLM47)
    assert (colocated.num_engines, colocated.addresses) == (2, ())
    assert colocated.engine_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)


def test_Plan_takes_the_addresses_of_servers_as_they_are():
    where = "[http://127.0.0.1:8000, http://localhost:8001]"
    plan = compile_plan(TINY, [f"rollout.servers={where}", "parallel.dp=2"])
    assert (plan.num_engines, len(plan.addresses), plan.transport) == (2, 2, "servers")
    assert plan.engine_of_rank == (0, 1)
    other = compile_plan(TINY, ["rollout.servers=[http://127.0.0.1:9]", "parallel.dp=2"])
    assert plan.diff(other) == ()  # a run goes on with other servers


def test_stage_memory_is_free_of_remote_engines():
    names = {
        item.name for stage in stage_memory(compile_plan(GLM47, HOSTS)) for item in stage.items
    }
    assert not any("engine" in name for name in names)
    cpu = compile_plan(TINY, ["rollout.servers=[http://127.0.0.1:8000]"])
    names = {item.name for stage in stage_memory(cpu) for item in stage.items}
    assert not any("engine" in name for name in names)


def test_engine_memory_counts_weights_and_cache():
    plan = compile_plan(GLM47, HOSTS)
    memory = engine_memory(plan)
    assert memory is not None
    assert memory.weights == 2 * parameters(plan.sizes).total // 4
    assert memory.cache == 2 * 47 * (512 + 64)  # a latent and a rotated key, on every GPU
    assert memory.taken == int(0.9 * GPUS["H200"].memory)
    assert memory.tokens == (memory.taken - memory.weights) // memory.cache
    assert memory.least == memory.weights + memory.cache * (512 + 1024)
    drafts = ("model.mtp=true", "rollout.speculation=mtp")
    drafting = engine_memory(compile_plan(GLM47, [*HOSTS, *drafts]))
    assert drafting is not None
    assert drafting.cache == 2 * 48 * (512 + 64)
    layer = 2 * mtp_parameters(plan.sizes).total // 4
    assert drafting.weights == memory.weights + layer
    quantized = engine_memory(compile_plan(GLM47, [*HOSTS, "rollout.quantization=fp8"]))
    assert quantized is not None
    matrices = sum(
        math.prod(shape)
        for row in plan.sizes.weights(0)
        for shape in row.shapes
        if len(shape) == 2
        and not re.search("embed|lm_head|router|mlp.gate.weight", row.hf_names[0])
    )
    assert 0.97 * parameters(plan.sizes).total < matrices
    saved = 4 * (memory.weights - quantized.weights)
    assert saved == pytest.approx(matrices * (1 - 4 / 128**2), abs=4)
    options = "rollout.engine_options={kv_cache_dtype: fp8}"
    assert engine_memory(compile_plan(GLM47, [*HOSTS, options])) is None


def test_step_time_prices_one_send_to_all_engines():
    plan = compile_plan(GLM47, HOSTS)
    costs = {cost.name: cost for cost in time_of(plan).costs if cost.phase == "publish"}
    whole = 2 * parameters(plan.sizes).total
    sent = costs["send weights"]
    assert sent.amount == 4 * whole
    gathered = costs["gather weights"].seconds  # next to it
    assert sent.seconds == pytest.approx(4 * whole / TCP - gathered)
    assert costs["load weights"].amount == whole / 4
    more = compile_plan(GLM47, ["rollout.launch.hosts=[a, b, c]", *HOSTS[1:]])
    assert time_of(more).seconds("publish") > 1.4 * time_of(plan).seconds("publish")


def test_step_time_prices_one_broadcast_whatever_the_number_of_engines():
    for hosts in ("[a, b]", "[a, b, c]"):
        keys = [f"rollout.launch.hosts={hosts}", *HOSTS[1:], "rollout.transport=broadcast"]
        plan = compile_plan(GLM47, keys)
        costs = {cost.name: cost for cost in time_of(plan).costs if cost.phase == "publish"}
        sent = costs["send weights"]
        whole = 2 * parameters(plan.sizes).total
        assert sent.amount == whole and "by NCCL" in sent.why
        gathered = costs["gather weights"].seconds if "gather weights" in costs else 0.0
        assert sent.seconds + gathered == pytest.approx(whole / BROADCAST)


def test_syncs_weights_in_background_needs_steps_ahead():
    """At ahead 0 the trainer has to wait for new samples, and so for the weights."""
    for keys, background in (
        ([*HOSTS, "rollout.ahead=1"], True),
        ([*HOSTS, "rollout.ahead=0"], False),
        ([*HOSTS, "rollout.ahead=1", "rollout.overlap_publish=false"], False),
    ):
        assert compile_plan(GLM47, keys).rollout.syncs_weights_in_background == background


def test_stage_memory_counts_the_copy_that_changes_are_found_in():
    for senders in (1, 2):
        keys = [*HOSTS, f"rollout.senders={senders}", "rollout.delta_sync=true"]
        plan = compile_plan(GLM47, keys)
        items = {item.name: item for item in stage_memory(plan)[0].items}
        copy = items["weights sent before"]
        weights = 2 * parameters(plan.sizes).total // senders
        two_buckets = copy.bytes - weights  # a layer's experts may be more than bucket_bytes
        assert copy.host and 2 * 2**30 <= two_buckets < 3 * 2**30 == 3 * plan.rollout.bucket_bytes
        before = stage_memory(compile_plan(GLM47, keys[:-1]))[0].items
        assert "weights sent before" not in {item.name for item in before}
