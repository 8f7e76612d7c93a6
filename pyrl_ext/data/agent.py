"""Agents: functions or programs of users, which call the policy over an OpenAI-compatible endpoint.

Each trajectory is one call of the agent in a worker process. A Python function runs in a thread,
``async def`` in an event loop of that thread, so that an agent that blocks delays no other. A
command runs as a child process of the worker.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import selectors
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import psutil

from pyrl_ext.data.rewards import read_reward
from pyrl_ext.data.workers import CallFailed, descendants, kill_all
from pyrl_ext.parallel.open_files import allow_open_files
from pyrl_ext.parallel.user_code import describe, load_callable, load_function, shown
from pyrl_ext.prompt import Prompt

_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # no certificates, which take 18 ms: URLs are http
OPEN_FILES = 65_536  # of all agents of a worker; each has an event loop and connections
_KEPT = 65_536  # last bytes of what a command prints
_SHOWN = 2000  # last characters of its stderr in a message
_POLL_SECONDS = 1.0  # until the end of a command is seen whose pipes another process holds
_DRAIN_SECONDS = 10.0  # for what is left in its pipes


class Agent(Protocol):
    """Runs trajectories."""

    def __call__(self, call: AgentCall, stop: Stop) -> Any:
        """Run a trajectory: what `read_reward` takes, or the awaitable of it."""
        ...


@dataclass(frozen=True)
class AgentCall:
    """Data of a trajectory that its agent needs.

    Args:
        prompt: without images
        url: of the endpoint, ``http://127.0.0.1:PORT/v1``
        key: API key of the trajectory
        model: name of the policy
    """

    prompt: Prompt
    url: str
    key: str
    model: str


def _load_agent(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of an agent, with its options. Raises: ValueError, as `AgentHost.load`."""
    if find_spec("openai") is None:
        raise ValueError(
            f"turns.agent: {name!r}: openai is not installed, expected it for the client of the "
            "agent. Run: pip install 'pyrl-ext[agents]'"
        )
    if not all(name.partition(":")):
        raise ValueError(f"turns.agent: {name!r}, expected package.module:function")
    function = load_callable("turns.agent", name)
    try:
        inspect.signature(function).bind(None, None, **options)
    except (TypeError, ValueError) as error:
        arguments = ", ".join(["client", "prompt", *(f"{key}=..." for key in options)])
        raise ValueError(
            f"turns.agent: {name!r}: {describe(error)}, expected a function that takes "
            f"({arguments}); turns.options has those after prompt"
        ) from error
    return partial(function, **options)


def _check_program(program: str) -> None:
    if shutil.which(program) is not None:
        return
    if os.path.dirname(program) and os.path.isfile(program):
        raise ValueError(
            f"turns.command: {program!r} is not executable, expected a program. Run: chmod +x "
            f"{program}"
        )
    raise ValueError(
        f"turns.command: no program {program!r}, expected one on PATH or a path below {os.getcwd()}"
    )


