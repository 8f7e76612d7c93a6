"""Agents run in worker processes: their rewards, failures and ends."""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pyrl_ext.data import workers
from pyrl_ext.data.agent import AgentCall, AgentHost
from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.prompt import Prompt
from tests.helpers.chat_server import ChatServer, chat_server
from tests.helpers.deadline import DEADLINE

pytestmark = pytest.mark.multiprocess

AGENTS = "tests.helpers.agents"
GIVEN_UP = CallFailed("timeout", "no result after 1 s")


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def function_pool(name: str, reward: str | None = None, **options: Any) -> closing[Pool]:
    load = partial(AgentHost.load, f"{AGENTS}:{name}", (), options, reward)
    return closing(Pool("turns.agent: 'test'", load))


def command_pool(*command: str, reward: str | None = None) -> closing[Pool]:
    load = partial(AgentHost.load, None, command, {}, reward)
    return closing(Pool("turns.command: 'test'", load))


@pytest.fixture(scope="module")
def functions() -> Iterator[Pool]:
    """Agents that do what the answer names."""
    with function_pool("agent") as pool:
        yield pool


@pytest.fixture(scope="module")
def scripts() -> Iterator[Pool]:
    """Agents that run the prompt's text in a shell."""
    with command_pool("sh", "-c", 'eval "$PYRL_PROMPT"') as pool:
        yield pool


def begin(pool: Pool, call: AgentCall) -> tuple[int, Future[Any]]:
    """The owner of a trajectory, and its result."""
    owner = pool.owner()
    (future,) = pool.submit("run", [(call,)], None, owner)
    return owner, future


def result(pool: Pool, call: AgentCall) -> tuple[float, dict[str, float]]:
    owner, future = begin(pool, call)
    try:
        return future.result(DEADLINE)
    finally:
        pool.release(owner)


def failure(pool: Pool, call: AgentCall) -> CallFailed:
    owner, future = begin(pool, call)
    error = future.exception(DEADLINE)
    pool.release(owner)
    assert isinstance(error, CallFailed)
    return error


def asked(what: str, url: str = "http://127.0.0.1:1/v1", **meta: Any) -> AgentCall:
    """The call of an agent that does what the answer names."""
    return AgentCall(Prompt(7, (5,), what, "Add 2 and 3", meta or None), url, "key-7", "policy")


def script(text: str, key: str = "key-8", **prompt: Any) -> AgentCall:
    """The call of an agent that runs a text in a shell."""
    return AgentCall(Prompt(8, (5,), text=text, **prompt), "http://127.0.0.1:1/v1", key, "policy")


