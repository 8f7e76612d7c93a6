"""A teacher on servers: its numbers against those of one on the trainer's ranks, wrong answers."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.show.summary import facts
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.rollout.remote.client import ServerFailed
from pyrl_ext.trainer import teacher_servers
from pyrl_ext.trainer.step import RolloutStep, score_canaries
from pyrl_ext.trainer.teacher_servers import TeacherServers
from tests.helpers import teachers
from tests.helpers.configs import CONFIGS
from tests.helpers.teacher_server import TeacherServer
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess


def plan_with(folder: Path, *overrides: str) -> Plan:
    own = ("objective.distill_coef=0.5", "objective.distill_clip=0.7", *overrides)
    return tiny_plan(*QUICK, f"teacher.model={folder}", *own)


def on(*servers: TeacherServer) -> str:
    return f"teacher.servers=[{','.join(server.address for server in servers)}]"


class Sampled(NamedTuple):
    """The samples of a step, and their teacher."""

    folder: Path
    model: Any
    topo: Topology
    rollout: RolloutSamples


class Taught(NamedTuple):
    """Servers that score samples."""

    folder: Path
    servers: tuple[TeacherServer, TeacherServer]
    topo: Topology
    rollout: RolloutSamples

    def logprobs(self, *overrides: str, servers: int = 1) -> list[torch.Tensor]:
        plan = plan_with(self.folder, on(*self.servers[:servers]), *overrides)
        found = TeacherServers.of(plan, self.topo)
        assert found is not None
        return found.logprobs(self.rollout, self.topo)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Generator[Sampled]:
    folder = tmp_path_factory.mktemp("teacher")
    model = teachers.write_dense(folder)
    plan = plan_with(folder)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        yield Sampled(folder, model, topo, step.take(0, clock))


@pytest.fixture
def taught(sampled: Sampled) -> Generator[Taught]:
    model = sampled.model
    with TeacherServer(model) as one, TeacherServer(model) as two:
        yield Taught(sampled.folder, (one, two), sampled.topo, sampled.rollout)


def columns_of(plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, float], Clock]:
    """The scored rows of the first step, and its metrics."""
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        assert bool(step.teachers) == (not plan.teacher.servers)
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        samples = [*rollout.samples]
        shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock)
        ((gap, _),) = score_canaries(step.policy, samples[:1])
        assert gap == pytest.approx(0, abs=1e-4)  # rows without a teacher move too
        return {**shard.columns}, step.weighed, clock


def test_servers_give_the_numbers_of_the_ranks(tmp_path: Path):
    folder = tmp_path / "teacher"
    model = teachers.write_dense(folder)
    wanted, metrics, _ = columns_of(plan_with(folder))
    with TeacherServer(model) as one, TeacherServer(model) as two:
        found, of_servers, clock = columns_of(plan_with(folder, on(one, two)))
        assert one.asked and two.asked
        asked = [*one.asked, *two.asked]
    assert len(asked) == 16
    for body in asked:
        prompt = body.pop("prompt")
        rest = {"model": "taught", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        assert body == rest and len(prompt) > 2
    assert found.keys() == wanted.keys()
    mask = wanted["loss_mask_0"]
    for name in ("teacher_logprobs", "advantages"):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name][mask], wanted[name][mask], atol=1e-4, rtol=0)
    assert wanted["teacher_logprobs"][mask].std() > 0.5
    assert of_servers == pytest.approx(metrics, abs=1e-4)
    assert clock.seconds["time/teacher_logprobs"] > 0


def test_samples_come_back_in_their_order(taught: Taught):
    model = taught.servers[0].model
    found = taught.logprobs(servers=2)
    assert len(found) == len(taught.rollout.samples) == 16
    for logprobs, sample in zip(found, taught.rollout.samples, strict=True):
        wanted = teachers.logprobs(model, sample.tokens).float()
        torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)


def entries(answer: dict[str, Any]) -> list[dict[str, Any] | None]:
    return answer["choices"][0]["prompt_logprobs"]


def put(answer: dict[str, Any], value: Any, place: int = 2) -> None:
    """Replace the log-prob of a token."""
    entry = entries(answer)[place]
    assert entry is not None
    next(iter(entry.values()))["logprob"] = value


def other_id(answer: dict[str, Any]) -> None:
    entry = entries(answer)[3]
    assert entry is not None
    token, value = entry.popitem()
    entry[str(int(token) + 1)] = value


WRONG: dict[str, tuple[Any, str]] = {
    "one too few": (
        lambda answer: entries(answer).pop(),
        r"of \d+ tokens, expected \d+, the sample",
    ),
    "none at all": (lambda answer: entries(answer).clear(), "of 0 tokens, expected"),
    "no entry": (lambda answer: entries(answer).__setitem__(2, None), r"token 2 .* ids \[\], exp"),
    "of another token": (other_id, r"token 3 of the sample has log-probs of ids \[\d+\], expected"),
    "null": (lambda answer: put(answer, None), r"prompt_logprobs\.2\.\S+\.logprob: .* as of vLLM"),
    "NaN": (lambda answer: put(answer, float("nan")), "token 2 of the sample has log-prob nan"),
    "infinite": (lambda answer: put(answer, -float("inf")), "log-prob -inf, expected a finite"),
    "vLLM's -inf": (lambda answer: put(answer, -9999.0), "log-prob -9999.0, expected a finite"),
    "a logit": (lambda answer: put(answer, 3.5), "log-prob 3.5, .* --logprobs-mode raw_logprobs"),
    "no choice": (lambda answer: answer["choices"].clear(), "choices: List should have at least 1"),
    "no log-probs": (
        lambda answer: answer["choices"][0].pop("prompt_logprobs"),
        r"choices\.0\.prompt_logprobs: Field required, expected choices\[0\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_ends_the_step(name: str, taught: Taught):
    twist, message = WRONG[name]
    first, second = taught.servers
    first.twist = twist
    with pytest.raises(RuntimeError, match=message) as caught:
        taught.logprobs(servers=2)
    assert not isinstance(caught.value, ServerFailed) and len(second.asked) < 16
    assert str(caught.value).startswith(f"teacher.servers: {first.address}/v1/completions: ")


@pytest.mark.parametrize("status", [500, 503])
def test_another_server_takes_the_samples_of_one_that_fails(
    status: int, taught: Taught, capsys: pytest.CaptureFixture[str]
):
    plan = plan_with(taught.folder, on(*taught.servers))
    found = TeacherServers.of(plan, taught.topo)
    assert found is not None
    first, second = taught.servers
    first.status = status
    assert len(found.logprobs(taught.rollout, taught.topo)) == len(second.asked) == 16
    line = f"teacher.servers: {first.address}/v1/completions: {status}"
    assert capsys.readouterr().err.count(line) == 1
    second.status = status
    with pytest.raises(RuntimeError, match="16 of 16 samples have no log-probs") as caught:
        found.logprobs(taught.rollout, taught.topo)
    for server in taught.servers:
        assert f'\n  {server.address}/v1/completions: {status} {{"error"' in str(caught.value)
    first.status = None  # in the next step it is asked again
    assert len(found.logprobs(taught.rollout, taught.topo)) == 16


def test_another_server_takes_the_samples_of_one_that_died(taught: Taught):
    with TeacherServer(taught.servers[0].model) as dies:
        plan = plan_with(taught.folder, on(dies, taught.servers[0]))
        found = TeacherServers.of(plan, taught.topo)
    assert found is not None
    assert len(found.logprobs(taught.rollout, taught.topo)) == 16
    assert not dies.asked


def test_a_server_that_hangs_is_left_at_the_time_limit(taught: Taught):
    first, second = taught.servers
    taught._replace(servers=(second, first)).logprobs()  # its answers are quick from here on
    first.hangs = True
    assert len(taught.logprobs("teacher.request_timeout=10", servers=2)) == 16
    assert first.asked and len(second.asked) == 2 * 16
    second.hangs = True
    with pytest.raises(RuntimeError, match=r"completions: no answer within 0\.5 s"):
        taught.logprobs("teacher.request_timeout=0.5", servers=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_what_a_server_is_asked_at_a_time(
    ranks: int, taught: Taught, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(teacher_servers, "IN_FLIGHT", 4)
    owners = np.arange(16, dtype=np.int32) % ranks
    index = replace(taught.rollout.index, owners=owners)
    first = taught.servers[0]
    first.hangs = True
    asks = taught._replace(rollout=replace(taught.rollout, index=index))
    with pytest.raises(RuntimeError, match="no answer within 1 s"):
        asks.logprobs("teacher.request_timeout=1")
    assert len(first.asked) <= 4 // ranks


def test_a_key_is_sent(taught: Taught, tmp_path: Path):
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("secret\n")
    taught.servers[0].key = "secret"
    assert len(taught.logprobs(f"teacher.key={tmp_path / 'key'}")) == 16
    with pytest.raises(RuntimeError, match="401"):
        taught.logprobs()
    with pytest.raises(ValueError, match=r"teacher\.key: .*/none.* expected a file with a key"):
        taught.logprobs(f"teacher.key={tmp_path / 'none'}")


def test_models_are_found_by_name(taught: Taught):
    first = taught.servers[0]
    first.models.append({"id": str(taught.folder)})
    taught.logprobs()
    assert first.asked[0]["model"] == str(taught.folder)


def test_a_server_of_other_models_is_refused_at_the_start(taught: Taught):
    first = taught.servers[0]
    first.models.append({"id": "another"})
    wanted = f"models: taught, another, expected {taught.folder}, the teacher.model, or one"
    with pytest.raises(RuntimeError, match=f"{wanted} .*--served-model-name"):
        taught.logprobs()
    models, first.models = first.models[:1], []
    with pytest.raises(RuntimeError, match="models: no model, expected "):
        taught.logprobs()
    first.models = models
    needed = plan_with(taught.folder).longest + 2
    models[0]["max_model_len"] = needed
    taught.logprobs()
    models[0]["max_model_len"] = needed - 1
    message = f"takes {needed - 1} tokens, expected at least {needed}, .*--max-model-len {needed}"
    with pytest.raises(RuntimeError, match=message):
        taught.logprobs()


def test_a_server_that_does_not_answer_is_refused_at_the_start(taught: Taught):
    with TeacherServer(None) as gone:
        plan = plan_with(taught.folder, on(taught.servers[0], gone))
    match = f"{gone.address}/v1/models: .*a vLLM server should answer there. Start it with: vllm"
    with pytest.raises(RuntimeError, match=match):
        TeacherServers.of(plan, taught.topo)


def test_the_plan_shows_where_the_teacher_is():
    servers = "teacher.servers=[http://gpu-17:8000,http://gpu-18:8000]"
    own = ("teacher.model=zai-org/GLM-4.7-Flash", "objective=opd")
    plan = compile_plan(CONFIGS / "glm47.yaml", [*own, servers])
    on_ranks = compile_plan(CONFIGS / "glm47.yaml", own)
    names = [
        {item.name for stage in stage_memory(p) for item in stage.items} for p in (plan, on_ranks)
    ]
    assert "teacher" not in names[0] and "teacher" in names[1]
    times = [step_time(each) for each in (plan, on_ranks)]
    seconds = [time.seconds("teacher_logprobs") for time in times if time is not None]
    assert seconds[0] == 0 < seconds[1]
    shown = dict(facts(plan))
    assert shown["teacher"] == (
        "zai-org/GLM-4.7-Flash on http://gpu-17:8000 and 1 more, which score 512 samples of at "
        f"most {plan.longest + 1:,} tokens a step"
    )
    assert ", on the trainer's ranks, " in dict(facts(on_ranks))["teacher"]
    assert plan.fingerprint == on_ranks.fingerprint
    assert Plan.from_json(plan.to_json()) == plan


def test_servers_may_have_a_model_that_is_not_built_here(tmp_path: Path):
    teachers.write_dense(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "olmo2"}))
    plan = plan_with(tmp_path, "teacher.servers=[http://gpu-17:8000]")
    assert not plan.teacher_plans and plan.teacher_folders == {str(tmp_path): str(tmp_path)}
    with pytest.raises(ConfigError, match="model_type is 'olmo2', expected one of"):
        plan_with(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="No such file or directory"):
        plan_with(tmp_path, "teacher.servers=[http://gpu-17:8000]")
