"""Plans with remote engines: their number and addresses, memory, publishes, and who waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.ahead import simulate
from pyrl_ext.plan.forecast.engine_memory import engine_memory
from pyrl_ext.plan.forecast.hardware import BROADCAST, GPUS, TCP
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.remote_engines import loop_of, steady_states
from pyrl_ext.plan.forecast.rollout_time import Decoder
from pyrl_ext.plan.forecast.splits import AHEADS, NEARLY, suggest_splits
from pyrl_ext.plan.forecast.step_time import StepTime, step_time
from pyrl_ext.plan.model.counts import parameters

CONFIGS = Path(__file__).parents[2] / "configs"
GLM47 = CONFIGS / "glm47.yaml"
TINY = CONFIGS / "tiny.yaml"
HOSTS = ("rollout.launch.hosts=[a, b]", "rollout.keys=keys", "rollout.gpu_memory_utilization=0.9")


def time_of(plan: Plan) -> StepTime:
    found = step_time(plan)
    assert found is not None
    return found


def test_Plan_counts_the_engines_that_hosts_start():
    plan = compile_plan(GLM47, [*HOSTS, "rollout.launch.port=9000"])
    assert plan.addresses == ("http://a:9000", "http://a:9001", "http://b:9000", "http://b:9001")
    assert (plan.num_engines, plan.world_size) == (4, 8)
    assert (plan.transport, plan.shares_gpus, plan.engine_sleeps) == ("servers", False, False)
    assert plan.engine_of_rank == tuple(range(8))  # every rank asks all of them
    beside = compile_plan(GLM47)
    assert (beside.num_engines, beside.addresses) == (2, ())
    assert beside.engine_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)


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
        assert sent.amount == whole and "at once by NCCL" in sent.why
        beside = costs["gather weights"].seconds if "gather weights" in costs else 0.0
        assert sent.seconds + beside == pytest.approx(whole / BROADCAST)


def test_publishes_beside_what_trains_behind_remote_engines():
    """At ahead 0 nothing runs next to it."""
    for keys, beside in (
        ([*HOSTS, "rollout.ahead=1"], True),
        ([*HOSTS, "rollout.ahead=0"], False),
        ([*HOSTS, "rollout.ahead=1", "rollout.overlap_publish=false"], False),
    ):
        assert compile_plan(GLM47, keys).rollout.publishes_beside == beside


def test_Decoder_takes_as_long_for_a_token_as_for_a_step_of_them():
    """The simulator's seconds of a token add up to those of the phase."""
    plan = compile_plan(GLM47, [*HOSTS, "estimate.spread=0", "batching.prompts=64"])
    time = time_of(plan)
    decoder = Decoder(plan, GPUS["H200"])
    (response,) = {sample.response for sample in decoder.samples}
    running = len(decoder.samples)
    assert running <= decoder.running
    tokens = response * decoder.token_seconds(running)
    reads = len(decoder.prompts) * decoder.read_seconds(decoder.prompts[0])
    assert time.seconds("rollout") == pytest.approx(tokens + reads, rel=1e-3)
    zero = simulate(loop_of(plan, time, 0))
    assert zero.seconds == pytest.approx(time.total, rel=2e-3)


def test_steady_states_overlap_generating_and_training():
    plan = compile_plan(GLM47, [*HOSTS, "rollout.ahead=3", "rollout.max_new_tokens=4k"])
    time = time_of(plan)
    states = steady_states(plan, time)
    assert [each.ahead for each in states] == [0, 1, 2, 3]
    zero, *others = states
    assert zero.seconds == pytest.approx(time.total, rel=0.1) and zero.age == 0
    for each in others:
        assert each.oldest <= each.ahead
        least = time.trainer + time.of("publish", "gather weights")
        assert 0.999 * least < each.seconds < zero.seconds
        assert each.train + each.publish + each.wait == pytest.approx(each.seconds)
        assert each.train / each.seconds > zero.train / zero.seconds
        assert each.running > zero.running


