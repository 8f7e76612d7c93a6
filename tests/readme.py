"""Print the commands of README and docs, one a line, for `.ci/run` to run.

Commands are the lines of ```bash blocks. One whose comment says what it needs ("# needs a GPU")
is left out; one that several pages show is printed once, where it comes first.
"""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MARK = "# needs "


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


def commands(texts: list[str]) -> list[str]:
    """Commands to run: unmarked ones without their comments, each once."""
    lines = [line for text in texts for line in shown(text) if MARK not in line]
    return list(dict.fromkeys(line.split(" #")[0].strip() for line in lines))


if __name__ == "__main__":
    print("\n".join(commands([page.read_text(encoding="utf-8") for page in pages()])))