def wait_until(happens: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


def processes(key: str) -> list[psutil.Process]:
    """Those that have an API key in their environment."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if process.environ().get("OPENAI_API_KEY") == key:
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


# functions ----------------------------------------------------------------------------------------


def test_a_coroutine_calls_the_endpoint_with_its_key(functions: Pool, server: ChatServer):
    server.asked.clear()
    assert result(functions, asked("ask", server.url)) == (12.0, {})
    assert server.asked == [("Bearer key-7", "policy")] * 2


def test_an_ordinary_function_calls_the_endpoint_with_its_key(server: ChatServer):
    server.asked.clear()
    with function_pool("asks") as pool:
        assert result(pool, asked("", server.url)) == (6.0, {})
    assert server.asked == [("Bearer key-7", "policy")]


def test_a_function_gets_the_options(server: ChatServer):
    with function_pool("scaled", scale=0.5, plus=1) as pool:
        assert result(pool, asked("", server.url)) == (7.0, {})


def test_a_worker_has_no_torch_and_files_for_many_agents(functions: Pool):
    _, facts = result(functions, asked("about"))
    assert facts["torch"] == 0 and facts["limited"] == 0 and facts["retries"] == 2
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = resource.RLIM_INFINITY
    assert facts["files"] == unlimited or facts["files"] >= min(65_536, hard % 2**63)
    assert facts["process"] != os.getpid()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2, (2.0, {})), (True, (1.0, {})), ({"b": 1, "a": 2}, (3.0, {"a": 2.0, "b": 1.0}))],
)
def test_an_agent_returns_its_reward(functions: Pool, value: Any, expected: Any):
    assert result(functions, asked("return", value=value)) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None, expected a number or a mapping of names to numbers"),
        ("1", "returned '1', expected a finite number"),
        (float("nan"), "returned nan, expected a finite number"),
        ({"a": None}, "returned None as a, expected a finite number"),
        ({}, "returned no components, expected at least one"),
    ],
)
def test_what_is_no_reward_is_refused(functions: Pool, value: Any, message: str):
    found = failure(functions, asked("return", value=value))
    assert (found.reason, found.message) == ("reward", message)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"raised KeyError: 'no tool' \(.*/agents\.py:\d+\)"),
        ("exit", r"raised SystemExit: 3 \(.*/agents\.py:\d+\)"),
        ("cancel itself", r"raised CancelledError \(.*/agents\.py:\d+\)"),
        ("ask", r"raised APIConnectionError: Connection error. \(.*/agents\.py:\d+\)"),
    ],
)
def test_an_agent_that_raises_fails_alone(functions: Pool, what: str, message: str):
    _, before = result(functions, asked("about"))
    found = failure(functions, asked(what))
    assert found.reason == "error" and re.fullmatch(message, found.message)
    assert "Traceback" in found.trace
    _, after = result(functions, asked("about"))
    assert before["process"] == after["process"]


def test_an_ordinary_function_that_returns_a_coroutine_is_refused():
    with function_pool("wraps") as pool:
        found = failure(pool, asked("ask"))
    assert found.reason == "reward"
    assert re.fullmatch(
        "returned <coroutine object .*>, expected a number, or a function with async def",
        found.message,
    )


def test_agents_that_block_run_at_the_same_time(functions: Pool):
    futures = [begin(functions, asked("meet"))[1] for _ in range(4)]
    assert [future.result(DEADLINE) for future in futures] == [(1.0, {})] * 4


def test_a_task_that_an_agent_leaves_is_cancelled(functions: Pool, tmp_path: Path):
    path = tmp_path / "cancelled"
    assert result(functions, asked("leave a task", path=str(path))) == (0.0, {})
    assert path.exists()


def test_an_agent_that_awaits_is_given_up_and_its_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", DEADLINE)
    with function_pool("agent") as pool:
        path = tmp_path / "begun"
        owner, future = begin(pool, asked("wait", path=str(path)))
        (worker,) = pool._workers
        wait_until(path.exists)
        pool.give_up(owner, GIVEN_UP)
        assert future.exception(DEADLINE) is GIVEN_UP
        wait_until(lambda: not worker.given_up)
        _, facts = result(pool, asked("about"))
        assert facts["process"] == worker.process.pid
        pool.give_up(owner, GIVEN_UP)  # nothing of it is left


def test_an_agent_that_blocks_is_given_up_and_others_of_its_worker_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.1)
    with function_pool("agent") as pool:
        blocks = tmp_path / "begun"
        ends = tmp_path / "end"
        owner, future = begin(pool, asked("block", path=str(blocks)))
        other, other_future = begin(pool, asked("until a file", path=str(ends)))
        (worker,) = pool._workers
        wait_until(blocks.exists)
        pool.give_up(owner, GIVEN_UP)
        assert future.exception(DEADLINE) is GIVEN_UP
        wait_until(lambda: worker.retired)
        _, facts = result(pool, asked("about"))
        assert facts["process"] != worker.process.pid
        ends.touch()
        assert other_future.result(DEADLINE) == (float(worker.process.pid), {})
        assert psutil.pid_exists(worker.process.pid)
        pool.release(other)
        wait_until(lambda: worker not in pool._workers)
        assert not psutil.pid_exists(worker.process.pid)


def test_an_ordinary_function_ends_with_its_next_call_when_it_is_given_up(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", DEADLINE)
    with function_pool("asks_forever") as pool:
        path = tmp_path / "begun"
        owner, future = begin(pool, asked("", server.url, path=str(path)))
        (worker,) = pool._workers
        wait_until(path.exists)
        pool.give_up(owner, GIVEN_UP)
        assert future.exception(DEADLINE) is GIVEN_UP
        wait_until(lambda: not worker.given_up)
        assert not worker.retired


def test_a_request_to_stop_that_comes_before_its_call_stops_it():
    host = AgentHost.load(None, ["true"], {}, None)
    assert host.call(1, "forget") is None
    with pytest.raises(CallFailed, match="was stopped before it began") as caught:
        host.call(1, "run", script("exit 0"))
    assert caught.value.reason == "stopped"


# rewards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["judge", "judge_async"])
def test_a_reward_function_scores_the_calls_of_a_trajectory(name: str):
    calls = [{"messages": [{"role": "user", "content": "2 + 3"}], "reply": {"content": "5"}}]
    with command_pool("echo", "no number", reward=f"{AGENTS}:{name}") as pool:
        owner, future = begin(pool, script(""))
        assert future.result(DEADLINE) == (None, {})
        (scored,) = pool.submit("score", [(Prompt(1, (5,), "5"), calls)], None, owner)
        assert scored.result(DEADLINE) == (2.0, {"calls": 1.0, "end": 1.0})


def test_with_a_reward_function_what_an_agent_returns_is_not_read():
    with function_pool("agent", reward=f"{AGENTS}:judges_nothing") as pool:
        assert result(pool, asked("return", value="anything")) == (None, {})
        (scored,) = pool.submit("score", [(Prompt(1, (5,)), [])], None)
        message = "returned None, expected a number or a mapping of names to numbers"
        assert str(scored.exception(DEADLINE)) == message


# commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo Thinking; echo 0.5; echo", (0.5, {})),
        ("""printf '{"right": 1, "short": 0.5}'""", (1.5, {"right": 1.0, "short": 0.5})),
        ("""echo '{"reward": 1, "tests": 3}'""", (1.0, {"tests": 3.0})),
        ("exec 1>&-; exit 0", "reward: printed nothing, expected a number or a JSON object of"),
        ("echo done", "reward: printed 'done', expected a number or a JSON object of numbers as"),
        ("echo NaN", "reward: returned nan, expected a finite number"),
        ("echo '[1]'", "reward: returned [1], expected a finite number"),
        ("echo null", "reward: returned None, expected a number"),
        ("echo 1; exit 3", "error: ended with exit code 3; the end of its stderr: nothing"),
        ("echo oh >&2; exit 1", "error: ended with exit code 1; the end of its stderr: oh"),
        ("kill -9 $$", "error: ended with exit code -9; the end of its stderr: nothing"),
    ],
)
def test_a_command_prints_its_reward(scripts: Pool, text: str, expected: Any):
    if isinstance(expected, tuple):
        assert result(scripts, script(text)) == expected
    else:
        found = failure(scripts, script(text))
        assert f"{found.reason}: {found.message}".startswith(expected)


def test_a_command_gets_the_prompt_and_the_endpoint(scripts: Pool, tmp_path: Path):
    text = f"cat > {tmp_path}/stdin; env > {tmp_path}/env; echo 1"
    meta = {"path": "x" * 200_000}
    assert result(scripts, script(text, answer=[1, None], meta=meta)) == (1.0, {})
    line = f'{{"text": "{text}", "answer": [1, null], "meta": {{"path": "{meta["path"]}"}}, "id": 8'
    assert (tmp_path / "stdin").read_text() == line + "}\n"
    environment = (tmp_path / "env").read_text().splitlines()
    assert {
        "OPENAI_BASE_URL=http://127.0.0.1:1/v1",
        "OPENAI_API_KEY=key-8",
        "OPENAI_MODEL=policy",
        f"PYRL_PROMPT={text}",
    } <= {*environment}


def test_a_command_calls_the_endpoint_with_the_client_of_openai(server: ChatServer):
    code = (
        "import openai, os\n"
        "messages = [{'role': 'user', 'content': os.environ['PYRL_PROMPT']}]\n"
        "model = os.environ['OPENAI_MODEL']\n"
        "answer = openai.OpenAI().chat.completions.create(model=model, messages=messages)\n"
        "print(len(answer.choices[0].message.content))\n"
    )
    server.asked.clear()
    with command_pool(sys.executable, "-c", code) as pool:
        assert result(pool, asked("", server.url)) == (11.0, {})
    assert server.asked == [("Bearer key-7", "policy")]


def test_a_command_that_prints_much_fills_no_memory(scripts: Pool):
    (worker,) = scripts._workers
    result(scripts, script("echo 1"))
    before = most_memory(worker.process.pid)
    much = "yes | head -c 100000000"
    assert result(scripts, script(f"{much}; {much} >&2; echo; echo 4")) == (4.0, {})
    assert most_memory(worker.process.pid) - before < 50_000_000


def most_memory(pid: int) -> int:
    """The most memory that a process ever had [bytes]."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("start", ["sleep 3600 &", "setsid sleep 3600 &", "yes >&2 &"])
def test_processes_that_a_command_leaves_are_killed(scripts: Pool, start: str):
    """They hold its pipes open, and their parent has ended."""
    key = f"left by {start}"
    assert result(scripts, script(f"{start} echo 2; exit 0", key)) == (2.0, {})
    wait_until(lambda: not processes(key))


def test_a_command_that_hangs_is_given_up_and_its_worker_goes_on(
    scripts: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", DEADLINE)
    path = tmp_path / "begun"
    (worker,) = scripts._workers
    owner, future = begin(
        scripts, script(f"(sleep 3600; true) & touch {path}; sleep 3600; true", "hangs")
    )
    wait_until(path.exists)
    assert processes("hangs")
    scripts.give_up(owner, GIVEN_UP)
    assert future.exception(DEADLINE) is GIVEN_UP
    wait_until(lambda: not worker.given_up)
    wait_until(lambda: not processes("hangs"))
    assert result(scripts, script("echo 1")) == (1.0, {})
    assert scripts._workers == [worker] and not worker.retired


def test_a_command_that_hangs_ends_with_its_worker(tmp_path: Path):
    path = tmp_path / "begun"
    with command_pool("sh", "-c", 'eval "$PYRL_PROMPT"') as pool:
        _, future = begin(pool, script(f"touch {path}; sleep 3600 | cat; true", "closed"))
        wait_until(path.exists)
        pool._workers[0].kill()
        error = future.exception(DEADLINE)
        assert isinstance(error, CallFailed) and error.reason == "lost"
        wait_until(lambda: not processes("closed"))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"answer": {3}},
            "did not start: the prompt's answer is {3} (TypeError: Object of type set is not JSON "
            "serializable), expected what JSON can hold, which a command reads on stdin",
        ),
        (
            {"meta": {"low": float("-inf")}},
            "did not start: the prompt's meta is {'low': -inf} (ValueError: Out of range float ",
        ),
        (
            {"text": "x" * 140_000},
            "did not start: OSError: [Errno 7] Argument list too long: 'sh', expected a program, "
            "and a prompt's text of at most 128 KiB without NUL",
        ),
        ({"text": "a\0b"}, "did not start: ValueError: embedded null byte, expected a program"),
    ],
)
def test_a_prompt_that_a_command_cannot_get_is_refused(
    scripts: Pool, prompt: dict[str, Any], message: str
):
    found = failure(scripts, script(**{"text": "echo 1", **prompt}))
    assert found.reason == "error"
    assert found.message.startswith(message)