class AgentHost:
    """The agents of a worker process; several owners have one trajectory each.

    Its methods are "run", with an `AgentCall`, and "score", with a prompt and the calls of its
    trajectory. Both give (reward, components); "run" gives (None, {}) with a reward function.
    "forget" stops what runs of an owner.

    Args:
        agent: runs a trajectory
        reward: fn(prompt, calls), or the awaitable of it; None: the agent gives the reward
        about: sent to the pool
    """

    at_once: int | None = None

    def __init__(
        self,
        agent: Agent,
        reward: Callable[..., Any] | None,
        about: Any = None,
    ):
        self.about = about
        self._agent = agent
        self._reward = reward
        self._lock = threading.Lock()
        self._stops: dict[int | None, Stop] = {}  # of owners whose calls began, or will

    @staticmethod
    def load(
        agent: str | None, command: Sequence[str], options: Mapping[str, Any], reward: str | None
    ) -> AgentHost:
        """Load user code.

        Args:
            agent: ``package.module:function``, called with (client, prompt) and the options; None:
                the command is the agent. The client is an ``openai.AsyncOpenAI`` for an ``async
                def`` function, else an ``openai.OpenAI``
            command: program and arguments. It has OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and
                PYRL_PROMPT, the prompt's text, in its environment, and reads the prompt as a line
                of JSON on stdin, with text, answer, meta and id
            options: keyword arguments of the function
            reward: ``package.module:function``, called with (prompt, calls); None: the agent gives
                it

        Raises:
            ValueError: a function is missing or does not take its arguments; the program is missing
                or is not executable; the package openai is missing, which functions need
        """
        allow_open_files(OPEN_FILES)
        function = None if reward is None else load_function("turns.reward", reward, 2)
        if agent is not None:
            return AgentHost(_Function(_load_agent(agent, options)), function)
        _check_program(command[0])
        return AgentHost(_Command(command, gives_reward=function is None), function)

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """Run the agent or the reward function, or stop what runs of the owner."""
        if method == "forget":
            self._forget(owner)
            return None
        stop = self._begin(owner)
        with stop.noticed():
            run = self._agent if method == "run" else self._score
            value = run(*args, stop=stop)
        return self._until(stop, value) if inspect.isawaitable(value) else value

    async def _until(self, stop: Stop, value: Awaitable[Any]) -> Any:
        with stop.noticed():
            return await stop.ends(value)

    def read(self, method: str, value: Any) -> Any:
        """(reward, components), or None for "forget". Raises: CallFailed."""
        if method == "forget":
            return None
        if method == "run" and self._reward is not None:
            return None, {}
        if value is None:
            text = "returned None, expected a number or a mapping of names to numbers"
            raise CallFailed("reward", text)
        return read_reward(value)

    def _score(self, prompt: Prompt, calls: list[dict[str, Any]], stop: Stop) -> Any:
        assert self._reward is not None
        value = self._reward(prompt, calls)
        return asyncio.run(stop.ends(value)) if inspect.isawaitable(value) else value

    def _begin(self, owner: int | None) -> Stop:
        with self._lock:
            stop = self._stops.setdefault(owner, Stop())
            if stop.asked:  # "forget" overtook it
                del self._stops[owner]
                raise CallFailed("stopped", "was stopped before it began")
            return stop

    def _forget(self, owner: int | None) -> None:
        with self._lock:
            stop = self._stops.pop(owner, None)
            if stop is None:  # its call has not begun
                stop = Stop()
                self._stops[owner] = stop
            stop.asked = True
        stop.end()


