"""The data section of a plan as objects: prompts, reward and scorer."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from pyrl_ext.data.files import DataError
from pyrl_ext.data.prompt_dataset import build_source, image_scale
from pyrl_ext.data.rewards import number_match
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.samples import Prompt, Sample
from tests.helpers.configs import CONFIGS
from tests.helpers.pictures import write_run
from tests.helpers.prompts import write_lines
from tests.helpers.tiny import tiny_plan

RECORDS = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(9)]


NUMBERS = "pyrl_ext.data.rewards:number_match"


def plan_of(path: Path, *overrides: str, reward: str = NUMBERS) -> Plan:
    """The tiny plan with the prompts and the reward of a user."""
    return tiny_plan(
        "data.task=null",
        "data.task_options={}",
        f"data.prompts={path}",
        f"data.reward={reward}",
        *overrides,
    )


def a_sample() -> Sample:
    never = torch.zeros(2, dtype=torch.bool)
    return Sample(
        3, 0, torch.tensor([5, 7]), 1, ~never, -1.0 * ~never, None, (), never, 0, "length"
    )


def sleeps(prompt: Prompt, text: str, tokens: list[int]) -> float:
    time.sleep(3600)
    return 1.0


def test_scorer_has_the_timeout_of_the_plan(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *RECORDS)
    plan = plan_of(path, "data.reward_timeout=0.2", reward=f"{__name__}:sleeps")
    source = build_source(plan)
    with pytest.raises(RuntimeError, match=r"sleeps\(prompt 3, .* no result after 0.2 s"):
        source.scorer([Prompt(3, (5,))])([a_sample()])(defaultdict(float))


def test_scorer_decodes_and_fills_in_rewards(tmp_path: Path):
    source = build_source(plan_of(write_lines(tmp_path / "a.jsonl", *RECORDS)))
    digit = source.tokenizer.decode([7])
    [scored] = source.scorer([Prompt(3, (5,), 4)])([a_sample()])(defaultdict(float))
    assert scored.reward == number_match(Prompt(3, (5,), 4), digit, [7])


def test_build_source_lists_records_without_the_answer_that_the_reward_compares_with(
    tmp_path: Path,
):
    good = write_lines(tmp_path / "good.jsonl", *RECORDS)
    # the plan looks at the first hundred itself
    bad = write_lines(tmp_path / "bad.jsonl", *RECORDS * 12, {"prompt": "2+2="})
    message = r"bad.jsonl:109: no answer, expected a number as answer; data.reward compares with it"
    with pytest.raises(DataError, match=message):
        build_source(plan_of(bad))
    with pytest.raises(DataError, match=message):
        build_source(plan_of(good, f"data.eval_prompts={bad}"))


def test_image_scale_refuses_a_folder_without_a_processor(tmp_path: Path):
    """Before any prompt is read: those of a task need no file."""
    config = write_run(tmp_path)
    folder = tmp_path / "vl"
    shutil.copytree(CONFIGS / "tiny_vl", folder)
    assert image_scale(compile_plan(config, [])).factor.shape == (96,)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=f"image processor {folder}: .*expected a preprocessor_co"):
        image_scale(compile_plan(config, [f"model.tokenizer={folder}"]))
    with pytest.raises(ValueError, match=r"model.tokenizer tiny, expected a folder"):
        image_scale(tiny_plan())
