"""Agents of the official client over servers that get new weights, and that die."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch

from pyrl_ext.data.agent import AgentHost
from pyrl_ext.data.workers import Pool
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.rollout.agents.agent_feed import AgentFeed, AgentsConfig
from pyrl_ext.rollout.agents.chat_format import ChatFormat
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import Rules
from pyrl_ext.rollout.agents.trajectory import TrajectoryConfig
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.engine import ServersEngine
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.protocol import Request
from pyrl_ext.rollout.remote.weight_sync import Publisher
from pyrl_ext.rollout.turns.turn_queue import converse
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.conversations import EOS, TOKENIZER
from tests.helpers.http_engine import (
    EXPERTS,
    LAYERS,
    VOCAB,
    HttpEngine,
    K,
    logprob_of,
    rows_of,
    token_at,
)
from tests.helpers.versions import Versions

pytestmark = pytest.mark.multiprocess

AGENT = "tests.helpers.played_agents:run"
ROUTED = (1, 2, 3)
MODEL = ServedModel(VOCAB, LAYERS, ROUTED, EXPERTS, K)
SEED = 5
CALLS = 3  # of an agent
BUDGET = 20  # tokens of a call
PROMPTS = 6
SIZE = 2  # agents of a prompt
AGENTS = PROMPTS * SIZE


@pytest.fixture(scope="module")
def config() -> Iterator[AgentsConfig]:
    host = partial(AgentHost.load, AGENT, (), {}, None)
    rules = Rules("policy", 1.0, 1.0, (), BUDGET, VOCAB)
    with closing(Endpoint(rules)) as endpoint, closing(Pool("turns.agent: 'test'", host)) as pool:
        endpoint.start()
        turns = Turns(agent=AGENT, max_tokens=100, max_turns=CALLS, timeout=600.0)
        chat = ChatFormat.load(TOKENIZER, "auto")
        yield AgentsConfig(endpoint, pool, TrajectoryConfig(chat, TOKENIZER, (EOS,), turns, BUDGET))


class Play:
    """A rollout of agents in a thread, which all wait after their first call.

    Args:
        engines: that hold first calls until all have come, so that each has some

    Attributes:
        feed: of the agents
        samples: of all trajectories, once `end` has returned
    """

    def __init__(
        self,
        config: AgentsConfig,
        engine: ServersEngine,
        folder: Path,
        engines: Sequence[HttpEngine] = (),
    ):
        self.folder = folder
        self.engines = engines
        for each in engines:
            each.hangs_after = 1
        self.arrived = folder / "arrived"
        self.arrived.mkdir()
        meta = {
            "play": "capitals",
            "arrived": str(self.arrived),
            "goes_on": str(folder / "goes_on"),
        }
        prompts = [Prompt(i, (30,), text=f"{i}3", meta=meta) for i in range(PROMPTS)]
        self.feed = AgentFeed(prompts, SIZE, config)
        self.engine = engine
        self.samples: list[Sample] = []
        self._thread = ThreadPoolExecutor(1)
        self._rollout = self._thread.submit(self._run)

    def _run(self) -> None:
        sampling = Sampling(BUDGET, samples_per_prompt=SIZE, seed=SEED, stop_ids=(EOS,))
        for _, over in converse(self.engine, self.feed, sampling):
            for trajectory in over:
                assert trajectory.samples is not None, trajectory.dropped
                self.samples += trajectory.samples

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Returns once something has happened."""
        while not happened():
            assert not self._rollout.done(), self._rollout.result()
            time.sleep(0.005)

    def wait_for_first_calls(self) -> None:
        """Returns once no call is under way: every agent waits for `go_on`."""
        self.wait_for(lambda: sum(len(each.asked) for each in self.engines) == AGENTS)
        for each in self.engines:
            each.hangs_after = None
        self.wait_for(lambda: len([*self.arrived.iterdir()]) == AGENTS)

    def go_on(self) -> None:
        """Let the agents make their second and third calls."""
        (self.folder / "goes_on").touch()

    def end(self) -> None:
        """Wait for all trajectories. Raises: what the rollout raised."""
        self._rollout.result()
        self._thread.shutdown()


@contextmanager
def over(engines: Sequence[HttpEngine]) -> Iterator[ServersEngine]:
    """An engine over the servers, with weights of version 1."""
    servers = [Server(each.address) for each in engines]
    publisher = cast(Publisher, Versions())
    with closing(ServersEngine(servers, MODEL, publisher, patience=600.0, min_servers=1)) as engine:
        engine.load_weights([], 1)
        yield engine


