"""Print the commands of README and docs, one a line, for `.ci/run` to run.

Commands are the lines of ```bash blocks. Left out are those whose comment says what they need
("# needs a GPU") or which other command runs them ("# part of make bench"). A command that several
pages show is printed once, where it comes first.
"""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MARKS = ("# needs ", "# part of make ")


def pages() -> list[Path]:
    """README, CONTRIBUTING and docs, in the order in which their commands are run."""
    first = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    return [*first, *sorted((REPOSITORY / "docs").glob("*.md"))]


def shown(text: str) -> list[str]:
    """Lines of the ```bash blocks with their comments, continuation lines joined."""
    lines: list[str] = []
    for block in text.split("```bash\n")[1:]:
        body = block.split("```")[0].replace("\\\n", "")
        lines += [" ".join(line.split()) for line in body.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("#")]


def is_left_out(line: str) -> bool:
    """Whether the comment of a command says that CI need not run it."""
    return any(mark in line for mark in MARKS)


def commands(texts: list[str]) -> list[str]:
    """Commands to run: unmarked ones without their comments, each once."""
    lines = [line for text in texts for line in shown(text) if not is_left_out(line)]
    return list(dict.fromkeys(line.split(" #")[0].strip() for line in lines))


if __name__ == "__main__":
    print("\n".join(commands([page.read_text(encoding="utf-8") for page in pages()])))