class Stop:
    """The request to stop a call, which comes from another thread.

    Attributes:
        asked: set before `end` is called
    """

    def __init__(self):
        self.asked = False
        self._lock = threading.Lock()
        self._end: Callable[[], object] | None = None

    @contextmanager
    def noticed(self) -> Generator[None]:
        """Within, errors of a call that is to stop are a `CallFailed`."""
        try:
            yield
        except BaseException:
            if self.asked:
                raise CallFailed("stopped", "was stopped before it ended") from None
            raise

    @contextmanager
    def by(self, end: Callable[[], object]) -> Generator[None]:
        """Within, ``end`` is called once the call is to stop; not after."""
        with self._lock:
            self._end = end
        if self.asked:
            self.end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None

    def end(self) -> None:
        """Stop the call, if it runs."""
        with self._lock:
            if self._end is not None:
                self._end()

    async def ends(self, awaitable: Awaitable[Any]) -> Any:
        """Await in an event loop of this thread; the task is cancelled once the call is to stop."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        with self.by(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await awaitable


# functions ----------------------------------------------------------------------------------------


class _Function:
    """An agent that is a function.

    Args:
        function: of a client and a prompt, ordinary or ``async def``
    """

    def __init__(self, function: Callable[..., Any]):
        import openai  # half a second, before the first trajectory

        self._openai = openai
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)

    def __call__(self, call: AgentCall, stop: Stop) -> Any:
        """Run the function. A request to stop cancels a coroutine, and closes the client of an
        ordinary function."""
        options: dict[str, Any] = {
            "base_url": call.url,
            "api_key": call.key,
            "timeout": None,
            "max_retries": 2,
        }
        if self._is_async:
            return asyncio.run(self._run(call.prompt, options, stop))
        http_client = self._openai.DefaultHttpxClient(verify=_TLS, trust_env=False)
        client = self._openai.OpenAI(**options, http_client=http_client)
        with client, stop.by(client.close):
            value = self._function(client, call.prompt)
        if inspect.isawaitable(value):
            text = f"returned {shown(value, 200)}, expected a number, or a function with async def"
            raise CallFailed("reward", text)
        return value

    async def _run(self, prompt: Prompt, options: dict[str, Any], stop: Stop) -> Any:
        http_client = self._openai.DefaultAsyncHttpxClient(verify=_TLS, trust_env=False)
        async with self._openai.AsyncOpenAI(**options, http_client=http_client) as client:
            return await stop.ends(self._function(client, prompt))


# commands -----------------------------------------------------------------------------------------


class _Command:
    """An agent that is a program.

    Args:
        command: program and arguments
        gives_reward: the last line that it prints is the reward
    """

    def __init__(self, command: Sequence[str], gives_reward: bool):
        self._command = [*command]
        self._gives_reward = gives_reward

    def __call__(self, call: AgentCall, stop: Stop) -> Any:
        """The value of the last line of stdout; None without ``gives_reward``. Once it is to stop,
        its processes are killed.

        Raises:
            CallFailed: it does not start, its exit code is not 0, or the line is no JSON
        """
        with self._start(call) as process:
            stdout, stderr = _outputs(process, call.key, stop)
        if process.returncode:
            text = stderr.decode(errors="backslashreplace").strip()[-_SHOWN:]
            end = f"the end of its stderr: {text or 'nothing'}"
            raise CallFailed("error", f"ended with exit code {process.returncode}; {end}")
        return _last_value(stdout) if self._gives_reward else None

    def _start(self, call: AgentCall) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": call.url,
            "OPENAI_API_KEY": call.key,
            "OPENAI_MODEL": call.model,
            "PYRL_PROMPT": call.prompt.text,
        }
        with tempfile.TemporaryFile() as file:  # unlike a pipe it takes a line of any length
            file.write(_line(call.prompt))
            file.seek(0)
            try:
                return subprocess.Popen(
                    self._command,
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                )
            except (OSError, ValueError) as error:
                rule = "a program, and a prompt's text of at most 128 KiB without NUL"
                text = f"did not start: {describe(error)}, expected {rule}"
                raise CallFailed("error", text) from error


def _line(prompt: Prompt) -> bytes:
    """The prompt as a line of JSON. Raises: CallFailed if a part of it has other types."""
    record = {"text": prompt.text, "answer": prompt.answer, "meta": prompt.meta, "id": prompt.id}
    for name, value in record.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            text = (
                f"did not start: the prompt's {name} is {shown(value, 200)} ({describe(error)}), "
                "expected what JSON can hold, which a command reads on stdin"
            )
            raise CallFailed("error", text) from error
    return json.dumps(record).encode() + b"\n"


def _outputs(process: subprocess.Popen[bytes], key: str, stop: Stop) -> tuple[bytes, bytes]:
    """Wait for the end of a command: the last bytes of its stdout and stderr."""
    assert process.stdout is not None and process.stderr is not None
    stdout = bytearray()
    stderr = bytearray()
    kill = partial(_kill, psutil.Process(process.pid), key)
    with selectors.DefaultSelector() as pipes:
        pipes.register(process.stdout, selectors.EVENT_READ, stdout)
        pipes.register(process.stderr, selectors.EVENT_READ, stderr)
        try:
            with stop.by(kill):
                _read(pipes, lambda: process.poll() is None)
                process.wait()  # it may have closed its pipes before
        finally:
            kill()  # also processes that it left, which may hold its pipes
        end = time.monotonic() + _DRAIN_SECONDS
        _read(pipes, lambda: time.monotonic() < end)
    return bytes(stdout), bytes(stderr)


def _read(pipes: selectors.BaseSelector, goes_on: Callable[[], bool]) -> None:
    """Read pipes while one is open and ``goes_on()``; their data are the last bytes of each."""
    while pipes.get_map() and goes_on():
        for pipe, _ in pipes.select(_POLL_SECONDS):
            chunk = os.read(pipe.fd, _KEPT)
            if not chunk:
                pipes.unregister(pipe.fileobj)
            last: bytearray = pipe.data
            last += chunk
            del last[:-_KEPT]


def _kill(command: psutil.Process, key: str) -> None:
    """Kill a command and all processes below it; also those whose parent has ended, which have its
    API key in their environment."""
    kill_all([command, *descendants(command)])
    mark = f"OPENAI_API_KEY={key}".encode()
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it has ended, or belongs to another user
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                psutil.Process(pid).kill()


def _last_value(stdout: bytes) -> Any:
    """The JSON value of the last line that is not empty. Raises: CallFailed."""
    lines = stdout.decode(errors="backslashreplace").split("\n")
    printed = [line for line in lines if line.strip()]
    rule = "expected a number or a JSON object of numbers as the last line of stdout"
    if not printed:
        raise CallFailed("reward", f"printed nothing, {rule}")
    try:
        return json.loads(printed[-1])
    except (ValueError, RecursionError) as error:
        text = f"printed {shown(printed[-1].strip(), 200)}, {rule}"
        raise CallFailed("reward", text) from error
