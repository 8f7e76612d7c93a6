"""Keys that follow from others: the model's folder, the run folder, the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyrl_ext.plan import compile_plan
from tests.helpers.configs import REPOSITORY, SMALL, hf_of, problems_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`first.yaml` next to two model folders."""
    for name, sizes in (("model", "tiny"), ("other", "tiny_qwen3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf_of(sizes)))
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("")
    named = "{family: glm4_moe_lite, config: config.json, tokenizer: owner/name}"
    text = SMALL.replace(named, "{path: model}").replace("run: runs/x\n", "")
    (tmp_path / "first.yaml").write_text(text.replace("engine: hf, ", ""))
    return tmp_path


def model_of(path: Path, *overrides: str) -> tuple[str, str, str | None, str | None]:
    model = compile_plan(path, overrides).model
    assert model.path is None
    return model.family, model.config, model.tokenizer, model.weights


def test_compile_plan_takes_a_model_from_one_folder(folder: Path):
    path = folder / "first.yaml"
    assert model_of(path) == ("glm4_moe_lite", "model/config.json", "model", "model")
    assert model_of(path, "model.weights=null")[2:] == ("model", None)
    other = ("qwen3_moe", "other/config.json", "other", "other")
    assert model_of(path, "model.path=other") == model_of(path, "model=other") == other
    path.write_text(path.read_text().replace("model: {path: model}", "model: other"))
    assert model_of(path) == other
    for order in (
        ("model.path=other", "model.weights=null"),
        ("model.weights=null", "model.path=other"),
    ):
        assert model_of(path, *order) == (*other[:3], None)


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        ("llama31_8b", "llama"),
        ("mixtral_8x7b", "mixtral"),
        ("qwen25_7b", "qwen2"),
        ("minimax_m2", "minimax_m2"),
    ],
)
def test_compile_plan_takes_families_from_a_folder(folder: Path, sizes: str, family: str):
    (folder / "model/config.json").write_text(json.dumps(hf_of(sizes)))
    found = model_of(folder / "first.yaml", "replay=off")
    assert found == (family, "model/config.json", "model", "model")


def test_compile_plan_names_the_nearest_family_of_a_folder(folder: Path):
    for changes, nearest in (
        ({"model_type": "mistral"}, "llama"),
        ({"model_type": "olmoe", "num_experts": 64}, "qwen3_moe"),
        ({"model_type": "phimoe", "num_local_experts": 16}, "mixtral"),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, "deepseek_v3"),
    ):
        (folder / "model/config.json").write_text(json.dumps(hf_of("llama31_8b") | changes))
        (problem,) = problems_of(folder / "first.yaml")
        kind = changes["model_type"]
        assert f"first.yaml:3: model.family: {kind!r}, the model_type of " in problem
        assert (
            "qwen3_next, qwen3_vl_moe; no other architecture is built. The nearest by " in problem
        )
        assert f"structure is {nearest}. To add a family" in problem


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "mistral", "text_config": None}, {"model_type": ["llama"]}],
    ids=["text_config", "model_type"],
)
def test_compile_plan_refuses_odd_values_in_the_config_of_a_folder(
    folder: Path, changes: dict[str, object]
):
    (folder / "model/config.json").write_text(json.dumps(hf_of("llama31_8b") | changes))
    assert "first.yaml:3: model.family: " in problems_of(folder / "first.yaml")[0]


def test_compile_plan_lays_a_folder_over_the_keys_of_a_parent(folder: Path):
    (folder / "below").mkdir()
    child = folder / "below/child.yaml"
    child.write_text("extends: ../first.yaml\nmodel: {path: ../other}\n")
    assert model_of(child) == ("qwen3_moe", "../other/config.json", "../other", "../other")
    child.write_text("extends: ../first.yaml\nmodel: ../other\n")
    assert model_of(child)[1:] == ("../other/config.json", "../other", "../other")
    child.write_text("extends: ../first.yaml\nmodel: {tokenizer: owner/name}\n")
    assert model_of(child) == ("glm4_moe_lite", "../model/config.json", "owner/name", "../model")


def test_compile_plan_notes_what_it_fills_in(folder: Path):
    plan = compile_plan(folder / "first.yaml")
    assert (plan.run, plan.rollout.engine) == ("runs/first", "hf")
    assert "run is left out: the run folder is runs/first" in plan.notes
    assert "rollout.engine is left out: it is hf, because device is cpu" in plan.notes
    (problem,) = problems_of(folder / "first.yaml", "device=cuda")
    assert ": rollout.engine: missing, expected hf or recorded or vllm; hf: embedded" in problem


def test_compile_plan_takes_a_first_config_of_six_lines(folder: Path):
    path = folder / "six.yaml"
    path.write_text(
        "device: cpu\n"
        "model: {path: model}\n"
        "batching: {prompts: 16, samples_per_prompt: 8}\n"
        "rollout: {max_new_tokens: 12}\n"
        "optimizer: {lr: 3e-3}\n"
        "data: {task: countdown, max_prompt_tokens: 16}\n"
    )
    plan = compile_plan(path)
    assert (plan.steps, plan.batching.tokens_per_microbatch) == (100, 8192)
    problems = problems_of(path, "rollout.max_new_tokens=9000", "data.max_prompt_tokens=1000")
    longest = "batching.tokens_per_microbatch: 8192, expected at least 9999"
    assert any(longest in problem for problem in problems)


def test_compile_plan_refuses_a_folder_without_a_model(folder: Path):
    path = folder / "first.yaml"
    rule = "expected a Hugging Face folder, relative to this file, with config.json in it"
    what = "'nowhere': no config.json with a model_type"
    path.write_text(path.read_text().replace("{path: model}", "{path: nowhere}"))
    assert problems_of(path) == [f"{path}:3: model.path: {what}, {rule}"]
    override = "command line: model.path=nowhere"
    assert problems_of(path, "model.path=nowhere") == [f"{override}: {what}, {rule}"]
    (folder / "model/model.safetensors").unlink()
    assert problems_of(path, "model.path=model")[0].startswith(f"{path}:3: model.weights: ")


def test_replay_is_off_for_a_model_without_routers_if_nothing_is_written(tmp_path: Path):
    dense = REPOSITORY / "tests/plan/broken_configs/dense.json"
    config = tmp_path / "mine.yaml"
    config.write_text(SMALL.replace("config: config.json", f"config: {dense}"))
    note = "replay is left out: it is off, because the model has no routers"
    plan = compile_plan(config)
    assert not plan.replay.enabled and note in plan.notes
    assert note not in compile_plan(config, ["replay=off"]).notes
    (problem,) = problems_of(config, "replay.train=true")
    assert "replay: on, expected a model with routers" in problem
    assert compile_plan(REPOSITORY / "configs/tiny.yaml").replay.enabled
