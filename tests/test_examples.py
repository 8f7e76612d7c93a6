"""Examples compile, their code is what runs ask for; docs/README.md lists every config."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from configs.examples.environment import Calculator
from configs.examples.loss import tapered
from configs.examples.reward import near
from pyrl_ext.data.environment import load_environment
from pyrl_ext.data.tasksets import load_taskset
from pyrl_ext.data.workers import Pool
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.parallel.user_code import load_function
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.fits import seems_to_fit
from pyrl_ext.plan.schema import Objective
from pyrl_ext.samples import Prompt
from tests.readme import REPOSITORY, commands, pages

EXAMPLES = sorted((REPOSITORY / "configs/examples").glob("*.yaml"))
PAGE = (REPOSITORY / "docs/README.md").read_text("utf-8")


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda path: path.stem)
def test_example_compiles_and_names_code_that_a_run_accepts(
    config: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = compile_plan(config)
    if plan.data.reward is not None:
        assert load_function("data.reward", plan.data.reward, 3)
    if plan.turns.taskset is not None:
        monkeypatch.syspath_prepend(str(config.parent))
        load = partial(load_taskset, plan.turns.taskset, plan.turns.options)
        with closing(Pool("turns.environment", load)) as pool:
            assert len(pool.about) == 210
    for environment in plan.environments.values():
        assert load_environment(environment)()
    if ":" in plan.objective.loss:
        assert load_function("objective.loss", plan.objective.loss, 3, config=plan.objective)
    assert plan.unsupported == () and seems_to_fit(plan) is None
    assert f"python -m pyrl_ext.train configs/examples/{config.name}" in config.read_text("utf-8")


def test_quickstart_shows_a_config_of_at_most_eight_lines():
    text = (REPOSITORY / "configs/examples/quickstart.yaml").read_text("utf-8")
    keys = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(keys) <= 8
    page = (REPOSITORY / "docs/quickstart.md").read_text("utf-8")
    assert "```text\n" + "\n".join(keys) + "\n```\n" in page
    plan = compile_plan(REPOSITORY / "configs/examples/quickstart.yaml")
    model = plan.model
    assert (model.family, model.config, model.tokenizer, model.weights) == (
        "glm4_moe_lite", "../tiny/config.json", "../tiny", None,
    )  # fmt: skip
    assert (plan.run, plan.rollout.engine) == ("runs/quickstart", "hf")
    assert {
        "run is left out: the run folder is runs/quickstart",
        "rollout.engine is left out: it is hf, because device is cpu",
    } <= {*plan.notes}


def test_page_of_examples_lists_every_config():
    folder = REPOSITORY / "configs"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")}
    assert set(re.findall(r"`([\w/]+\.yaml)`", PAGE)) == found


def test_page_of_examples_has_twins_that_ci_runs():
    """A twin is a config that exists; its command is one of those of README and docs."""
    rows = [row.split(" | ") for row in re.findall(r"^\| (.* \| .* \| .* \| .*) \|$", PAGE, re.M)]
    twins = {row[0]: row[2:] for row in rows if row[1].startswith("`examples/")}
    texts = {str(page): page.read_text("utf-8") for page in pages()}
    run = {*chain.from_iterable(commands(texts).values())}
    named = {name for row in twins.values() for name in re.findall(r"`(make [^`]*)`", row[1])}
    assert len(twins) >= 8 and named and not named - run
    assert [what for what, (twin, _) in twins.items() if twin == "none"] == [
        "DeepSeek-V3, engines on separate hosts"
    ]


def test_reward_is_higher_the_nearer_the_digit():
    prompt = Prompt(0, (28, 19, 29), answer="7", text="3+4")
    assert near(prompt, "7", [32]) == {"near": 0.5, "right": 0.5}
    totals = [sum(near(prompt, text, [0]).values()) for text in ("7", "6", "1", "", "71", "x")]
    assert totals == sorted(totals, reverse=True) and totals[3:] == [0, 0, 0]


def test_loss_fades_bad_samples_that_the_policy_leaves():
    new = [-1.0, -2.0, -0.5, math.nan]
    old = [-1.0, -1.5, -0.7, math.nan]
    advantages = [1.0, -1.0, -2.0, 1.0]
    entropy = [0.1, 0.2, 0.3, 0.4]
    mask = torch.tensor([True, True, True, False])
    logprobs = torch.tensor(new, requires_grad=True)
    engine = torch.tensor(old)
    fields = LossInputs(engine, engine, None, torch.tensor(advantages), mask)
    config = Objective(entropy_coef=0.5)
    loss, count, metrics = tapered(logprobs, torch.tensor(entropy), fields, config)
    rows = list(zip(new, old, advantages, entropy, strict=True))[:3]
    weights = [1 if a > 0 else min(math.exp(n - o), 1) for n, o, a, _ in rows]
    wanted = sum(-a * w * n - 0.5 * e for (n, _, a, e), w in zip(rows, weights, strict=True))
    assert loss.item() == pytest.approx(wanted) and count == 3
    assert [number.item() for number in metrics["policy/tapered"]] == [1, 3]
    loss.backward()
    assert logprobs.grad is not None
    slopes = [-a * w for (_, _, a, _), w in zip(rows, weights, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx([*slopes, 0])


@pytest.mark.parametrize(
    ("turns", "rewards"), [("=7", [0.25, 0.75]), ("=8", [0.25, 0]), ("7", [1]), ("==", [0.25, 0])]
)
def test_environment_rewards_a_call_and_the_answer(turns: str, rewards: list[float]):
    game = Calculator(for_call=0.25)
    game.start(Prompt(0, (28, 19, 29), answer="7", text="3+4"))
    steps = [asyncio.run(game.step([0], text)) for text in turns]
    assert [reward for _, reward, _ in steps] == rewards
    assert [done for _, _, done in steps] == [False] * (len(turns) - 1) + [True]
    assert steps[0][0] == ("7" if turns[0] == "=" else None)