def test_a_command_that_is_removed_does_not_start(tmp_path: Path):
    path = program(tmp_path, "echo 1")
    with command_pool(str(path)) as pool:
        assert result(pool, script("")) == (1.0, {})
        path.unlink()
        found = failure(pool, script(""))
    assert found.message.startswith("did not start: FileNotFoundError: [Errno 2] No such file")


def program(folder: Path, text: str, mode: int = 0o755) -> Path:
    path = folder / "agent"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IFREG | mode)
    return path


# checks before a run ------------------------------------------------------------------------------


def test_load_takes_agents_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    AgentHost.load(f"{AGENTS}:agent", (), {}, None)
    AgentHost.load(f"{AGENTS}:scaled", (), {"scale": 1}, f"{AGENTS}:judge")
    AgentHost.load(None, ("sh", "-c", "exit 1"), {}, f"{AGENTS}:judge_async")
    program(tmp_path, "exit 1")
    monkeypatch.chdir(tmp_path)
    AgentHost.load(None, ("./agent",), {}, None)


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        ("agent", {}, "turns.agent: 'agent', expected package.module:function"),
        (
            "no_module:run",
            {},
            "turns.agent: 'no_module:run': no module 'no_module', expected one on the Python path. "
            "Put it next to the YAML file, run from the folder that holds it, or set PYTHONPATH",
        ),
        (
            f"{AGENTS}:AGENTS",
            {},
            f"turns.agent: '{AGENTS}:AGENTS': a dict, expected a function",
        ),
        (
            f"{AGENTS}:takes_one",
            {},
            f"turns.agent: '{AGENTS}:takes_one': TypeError: too many positional arguments, "
            "expected a function that takes (client, prompt); turns.options has those after prompt",
        ),
        (
            f"{AGENTS}:scaled",
            {"scale": 1, "tools": 2},
            f"turns.agent: '{AGENTS}:scaled': TypeError: got an unexpected keyword argument "
            "'tools', expected a function that takes (client, prompt, scale=..., tools=...); "
            "turns.options has those after prompt",
        ),
        (
            f"{AGENTS}:scaled",
            {},
            f"turns.agent: '{AGENTS}:scaled': TypeError: missing a required keyword-only argument: "
            "'scale', expected a function that takes (client, prompt); turns.options has those "
            "after prompt",
        ),
    ],
)
def test_load_refuses_functions(agent: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AgentHost.load(agent, (), options, None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AgentHost.load(agent, (), options, None)


def test_load_refuses_a_reward_function():
    message = (
        f"turns.reward: '{AGENTS}:takes_one' takes (client: 'Any') -> 'float', expected 2 "
        "positional arguments"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AgentHost.load(None, ("sh",), {}, f"{AGENTS}:takes_one")


def test_load_refuses_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    program(tmp_path, "echo 1", 0o644)
    refused("./agent", "'./agent' is not executable, expected a program. Run: chmod +x ./agent")
    missing = f"expected one on PATH or a path below {tmp_path}"
    refused("./missing", f"no program './missing', {missing}")
    refused("agent", f"no program 'agent', {missing}")


def refused(program: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'turns.command: {message}')}$"):
        AgentHost.load(None, (program,), {}, None)


def test_load_needs_openai_for_functions_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    message = (
        f"turns.agent: '{AGENTS}:agent': openai is not installed, expected it for the client of "
        "the agent. Run: pip install 'pyrl-ext[agents]'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AgentHost.load(f"{AGENTS}:agent", (), {}, None)
    AgentHost.load(None, ("sh",), {}, None)