def test_steady_states_carry_what_oversample_leaves():
    """A step of ahead is kept for the groups that go on, unless older tokens are trained too."""
    more = [*HOSTS, "rollout.oversample=1.25", "rollout.ahead=1", "rollout.max_new_tokens=4k"]
    plan = compile_plan(GLM47, more)
    loops = [loop_of(plan, time_of(plan), ahead) for ahead in (0, 1, 2)]
    assert [(each.ahead, each.carry) for each in loops] == [(0, False), (0, True), (1, True)]
    assert [len(each.groups(0)) for each in loops] == [80, 80, 80] and loops[0].keep == 64
    states = steady_states(plan, time_of(plan))
    assert [each.ahead for each in states] == [0, 1, 2]
    assert all(each.oldest <= each.ahead for each in states) and states[2].oldest == 2
    older = compile_plan(GLM47, [*more, "rollout.too_old=train"])
    assert loop_of(older, time_of(older), 1).ahead == 1


def test_main_shows_remote_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    assert main([str(GLM47), *HOSTS, "rollout.ahead=1", "--html", str(page)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "4 of vllm, tp 4, on 2 hosts (a, b), each with 8 of their GPUs" in told
    assert "a step on 8 H200 and 16 that generate, 1 ahead" in told
    assert "Simulated from the estimates" in told
    text = page.read_text(encoding="utf-8")
    assert "Remote engines" in text and "idle or paused" in text and ">1 *<" in text
    servers = "rollout.servers=[http://127.0.0.1:8000]"
    assert main([str(TINY), servers, "--html", str(page)]) == 0  # no GPU, so no times
    assert "1 of hf, tp 1, on 1 addresses" in " ".join(capsys.readouterr().out.split())


# Splits ------------------------------------------------------------------------------------------

FEW = (*HOSTS[1:], "rollout.tp=1", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1",
       "model.recompute=full", "batching.prompts=32", "rollout.max_new_tokens=4k",
       "batching.tokens_per_microbatch=8k", "rollout.ahead=1",
       "optimizer.offload=1.0")  # fmt: skip


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """GLM-4.7-Flash with engines on one host; what `FEW` pins leaves few layouts that fit."""
    path = tmp_path / "apart.yaml"
    path.write_text(f"extends: {GLM47}\nrollout:\n  launch: {{hosts: [a], gpus: 2}}\n")
    return path


def test_suggest_splits_finds_the_best_of_all(apart: Path, monkeypatch: pytest.MonkeyPatch):
    found = suggest_splits(apart, FEW, 8, "H200")
    assert found.number == 7
    for each in found.found:
        plan = compile_plan(apart, [*FEW, *each.overrides])
        assert plan.world_size + plan.num_engines == 8 and each.engines == plan.num_engines
        states = steady_states(plan, time_of(plan), [each.state.ahead])
        assert states == (each.state,)
    seconds = [each.state.seconds for each in found.found]
    assert seconds == sorted(seconds)
    monkeypatch.setattr("pyrl_ext.plan.forecast.splits.WANTED", 7)
    every = suggest_splits(apart, FEW, 8, "H200")
    assert len(every.tried) == 7 > len(every.found) > 1  # the others do not fit
    assert min(each.state.seconds for each in every.found) == seconds[0]


def test_suggest_splits_takes_the_fewest_steps_ahead_that_are_nearly_best(apart: Path):
    free = [each for each in FEW if not each.startswith("rollout.ahead")]
    best = suggest_splits(apart, free, 8, "H200").found[0]
    times = {
        s.ahead: s.seconds for s in steady_states(best.trainer.plan, best.trainer.time, AHEADS)
    }
    near = [ahead for ahead, took in times.items() if took <= NEARLY * min(times.values())]
    assert best.state.ahead == min(near) > 0
    plan = compile_plan(apart, [*free, *best.overrides])
    assert plan.rollout.ahead == best.state.ahead


def test_print_suggestions_shows_splits(apart: Path, capsys: pytest.CaptureFixture[str]):
    given = (*FEW, "parallel.ep=8", "rollout.launch.hosts=[a]")  # the engines stay as they are
    assert main([str(apart), *given, "--suggest", "10xH200"]) == 0
    told = capsys.readouterr().out
    assert "1 splits of 10 H200" in told and "engines idle" in told
    assert main([str(apart), *given, "--suggest", "2xH200"]) == 2
    assert "expected more than the GPUs of an engine" in capsys.readouterr().err
