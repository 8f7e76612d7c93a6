"""The guess game with a tool, as an agent and as an environment that does the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from pyrl_ext.data.chat_turns import ChatTurns
from pyrl_ext.data.environment import Context, StepResult
from pyrl_ext.data.guess import Guess
from tests.helpers.tiny import CONFIG

GUESSES = 4
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}
TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tool_call(digit: int) -> str:
    """A call of the tool: one token of the tokenizer below."""
    call = {"name": "guess", "arguments": {"number": digit}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def write_tokenizer(folder: Path) -> None:
    """The tiny tokenizer, whose capital letters A to J are calls of the tool instead."""
    shutil.copytree(CONFIG.parent / "tiny", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for digit, letter in enumerate("ABCDEFGHIJ"):
        number = vocab.pop(letter)
        vocab[tool_call(digit)] = number
        added = dict(tokenizer["added_tokens"][0], id=number, special=False)
        tokenizer["added_tokens"].append(added | {"content": tool_call(digit)})
    file.write_text(json.dumps(tokenizer))


def write_config(folder: Path, name: str, steps: int, **turns: Any) -> Path:
    """A run of tiny_turns.yaml with that tokenizer, in ``folder``."""
    config = yaml.safe_load((CONFIG.parent / "tiny_turns.yaml").read_text())
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        write_tokenizer(tokenizer)
    config["model"] |= {"config": str(tokenizer / "config.json"), "tokenizer": str(tokenizer)}
    config["turns"] = {"max_turns": GUESSES, "max_tokens": 40, "form": "concatenated"} | turns
    data = {"prompts": "data/guess.jsonl", "eval_prompts": "data/guess_eval.jsonl"}
    config["data"] |= {key: str(CONFIG.parent / value) for key, value in data.items()}
    config["rollout"] |= {"record": str(folder / f"{name}-samples")}
    config |= {"run": str(folder / name), "steps": steps}
    config["evaluate"] = {"every": 0, "prompts": 4}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def started(prompt: Any) -> Guess:
    """The game of a prompt."""
    game = Guess(GUESSES, "+", "-", "?")
    game.start(prompt)
    return game


async def agent(client: Any, prompt: Any) -> float:
    """Plays the game: the policy calls the tool, whose result says where the number is."""
    game = started(prompt)
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    reward = 0.0
    while True:
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        message = completion.choices[0].message
        calls = message.tool_calls or []
        guess = ""
        for call in calls:
            assert call.function.name == "guess"
            guess = str(json.loads(call.function.arguments)["number"])
        result = game.step([], guess)
        reward += result.reward
        if result.done:
            return reward
        messages.append(message.model_dump(exclude_none=True))
        if calls:
            content = {"role": "tool", "tool_call_id": calls[0].id, "content": result.observation}
            messages.append(content)
        else:
            messages.append({"role": "user", "content": result.observation})


class Calls:
    """The same game as an environment.

    Args:
        tokenizer: of the run
    """

    def __init__(self, tokenizer: Any):
        self.chat = ChatTurns(tokenizer, [TOOL])
        self.game = Guess()

    def start(self, prompt: Any) -> Context:
        """The question, after the tool."""
        self.game = started(prompt)
        return self.chat.opening([{"role": "user", "content": prompt.text}])

    def step(self, tokens: list[int], text: str) -> StepResult:
        """Compare the guess of a call."""
        found = re.search(r'"number": (\d)', text)
        result = self.game.step(tokens, found[1] if found else "")
        if result.done:
            return StepResult(None, result.reward, True)
        messages = [{"role": "user", "content": result.observation}]
        added = self.chat.after(tokens, text, messages)
        return StepResult(added, result.reward, False)
