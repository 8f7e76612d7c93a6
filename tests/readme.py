"""Print the README's commands, one a line, for `.ci/run` to run: all but those that need a GPU."""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands(text: str) -> list[str]:
    """Lines of the ```bash blocks, continuation lines joined, without comments."""
    found: list[str] = []
    for block in text.split("```bash\n")[1:]:
        body = block.split("```")[0].replace("\\\n", "")
        found += [" ".join(line.split()) for line in body.splitlines() if line.strip()]
    return [line for line in found if "needs a GPU" not in line and not line.startswith("#")]


if __name__ == "__main__":
    print("\n".join(commands(README.read_text(encoding="utf-8"))))
