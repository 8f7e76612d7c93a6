"""Environments of the package verifiers in worker processes, played through the endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pyrl_ext.data.agent import AgentCall
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.tasksets import load_taskset
from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.tasksets import MOST_TASKS
from pyrl_ext.prompt import Prompt
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Rules,
)
from tests.helpers.deadline import DEADLINE
from tests.helpers.tiny import CONFIG

pytestmark = pytest.mark.multiprocess

ADD = "calc_tools_add"
FOLDER = Path(__file__).parents[1] / "helpers/tasksets"
EXAMPLE = CONFIG.parent / "examples/verifiers.yaml"
LOADED = f"{FOLDER / 'loaded_tasks.py'}:"


class Player:
    """A policy that answers what a function says.

    Args:
        answers: messages of a call -> the text of the answer, or the arguments of a tool call
    """

    def __init__(self, endpoint: Endpoint, answers: Callable[[list[Any]], str | dict[str, str]]):
        self.answers = answers
        self.requests: list[ChatRequest] = []
        self.key = endpoint.add(self)

    async def chat(self, request: ChatRequest) -> Answer:
        self.requests.append(request)
        said = self.answers([*request.messages])
        calls = () if isinstance(said, str) else (("call_1", said["name"], said["arguments"]),)
        return Answer(
            text=said if isinstance(said, str) else None,
            reasoning=None,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            prompt_tokens=3,
            token_texts=("x",),
            logprobs=(-0.5,),
        )

    async def complete(self, request: CompletionRequest) -> Answer:
        raise AssertionError("no task asks for a completion")

    def undelivered(self, answer: Answer) -> None:
        """Nothing is taken back."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(Rules("policy", 1.0, 1.0, (), 32, 100))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def path() -> Iterator[None]:
    """Tasksets of the tests and the examples are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


@pytest.fixture(scope="module")
def plays(path: None) -> Iterator[Pool]:
    with taskset_pool("played_tasks") as pool:
        yield pool


def taskset_pool(name: str, **options: Any) -> closing[Pool]:
    load = partial(load_taskset, name, options)
    return closing(Pool(f"turns.environment: 'verifiers:{name}'", load))


def call_of(pool: Pool, endpoint: Endpoint, player: Player, text: str) -> AgentCall:
    """The call that plays the task with a prompt."""
    (task,) = (task for task in pool.about if task.text == text)
    prompt = Prompt(0, (1,), None, text, {"task": task.key})
    return AgentCall(prompt, endpoint.url, player.key, "policy")


def play(pool: Pool, endpoint: Endpoint, player: Player, text: str) -> Any:
    owner = pool.owner()
    call = call_of(pool, endpoint, player, text)
    (future,) = pool.submit("run", [(call,)], None, owner)
    try:
        return future.result(DEADLINE)
    finally:
        pool.release(owner)


def test_a_task_is_played_with_its_reward_and_its_metrics(plays: Pool, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "three" if len(messages) > 3 else "one")
    assert play(plays, endpoint, player, "Play counts") == (
        5.0,
        {"calls": 2.0, "judge_is_brief": 1.0},
    )
    first, second = player.requests
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Play counts"}
    assert [*first.messages] == [system, user]
    roles = [message["role"] for message in second.messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_a_task_with_several_rewards_has_them_as_components(plays: Pool, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "one")
    reward, components = play(plays, endpoint, player, "Play rewards_twice")
    assert reward == 3.5
    assert components == {"calls": 2.0, "judge_is_brief": 1.0, "length": 3.0, "polite": 0.5}


def test_a_task_may_begin_with_several_messages(plays: Pool, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "one")
    play(plays, endpoint, player, "Play\n\nWhat?\n\ncontinues")
    said = [(message["role"], message["content"]) for message in player.requests[0].messages]
    assert said == [
        ("system", "Be brief."),
        ("user", "Play"),
        ("assistant", "What?"),
        ("user", "continues"),
    ]


def test_trajectories_at_the_same_time_call_with_their_own_keys(plays: Pool, endpoint: Endpoint):
    players = [Player(endpoint, lambda messages, size=size: "x" * size) for size in range(1, 9)]
    calls = [(call_of(plays, endpoint, player, "Play counts"),) for player in players]
    owners = [plays.owner() for _ in players]
    futures = [
        plays.submit("run", [call], None, owner)[0]
        for call, owner in zip(calls, owners, strict=True)
    ]
    rewards = [future.result(DEADLINE)[0] for future in futures]
    for owner in owners:
        plays.release(owner)
    assert rewards == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {len(player.requests) for player in players} == {2}


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("raises", "error", "TaskError: .*no answer"),
        ("is_late", "timeout", r"exceeded a time limit of the taskset \(scoring_timeout\)"),
        ("not_a_number", "reward", "returned components with the sum nan|returned nan"),
        ("plays_twice", "error", "played 2 times, expected once"),
        ("plays_nothing", "error", "ran no agent"),
    ],
)
def test_a_task_that_fails_has_no_reward(
    plays: Pool, endpoint: Endpoint, name: str, reason: str, message: str
):
    player = Player(endpoint, lambda messages: "one")
    with pytest.raises(CallFailed, match=message) as caught:
        play(plays, endpoint, player, f"Play {name}")
    assert caught.value.reason == reason


def test_a_task_that_other_processes_do_not_have_is_an_error(plays: Pool, endpoint: Endpoint):
    prompt = Prompt(0, (1,), None, "Play counts", {"task": "another"})
    call = AgentCall(prompt, endpoint.url, "key", "policy")
    (future,) = plays.submit("run", [(call,)], None, plays.owner())
    with pytest.raises(CallFailed, match=r"no such task, expected load\(\) to give the same"):
        future.result(DEADLINE)


def test_an_error_of_the_endpoint_ends_the_task(plays: Pool, endpoint: Endpoint):
    def refuses(messages: list[Any]) -> str:
        raise ApiError(400, "no room for an answer", "context_length_exceeded")

    player = Player(endpoint, refuses)
    with pytest.raises(CallFailed, match="no room for an answer"):
        play(plays, endpoint, player, "Play counts")
    assert len(player.requests) == 1


def test_a_task_that_hangs_is_given_up_and_others_go_on(plays: Pool, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "one")
    owner = plays.owner()
    call = call_of(plays, endpoint, player, "Play hangs")
    (future,) = plays.submit("run", [(call,)], None, owner)
    plays.give_up(owner, CallFailed("timeout", "too late"))
    with pytest.raises(CallFailed, match="too late"):
        future.result(DEADLINE)
    plays.release(owner)
    assert play(plays, endpoint, player, "Play counts")[0] == 3


def test_a_tool_of_a_task_is_called_and_ends_with_it(path: None, endpoint: Endpoint):
    calls = iter([("subtract", "{}"), (ADD, "1 + 3"), (ADD, "[1, 3]"), (ADD, '{"a": 1, "b": 3}')])

    def adds(messages: list[Any]) -> str | dict[str, str]:
        name, arguments = next(calls, (None, messages[-1]["content"]))
        return arguments if name is None else {"name": name, "arguments": arguments}

    player = Player(endpoint, adds)
    with taskset_pool("adding_tasks") as pool:
        assert play(pool, endpoint, player, "1+3") == (1.0, {})
        tools = [tool["function"]["name"] for tool in player.requests[0].tools]
        assert tools == [ADD]
        results = [m["content"] for m in player.requests[-1].messages if m["role"] == "tool"]
        assert results == [
            "no tool 'subtract', expected calc_tools_add",
            "the arguments are no JSON: Extra data: line 1 column 3 (char 2)",
            "the arguments are a list, expected a JSON object",
            "4",
        ]
        left = [child for child in psutil.Process().children(recursive=True) if _is_tool(child)]
        assert not left


def test_a_tool_of_a_taskset_starts_once_and_ends_with_the_workers(path: None, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "4")
    with taskset_pool("sharing_tasks") as pool:
        for _ in range(2):
            assert play(pool, endpoint, player, "1+3") == (1.0, {})
        assert [tool["function"]["name"] for tool in player.requests[1].tools] == [ADD]
        tools = [each for each in psutil.Process().children(recursive=True) if _is_tool(each)]
        assert len(tools) == 1
    _, alive = psutil.wait_procs(tools, timeout=DEADLINE)
    assert not alive


def _is_tool(process: psutil.Process) -> bool:
    try:
        return "calc_tools" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def test_hangman_of_textarena_rewards_the_word(
    tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    """An environment that verifiers brings; its list of words is one word."""
    words = tmp_path / "corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("plant\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    guesses = iter(["[z]", "[p]", "[plant]"])
    winner = Player(endpoint, lambda messages: next(guesses))
    loser = Player(endpoint, lambda messages: "[z]")
    with taskset_pool("textarena", game="Hangman-v0") as pool:
        (task,) = pool.about[:1]
        text = task.text
        prompt = Prompt(0, (1,), None, text, {"task": task.key})
        rewards: list[float] = []
        for player in (winner, loser):
            owner = pool.owner()
            call = AgentCall(prompt, endpoint.url, player.key, "policy")
            (future,) = pool.submit("run", [(call,)], None, owner)
            rewards.append(future.result(DEADLINE)[0])
            pool.release(owner)
    assert "Hangman" in text and len(winner.requests) == 3
    assert rewards[0] == 1.0 > rewards[1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("played_tasks", {"play": 1}, "turns.options.play is 1: Extra inputs are not permitted"),
        ("played_tasks", {"plays": 1}, "turns.options.plays is 1: Input should be a valid list"),
        ("textarena", {"game": "Chess"}, "turns.options.game is 'Chess': Input should be 'Wordle"),
        ("calc_tools", {}, "defines no `__all__`"),
        ("played_tasks", {"plays": []}, "has no tasks, expected some"),
        ("openenv", {}, "turns.options is {}: Value error, pass `env` or `base_url`"),
        ("nemo_gym", {}, "turns.options.dataset: Field required"),
        ("loaded_tasks", {"does": "raises"}, "KeyError: 'no file' (" + LOADED),
        ("loaded_tasks", {"does": "exits"}, "SystemExit: goodbye (" + LOADED),
        ("loaded_tasks", {"does": "breaks"}, "ValidationError: 2 validation errors for TaskData"),
        ("loaded_tasks", {"does": "repeats keys"}, "3 tasks with 1 different keys, expected a key"),
        ("paired_tasks", {}, "has 2 agents one, two, expected one"),
        ("needing_tasks", {}, "module needing_tasks imports 'not_installed', which is missing"),
    ],
)
def test_a_taskset_that_does_not_load_says_why(
    path: None, name: str, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=r"turns\.environment: '?verifiers:") as caught:
        taskset_pool(name, **options)
    assert message in str(caught.value)


def test_all_tasks_are_there_and_the_first_of_a_taskset_without_end(path: None):
    with taskset_pool("loaded_tasks", does="counts", tasks=MOST_TASKS + 1) as pool:
        assert [task.text for task in pool.about] == [str(n % 16) for n in range(MOST_TASKS + 1)]
    with taskset_pool("endless_tasks", does="counts", tasks=MOST_TASKS + 1) as pool:
        assert [task.text for task in pool.about] == [str(n % 16) for n in range(MOST_TASKS)]


def test_equal_tasks_are_on_one_side_of_the_split(path: None, tmp_path: Path):
    changes = {
        "turns.environment": "verifiers:loaded_tasks",
        "turns.options": "{does: counts, tasks: 64}",
        "run": tmp_path / "run",
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    with closing(build_source(compile_plan(EXAMPLE, overrides))) as source:
        held_out = source.prompts.held_out(64)
        trained = source.prompts.take(0, 64)
    held_texts = {prompt.text for prompt in held_out}
    texts = {prompt.text for prompt in trained}
    assert len(held_out) == len(held_texts) == 2
    assert len(texts) == 14 and not texts & held_texts


def test_processes_of_a_task_end_with_its_worker(path: None, endpoint: Endpoint):
    player = Player(endpoint, lambda messages: "one")
    with taskset_pool("loaded_tasks", does="counts", tasks=1, setup="sleep") as pool:
        (future,) = pool.submit(
            "run", [(call_of(pool, endpoint, player, "0"),)], None, pool.owner()
        )
        end = time.monotonic() + DEADLINE
        while not (started := _sleepers()):
            assert time.monotonic() < end and not future.done()
            time.sleep(0.05)
    _, alive = psutil.wait_procs(started, timeout=DEADLINE)
    assert not alive


def _sleepers() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    found: list[psutil.Process] = []
    for process in below:
        with suppress(psutil.Error):  # it has ended
            if process.name() == "sleep":
                found.append(process)
    return found
