"""Agents that tests run in worker processes; `prompt.meta["play"]` names one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

MODEL = "policy"


async def run(client: openai.AsyncOpenAI, prompt: Any) -> Any:
    """Run the agent that the prompt names."""
    return await globals()[prompt.meta["play"]](client, prompt)


async def say(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    """The message that the policy answers."""
    answer = await client.chat.completions.create(model=MODEL, messages=messages, **more)
    return answer.choices[0].message


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(message: Any) -> dict[str, Any]:
    """The message as a client writes it back."""
    return message.model_dump(exclude_none=True)


async def three_calls(client: openai.AsyncOpenAI, prompt: Any) -> float:
    messages: list[Any] = [user(prompt.text)]
    for _ in range(3):
        messages.append(assistant(await say(client, messages)))
        messages.append(user("+"))
    return 0.75


async def capitals(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """The number of capital letters in three answers of a conversation."""
    messages: list[Any] = [user(prompt.text)]
    count = 0
    for _ in range(3):
        message = await say(client, messages)
        count += sum(letter.isupper() for letter in message.content)
        messages += [assistant(message), user("+")]
        await _pause(prompt)
    return float(count)


async def _pause(prompt: Any) -> None:
    """Leave a file, and go on once another one is there, if the prompt names them."""
    if prompt.meta and "arrived" in prompt.meta:
        (Path(prompt.meta["arrived"]) / f"{prompt.id}-{id(asyncio.current_task())}").touch()
        while not Path(prompt.meta["goes_on"]).exists():
            await asyncio.sleep(0.01)


async def components(client: openai.AsyncOpenAI, prompt: Any) -> dict[str, float]:
    await say(client, [user(prompt.text)])
    return {"form": 0.25, "answer": 0.5}


async def edits_history(client: openai.AsyncOpenAI, prompt: Any) -> float:
    first = await say(client, [user(prompt.text)])
    edited = {"role": "assistant", "content": f"{first.content}1"}
    await say(client, [user(prompt.text), edited, user("+")])
    return 1.0


async def sub_agent(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """Two conversations that begin alike, and go on side by side."""

    async def talk(word: str) -> None:
        messages: list[Any] = [user(prompt.text)]
        messages.append(assistant(await say(client, messages)))
        await say(client, [*messages, user(word)])

    await asyncio.gather(talk("1"), talk("2"))
    return 0.5


async def too_many_calls(client: openai.AsyncOpenAI, prompt: Any) -> float:
    messages: list[Any] = [user(prompt.text)]
    while True:
        try:
            messages.append(assistant(await say(client, messages)))
        except openai.BadRequestError as error:
            assert error.code == "pyrl_turns", error.code
            return 0.25
        messages.append(user("+"))


async def unhandled_limit(client: openai.AsyncOpenAI, prompt: Any) -> float:
    messages: list[Any] = [user(prompt.text)]
    while True:
        messages.append(assistant(await say(client, messages)))
        messages.append(user("+"))


async def no_room(client: openai.AsyncOpenAI, prompt: Any) -> float:
    messages: list[Any] = [user(prompt.text)]
    messages.append(assistant(await say(client, messages)))
    try:
        await say(client, [*messages, user("1" * 40)])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error.code
        return 0.0
    raise AssertionError("expected an error")


async def no_call(client: openai.AsyncOpenAI, prompt: Any) -> float:
    return 1.0


async def raises(client: openai.AsyncOpenAI, prompt: Any) -> float:
    await say(client, [user(prompt.text)])
    raise OSError("no tool")


async def awaits_forever(client: openai.AsyncOpenAI, prompt: Any) -> float:
    await say(client, [user(prompt.text)])
    await asyncio.sleep(1e6)
    return 1.0


async def blocks_forever(client: openai.AsyncOpenAI, prompt: Any) -> float:
    await say(client, [user(prompt.text)])
    time.sleep(1e6)
    return 1.0


async def kills_itself(client: openai.AsyncOpenAI, prompt: Any) -> float:
    await say(client, [user(prompt.text)])
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


async def texts(client: openai.AsyncOpenAI, prompt: Any) -> float:
    """Continues a text, then token ids."""
    first = await client.completions.create(model=MODEL, prompt=prompt.text, max_tokens=2)
    said = first.choices[0].text
    second = await client.completions.create(model=MODEL, prompt=f"{prompt.text}{said}+")
    assert second.usage is not None
    return float(second.usage.prompt_tokens)


async def streams(client: openai.AsyncOpenAI, prompt: Any) -> float:
    messages: list[Any] = [user(prompt.text)]
    for _ in range(2):
        parts = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        said = [part.choices[0].delta.content or "" async for part in parts if part.choices]
        messages += [{"role": "assistant", "content": "".join(said)}, user("+")]
    return 1.0


def shortest(prompt: Any, calls: Sequence[Mapping[str, Any]]) -> float:
    """A reward of a trajectory: the number of its calls."""
    assert calls[0]["messages"][0] == user(prompt.text)
    return float(len(calls))
