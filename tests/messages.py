"""docs/messages.md: the words of every message, by the section that treats it.

``python -m tests.messages > docs/messages.md`` writes it again. A message is a text that is raised
or printed to stderr, or that says what is "expected"; values are shown as "…".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "pyrl_ext"
LEAST = 8  # letters: shorter texts are parts of longer ones
SENTENCES = (
    "dist/heartbeat.py",
    "rollout/servers/guard.py",
    "weights/check.py",
)  # put together from parts, which all count

# Headings of docs/troubleshooting.md and the files whose messages they treat; the longest path wins
SECTIONS = {
    "A config does not hold": ("cli.py", "pack/images.py", "pack/schedule.py", "plan/"),
    "Out of memory": (),
    "Data is refused": ("data/",),
    "Your function is refused or fails": (
        *("data/chat_turns.py", "data/environment.py", "data/guess.py", "data/rewards.py"),
        *("data/time_limit.py", "dist/user_code.py", "loss/advantages.py", "loss/registry.py"),
        *("pack/index.py", "pack/reward_parts.py", "rollout/turns/", "rollout/groups.py"),
    ),
    "A model or adapter does not load": (
        *(
            "data/tokenizer.py",
            "dist/hub.py",
            "megatron/features.py",
            "megatron/grouped_experts.py",
        ),
        *("megatron/model.py", "megatron/vision.py", "models/", "rollout/hf/model.py"),
    ),
    "The wrong torch, driver or package": (
        *("megatron/te.py", "ops/_native.py", "ops/_op.py", "ops/prebuilt.py"),
        *("rollout/vllm/cpu.py", "tools/doctor/", "tools/prebuild/"),
    ),
    "Ranks fail or hang": ("dist/", "pack/delivery.py", "run/failure.py"),
    "Ports, keys and networks": ("rollout/servers/guard.py", "rollout/servers/commands.py"),
    "A run does not start or resume": (
        *(
            "dist/disk.py",
            "dist/file_digests.py",
            "dist/saved_tensors.py",
            "megatron/checkpoint.py",
        ),
        *(
            "dist/topology.py",
            "metrics/history.py",
            "metrics/sinks.py",
            "metrics/wandb_sink.py",
            "run/",
            "tools/",
            "train/",
        ),
    ),
    "Weights do not reach the engine": (
        *("rollout/adapters.py", "rollout/hf/adapters.py", "rollout/hf/destinations.py"),
        *("rollout/process/sender.py", "rollout/servers/canary.py", "rollout/servers/taker.py"),
        *("rollout/servers/sender.py", "rollout/servers/staged.py", "rollout/servers/wire.py"),
        *("rollout/servers/relay.py", "rollout/servers/broadcast.py"),
        *("rollout/servers/vllm_weights.py", "rollout/vllm/adapters.py", "rollout/vllm/loading.py"),
        "weights/",
    ),
    "Trainer and engine disagree": ("weights/check.py", "metrics/mismatch.py"),
    "Routes are missing or wrong": ("replay/", "rollout/hf/routers.py", "trainer/prefetch.py"),
    "NaN, infinity, or a gradient of 0": ("trainer/policy.py", "trainer/zero_gradient.py"),
    "The reward stays flat": ("rollout/dynamic.py",),
    "An engine is lost": ("rollout/", "serve.py"),
    "A step is slow": (),
    "Recorded rollouts are refused": ("rollout/recorded.py", "rollout/recorded_file.py"),
    "What only code can cause": (
        *("loss/", "megatron/", "metrics/", "ops/", "pack/", "samples.py", "trainer/"),
    ),
}

HEAD = """# Messages

Every message of the package by its words, under the section of
[troubleshooting](troubleshooting.md) that treats it. Look for a part of yours that holds no value
of your run: values are shown as "…".
Written by `python -m tests.messages`.
"""


def words(node: ast.AST) -> str | None:
    """The text of an expression that is one, values as "…"; None: it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = words(node.left), words(node.right)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return None


def texts(node: ast.AST) -> Iterator[str]:
    """The longest texts within an expression or a statement, without docstrings."""
    if (text := words(node)) is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_docstring:
            yield from texts(child)


def is_said(node: ast.AST) -> bool:
    """Whether a statement or call raises, warns or prints to stderr."""
    if isinstance(node, ast.Raise):
        return True
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name == "warnings.warn" or (name == "print" and "stderr" in ast.unparse(node))


def messages(file: Path) -> set[str]:
    """The messages of a module, on one line each."""
    tree = ast.parse(file.read_text("utf-8"))
    said = {text for node in ast.walk(tree) if is_said(node) for text in texts(node)}
    whole = file.relative_to(PACKAGE).as_posix() in SENTENCES
    said |= {text for text in texts(tree) if "expected" in text or (whole and " " in text)}
    lines = {" ".join(text.split()) for text in said}
    return {line for line in lines if len(re.findall(r"[a-z]", line)) >= LEAST}


def section(path: str) -> str:
    """The heading that treats the messages of a file of the package.

    Raises: KeyError: none does; `SECTIONS` and docs/troubleshooting.md need one.
    """
    fits = {start: head for head, starts in SECTIONS.items() for start in starts}
    for start in sorted(fits, key=len, reverse=True):
        if path.startswith(start):
            return fits[start]
    raise KeyError(f"{path}: in no section of troubleshooting.md, expected one (tests/messages.py)")


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page() -> str:
    """docs/messages.md."""
    found: dict[str, list[str]] = {head: [] for head in SECTIONS}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if lines := sorted(messages(file)):
            found[section(path)] += [path, *(f"  {line}" for line in lines)]
    parts = [HEAD]
    for head, lines in ((head, lines) for head, lines in found.items() if lines):
        block = "\n".join(lines)
        parts.append(f"\n## [{head}](troubleshooting.md#{anchor(head)})\n\n```text\n{block}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