@pytest.fixture
def engines() -> Iterator[list[HttpEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(HttpEngine()) for _ in range(3)]


def assert_right(samples: Sequence[Sample]) -> None:
    """Every trajectory is what a server that nothing disturbed answers, and so is its reward."""
    assert {(s.prompt_id, s.index) for s in samples} == {
        (prompt, index) for prompt in range(PROMPTS) for index in range(SIZE)
    }
    assert len(samples) == AGENTS
    for sample in samples:
        tokens = sample.tokens.tolist()
        stream = (SEED, sample.prompt_id, sample.index)
        assert [end - begin for begin, end in sample.spans] == [BUDGET] * CALLS
        capitals = 0
        for begin, end in sample.spans:
            answer = tokens[begin:end]
            assert answer == [token_at(stream, place) for place in range(begin, end)]
            assert sample.rollout_logprobs[begin:end].tolist() == [*map(logprob_of, answer)]
            capitals += sum(letter.isupper() for letter in TOKENIZER.decode(answer))
        assert (sample.reward, sample.finish_reason, sample.last) == (capitals, "stop", True)
        rows = torch.from_numpy(rows_of(tokens, 0, len(tokens)))[:, list(ROUTED)]
        assert sample.routes is not None
        assert torch.equal(sample.routes[sample.route_mask], rows[sample.route_mask])
    assert len({sample.reward for sample in samples}) > 1


def asked_by(request: Request) -> tuple[int, int]:
    """Prompt id and index of the trajectory of a request."""
    _, prompt, index = request.random_stream
    return prompt, index


def test_agents_go_on_through_publishes_and_stay_with_their_server(
    config: AgentsConfig, engines: list[HttpEngine], tmp_path: Path
):
    with over(engines) as engine:
        play = Play(config, engine, tmp_path, engines)
        play.wait_for_first_calls()
        engine.load_weights([], 2)  # between two calls of each agent
        generated = sum(each.generated for each in engines)
        for each in engines:
            each.hangs_after = 7
        play.go_on()
        play.wait_for(lambda: sum(each.generated for each in engines) == generated + 7 * AGENTS)
        engine.load_weights([], 3)  # in a call of each agent
        for each in engines:
            each.hangs_after = None
        play.end()
        engine.load_weights([], 4)
        metrics = engine.metrics()
    assert_right(play.samples)
    expected = [1] * BUDGET + [2] * 7 + [3] * (2 * BUDGET - 7)
    for sample in play.samples:
        assert sample.versions[sample.loss_mask].tolist() == expected
    assert metrics["servers/used"] == 3 and metrics["servers/resent"] == 0
    assert metrics["servers/aborted_parts"] == AGENTS
    callers = [{asked_by(request) for request in each.asked} for each in engines]
    assert sum(map(len, callers)) == AGENTS and all(callers)  # a trajectory has one server
    for each in engines:
        for caller in {asked_by(request) for request in each.asked}:
            contexts = [r.token_ids for r in each.asked if asked_by(r) == caller]
            assert len(contexts) == CALLS + 1  # the aborted one went on there
            for context, longer in pairwise(contexts):
                assert longer[: len(context)] == context


def test_agents_do_not_notice_servers_that_die(
    config: AgentsConfig, engines: list[HttpEngine], tmp_path: Path
):
    """One dies between calls, then one under calls: all go on at the third."""
    idle, busy, last = engines
    with over(engines) as engine:
        play = Play(config, engine, tmp_path, engines)
        play.wait_for_first_calls()
        begun = {asked_by(request) for request in idle.asked}, {asked_by(r) for r in busy.asked}
        idle.close()
        busy.dies = 15
        play.go_on()
        play.end()
        assert [state.used for state in engine.router.states] == [False, False, True]
        between, under = [state.server.reason or "" for state in engine.router.states[:2]]
        assert "the connection ended after 0 tokens, [Errno 111] Connect call failed" in between
        assert re.search("the connection ended after [0-9]+ tokens", under)
        engine.load_weights([], 2)
        metrics = engine.metrics()
    assert_right(play.samples)
    assert (
        metrics["servers/requests"] == CALLS * AGENTS < CALLS * AGENTS + metrics["servers/resent"]
    )
    assert metrics["servers/prompts_returned"] == metrics["servers/prompts_asked"] == PROMPTS
    counts = play.feed.counts
    assert counts["begun"] == AGENTS and counts["turns"] == CALLS * AGENTS
    assert counts["retries"] == 0  # no agent began again
    assert all(begun) and set.union(*begun) <= {asked_by(request) for request in last.asked}


def test_agents_end_with_the_last_server(
    config: AgentsConfig, engines: list[HttpEngine], tmp_path: Path
):
    """The rollout says why each is gone; it stops its agents, and the next one runs all of its."""
    (tmp_path / "dies").mkdir()
    with over(engines) as engine:
        play = Play(config, engine, tmp_path / "dies", engines)
        play.wait_for_first_calls()
        for each in engines:
            each.dies = 5
        play.go_on()
        with pytest.raises(RuntimeError, match="0 of 3 servers are left") as caught:
            play.end()
    for each in engines:
        assert f"{each.address}/inference/v1/generate: the connection ended" in str(caught.value)
    (tmp_path / "lives").mkdir()
    with HttpEngine() as one, over([one]) as engine:
        play = Play(config, engine, tmp_path / "lives")
        play.go_on()
        play.end()
    assert_right(play.samples)
    assert not config.endpoint._callees
