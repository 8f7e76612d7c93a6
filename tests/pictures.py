"""The pictures of the docs: `python -m tests.pictures` makes what is cheap to make, as does
`make pictures`; `--all` also runs the demos and benchmarks behind the other pictures.

benchmarks/pictures.json has a digest of what each picture was made from. A test compares it, so a
picture that no longer shows the present plan or table fails the suite.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.show.html.page import plan_page
from tests.helpers import browser

REPOSITORY = Path(__file__).parents[1]
DIGESTS = REPOSITORY / "benchmarks/pictures.json"

# Eight H200 in a pipeline of interleaved chunks, so that every chart of the page has something
PLAN = (
    "configs/glm47.yaml",
    *("parallel.dp=2", "parallel.pp=4", "parallel.vpp=2", "parallel.ep=2"),
    "parallel.account_for_embedding_in_pipeline_split=true",
)
HEIGHT = 2275  # of configs/plan.png [px]: from the verdicts to the end of the memory chart


class Picture(NamedTuple):
    """A PNG of the docs.

    Args:
        path: its file.
        inputs: the text that it shows.
        commands: they measure and draw it; none: a browser draws the plan's page in a second.
    """

    path: str
    inputs: Callable[[], str]
    commands: tuple[str, ...] = ()

    def digest(self) -> str:
        return hashlib.sha256(self.inputs().encode()).hexdigest()[:16]


def page_of_the_plan() -> str:
    path, *overrides = PLAN
    return plan_page(compile_plan(REPOSITORY / path, overrides))


def measured_rows(heading: str, page: str = "docs/performance.md") -> str:
    """The tables below a heading of a page: their numbers and a picture's are from the same run."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    (section,) = re.findall(rf"^{heading}\b.*\n((?:(?!#).*\n)*)", text, re.MULTILINE)
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


MEASURE = "python -m benchmarks.run {} --threads 1 --plot {}"

# dapo alone ends a run in which too few groups are left to learn from
DEMO_OBJECTIVES = {
    **{name: "" for name in ("grpo", "gspo", "cispo", "rloo")},
    "dapo": ", dynamic_sampling_short: keep_flat",
}
DEMO_WITH_ADAPTERS = {
    "full": "tiny.yaml steps=240",
    "merge": "tiny_lora.yaml lora.publish=merge",
    "adapter": "tiny_lora.yaml",
}
PICTURES = (
    Picture("configs/plan.png", page_of_the_plan),
    Picture(
        "benchmarks/demo.png",
        partial(measured_rows, "## The demo"),
        (
            *(
                f"python -m pyrl_ext.train configs/tiny.yaml seed={i} run=runs/tiny-{i}"
                for i in "012"
            ),
            "python -m pyrl_ext.tools.report runs/tiny-0 runs/tiny-1 runs/tiny-2 "
            "--png benchmarks/demo.png",
        ),
    ),
    Picture(
        "benchmarks/objectives.png",
        partial(measured_rows, "## The demo under five presets", "docs/objectives.md"),
        (
            *(
                "python -m pyrl_ext.train configs/tiny.yaml steps=150 "
                f"run=runs/objectives/{name} "
                f"'objective={{preset: {name}, entropy_coef: 0.02{more}}}'"
                for name, more in DEMO_OBJECTIVES.items()
            ),
            "python -m pyrl_ext.tools.report --png benchmarks/objectives.png "
            + " ".join(f"runs/objectives/{name}" for name in DEMO_OBJECTIVES),
        ),
    ),
    Picture(
        "benchmarks/ahead.png",
        partial(measured_rows, "## What older samples teach", "docs/asynchronous.md"),
        (
            "python -m benchmarks.ahead_rewards runs/ahead optimizer.clip_grad=0.1 "
            "objective.clip_high=0.4 "
            "--png benchmarks/ahead.png",
        ),
    ),
    Picture(
        "benchmarks/lora.png",
        partial(measured_rows, "## The demo", "docs/lora.md"),
        (
            "python -m pyrl_ext.train configs/tiny.yaml steps=40 checkpoint.hf=true "
            "run=runs/tiny_base-40",
            *(
                f"python -m pyrl_ext.train configs/{keys} run=runs/lora/{name} "
                f"model.weights={REPOSITORY}/runs/tiny_base-40/checkpoints/step-40/hf"
                for name, keys in DEMO_WITH_ADAPTERS.items()
            ),
            "python -m pyrl_ext.tools.report --png benchmarks/lora.png "
            + " ".join(f"runs/lora/{name}" for name in DEMO_WITH_ADAPTERS),
        ),
    ),
    Picture(
        "benchmarks/data_movement.png",
        partial(measured_rows, "### gather_routes"),
        (MEASURE.format("gather_routes", "benchmarks/data_movement.png"),),
    ),
    Picture(
        "benchmarks/logprob.png",
        partial(measured_rows, "### token_logprob"),
        (MEASURE.format("token_logprob --clock processor", "benchmarks/logprob.png"),),
    ),
)


def make(picture: Picture) -> None:
    """Write the PNG and the digest of its inputs."""
    if picture.commands:
        for command in picture.commands:
            words = [sys.executable, *shlex.split(command)[1:]]
            subprocess.run(words, cwd=REPOSITORY, check=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "plan.html")
            page.write_text(picture.inputs(), encoding="utf-8")
            browser.take(page, REPOSITORY / picture.path, HEIGHT)
    record(picture)


def record(picture: Picture) -> None:
    """Note that the picture shows its present inputs."""
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    digests[picture.path] = picture.digest()
    DIGESTS.write_text(json.dumps(dict(sorted(digests.items())), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pictures", description=__doc__)
    parser.add_argument("--all", action="store_true", help="measured ones too, about an hour")
    parser.add_argument(
        "--drawn",
        metavar="PNG",
        choices=[picture.path for picture in PICTURES],
        help="only note that this one was drawn from the present tables",
    )
    options = parser.parse_args()
    for picture in PICTURES:
        if options.drawn:
            if picture.path == options.drawn:
                record(picture)
        elif options.all or not picture.commands:
            make(picture)
            print(f"wrote {picture.path}")
        else:
            print(f"{picture.path}: {' && '.join(picture.commands)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
