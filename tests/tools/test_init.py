"""`pyrl init`: configs from a model's name, and `pyrl train` with a name in place of a config."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from pyrl_ext.cli import main
from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.language.hf_hub import config_of
from pyrl_ext.plan.language.yaml_tree import read
from pyrl_ext.plan.model.units import MIB, duration
from pyrl_ext.plan.shipped import shipped_models
from pyrl_ext.tools.init import gpus_named
from pyrl_ext.tools.recipe import Data, Gpus, recipe
from tests.helpers.configs import CONFIGS

pytestmark = pytest.mark.multiprocess

GOLDEN = Path(__file__).parent / "init_glm47_8xH200.yaml"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the folder `model`: a tiny Qwen3-MoE without weights."""
    shutil.copytree(CONFIGS / "tiny", tmp_path / "model")
    shutil.copy(CONFIGS / "tiny_qwen3/config.json", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds this folder
    return tmp_path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, of which alone is read."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config_of.cache_clear()
    return cache


def init(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["init", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err


def put(cache: Path, name: str) -> Path:
    """Put the config.json of `name` into the hub's cache; where it is."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(CONFIGS / "tiny_qwen3/config.json", snapshot)
    return snapshot / "config.json"


def test_init_of_a_folder_plans_and_trains(here: Path, capsys: pytest.CaptureFixture[str]):
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
    random.save_pretrained("model")
    text = init("model", capsys=capsys)
    Path("run.yaml").write_text(text)
    assert all("#" in line or line.endswith(":") for line in text.splitlines() if line)
    plan = compile_plan("run.yaml")
    assert (plan.model.family, plan.model.weights, plan.device) == ("qwen3_moe", "model", "cpu")
    assert plan.hardware.memory and plan.data.task == "countdown"
    short = ("rollout.max_new_tokens=4", "evaluate.every=0")
    assert main(["train", "run.yaml", "steps=2", *short]) == 0
    steps = Path("runs/model/metrics.jsonl").read_text().splitlines()
    assert sum('"step": ' in line for line in steps) >= 2


@pytest.mark.parametrize("template", [False, True])
def test_init_takes_a_task_of_reasoning_gym(
    here: Path, capsys: pytest.CaptureFixture[str], template: bool
):
    """Questions are in the chat template where the tokenizer has one."""
    Path("model/chat_template.jinja").unlink(missing_ok=True)
    if template:
        shutil.copy(CONFIGS / "tiny/chat_template.jinja", "model")
    text = init("model", "--task", "reasoning_gym:chain_sum", capsys=capsys)
    Path("run.yaml").write_text(text)
    plan = compile_plan("run.yaml")
    assert (plan.data.task, plan.data.chat) == ("reasoning_gym:chain_sum", template)


def test_train_of_a_folder_makes_its_config(here: Path, capsys: pytest.CaptureFixture[str]):
    """Paths in it are absolute, since it lies in the run folder."""
    prompts = [json.dumps({"prompt": str(number)}) for number in range(20)]
    Path("p.jsonl").write_text("\n".join(prompts))
    Path("mine.py").write_text("def long(prompt, text, tokens):\n    return float(len(text) > 3)\n")
    given = ["--reward", "mine:long", "--prompts", "p.jsonl", "run=runs/x", "steps=1"]
    short = ["rollout.max_new_tokens=4", "evaluate.every=0"]
    assert main(["train", "model", *given, *short]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    made = "made runs/x/config.yaml for model; `pyrl plan runs/x/config.yaml` explains it"
    assert first == made
    plan = Plan.read("runs/x/plan.json")
    assert plan.resolve(str(plan.data.prompts)) == str(here / "p.jsonl")
    assert plan.data.reward == "mine:long" and plan.steps == 1
    assert main(["train", "model", *given, *short]) == 0  # it resumes: the config is the same


def test_init_writes_what_it_wrote(here: Path, capsys: pytest.CaptureFixture[str]):
    text = init("glm47", "--gpus", "8xH200", capsys=capsys)
    if os.environ.get("PYRL_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("glm47", "8xH100"),
        ("glm47", "6xH200"),  # recomputes what enters the last product of the experts
        ("moonlight", "8xH100"),
        ("nemotron3_nano", "8xH100"),
        ("qwen3_30b", "8xH100"),
        ("qwen3_next_80b", "32xH100"),
    ],
)
def test_init_of_a_published_size_fits(
    model: str, gpus: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    Path("run.yaml").write_text(init(model, "--gpus", gpus, capsys=capsys))
    plan = compile_plan("run.yaml")
    assert f"{plan.world_size}x{plan.hardware.gpu}" == gpus
    assert not any("run out of memory" in note for note in plan.notes)
    time = step_time(plan)
    assert time is not None  # the head is about what is written below
    assert f"# {duration(time.total)} a step" in Path("run.yaml").read_text()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "qwen3_next_80b",
            "Qwen/Qwen3-Next-80B-A3B-Thinking does not fit 8 H100, expected for example 32. Use "
            "--gpus 32xH100",
        ),
        ("glm47_355b", "zai-org/GLM-4.7 does not fit 8 H100, nor 1024: an engine has at most"),
        ("qwen3_vl_30b", "qwen3_vl_moe reads images, expected a model of text alone. Start from"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3 does not fit 8 H100, nor 1024: an engine has"),
    ],
)
def test_init_says_what_a_model_needs(
    model: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    assert message in refusal("init", model, "--gpus", "8xH100", capsys=capsys)


def test_init_lists_models_and_configs(capsys: pytest.CaptureFixture[str]):
    text = init("--list", capsys=capsys)
    for model in shipped_models().values():
        made = model.config not in (
            "deepseek_v3",
            "qwen3_vl_30b",
        )  # these need more than init makes
        assert (f"pyrl init {model.config:20} {model.hub_id}\n" in text) == made
        assert f"\n{model.config} " in text
    assert "\ntiny " in text


@pytest.mark.parametrize("name", ["glm4", "GLM47"])
def test_init_says_which_model_was_meant(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    expected = f"pyrl init: {name}: no such folder, expected a Hugging Face folder, a hub id"
    message = refusal("init", name, capsys=capsys)
    assert message.startswith(expected)
    assert "Did you mean glm47" in message
    assert "with a name like this: glm47" in refusal("plan", name, capsys=capsys)


def test_plan_takes_sizes_from_the_cache_of_the_hub(here: Path, hub: Path):
    config = put(hub, "owner/name")
    Path("x.yaml").write_text("model: owner/name\n")
    model = read("x.yaml").tree["model"]
    assert model == {
        "path": None,
        "family": "qwen3_moe",
        "config": "owner/name",
        "tokenizer": "owner/name",
        "weights": "owner/name",
    }
    plan = compile_plan(CONFIGS / "tiny.yaml", ("model=owner/name", "data.max_prompt_tokens=16"))
    assert plan.config_path == str(config)
    assert plan.is_hub_id(str(plan.model.weights)) and plan.model.family == "qwen3_moe"


def test_plan_takes_sizes_of_shipped_models_without_the_hub(hub: Path):
    for hub_id, model in shipped_models().items():
        assert config_of(hub_id).path == str(model.sizes)
        assert json.loads(model.sizes.read_text())["model_type"]


def test_plan_refuses_a_hub_id_that_is_not_in_the_cache(hub: Path):
    with pytest.raises(ConfigError) as error:
        compile_plan(CONFIGS / "tiny.yaml", ("model=owner/none",))
    assert str(error.value) == (
        "command line: model=owner/none: 'owner/none': no such folder next to this file, so it is "
        "a hub id: HF_HUB_OFFLINE is set and it is not whole in the hub's cache, expected to reach "
        "the hub. Download it elsewhere and name the folder"
    )


def test_init_refuses_what_is_no_model(here: Path, capsys: pytest.CaptureFixture[str]):
    Path("m.gguf").write_bytes(b"GGUF")
    gguf = "'m.gguf': weights in GGUF, expected a Hugging Face folder"
    assert gguf in refusal("init", "m.gguf", capsys=capsys)
    assert gguf in refusal("train", "m.gguf", capsys=capsys)
    (here / "model/tokenizer.json").unlink()
    missing = "model.tokenizer: model holds no tokenizer.json, expected a folder with"
    assert missing in refusal("init", "model", capsys=capsys)
    shutil.rmtree("model")
    Path("model").mkdir()
    none = "'model': no config.json with a model_type, expected a Hugging Face folder"
    assert none in refusal("init", "model", capsys=capsys)
    Path("model").rmdir()
    none = "model: no such folder, expected a Hugging Face folder"
    assert none in refusal("init", "model", capsys=capsys)
    assert not Path("runs").exists()


def test_init_refuses_arguments_that_do_not_go_together(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    assert "expected both or neither" in refusal("init", "model", "--prompts", "x", capsys=capsys)
    both = ("--prompts", "x", "--reward", "a:b", "--task", "add")
    assert "expected one of them" in refusal("init", "model", *both, capsys=capsys)
    unknown = refusal("init", "model", "--task", "chain_sum", capsys=capsys)
    assert "--task chain_sum, expected copy" in unknown and "reasoning_gym:NAME" in unknown
    misspelt = refusal("init", "model", "--task", "reasoning_gym:chain_sums", capsys=capsys)
    assert "such as chain_sum" in misspelt
    assert "`pyrl train tiny`" in refusal("init", "tiny", capsys=capsys)
    assert "`pyrl train examples/reward`" in refusal("init", "examples/reward", capsys=capsys)
    assert "expected a number and one of" in refusal("init", "model", "--gpus", "8", capsys=capsys)


def test_init_takes_no_random_weights_for_those_it_cannot_read(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    Path("model/pytorch_model-00001-of-00002.bin").write_bytes(b"weights")
    pickled = (
        "model.weights: model/pytorch_model-00001-of-00002.bin is pickled weights, which may run "
        "code, expected *.safetensors. Save them as safetensors"
    )
    assert pickled in refusal("init", "model", capsys=capsys)
    assert pickled in refusal("init", "model", "--gpus", "1xH100", capsys=capsys)


def test_init_names_a_number_of_gpus_below_the_given_one(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    message = refusal("init", "glm47", "--gpus", "3xH100", capsys=capsys)
    assert "does not fit 3 H100, expected for example 8. Use --gpus 8xH100" in message


@pytest.mark.parametrize(
    ("gpus", "positions", "response"),
    [((), 100, 36), (("--gpus", "1xH100"), 1024, 960), (("--gpus", "1xH100"), 4160, 4096)],
)
def test_init_asks_for_no_more_positions_than_a_model_has(
    gpus: tuple[str, ...],
    positions: int,
    response: int,
    here: Path,
    capsys: pytest.CaptureFixture[str],
):
    sizes = json.loads(Path("model/config.json").read_text())
    sizes["max_position_embeddings"] = positions
    Path("model/config.json").write_text(json.dumps(sizes))
    Path("run.yaml").write_text(init("model", *gpus, capsys=capsys))
    assert compile_plan("run.yaml").rollout.max_new_tokens == response


def test_init_refuses_empty_options(here: Path, capsys: pytest.CaptureFixture[str]):
    empty = refusal("init", "model", "--prompts", "", "--reward", "a:b", capsys=capsys)
    assert "--prompts is empty, expected a value" in empty
    empty = refusal("init", "model", "--prompts", "p.jsonl", "--reward", "", capsys=capsys)
    assert "--reward is empty, expected a value" in empty
    empty = refusal("init", "model", "--gpus", "", capsys=capsys)
    assert "'', expected a number and one of A100" in empty


@pytest.mark.parametrize("name", ["@x", "{x", "%x", "12", "a: b", "a #b"])
def test_init_takes_a_folder_of_any_name(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    Path("model").rename(name)
    Path("run.yaml").write_text(init(name, capsys=capsys))
    plan = compile_plan("run.yaml")
    assert plan.config_path == str(here / name / "config.json")
    assert plan.run == f"runs/{name}"


def test_init_names_files_as_seen_from_here(here: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--prompts", "nofile.jsonl", "--reward", "nomodule:f")
    message = refusal("init", "model", *given, capsys=capsys)
    assert "data.prompts: nofile.jsonl does not exist, expected a file" in message
    assert f"expected one next to the YAML file ({here})" in message


def test_train_of_a_folder_leaves_another_config(here: Path, capsys: pytest.CaptureFixture[str]):
    written = Path("runs/my model/config.yaml")
    written.parent.mkdir(parents=True)
    written.write_text("steps: 3\n")
    message = refusal("train", "model", "run=runs/my model", capsys=capsys)
    assert message == (
        "pyrl train: runs/my model/config.yaml differs from what model gives, expected the same "
        "config, to resume its run. To go on with it: pyrl train 'runs/my model/config.yaml'; or "
        "set run= to another folder\n"
    )
    assert written.read_text() == "steps: 3\n"


def test_train_of_a_folder_makes_none_for_what_does_not_run(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    unknown = "command line: optimizer.rate=1: unknown key"
    assert unknown in refusal("train", "model", "optimizer.rate=1", capsys=capsys)
    wrong = refusal("train", "model", "batching.tokens_per_microbatch=8", capsys=capsys)
    assert wrong.startswith("command line: batching.tokens_per_microbatch=8: ")
    missing = refusal("train", "model", "data.prompts=none.jsonl", capsys=capsys)
    assert "runs/model/none.jsonl does not exist" in missing
    with pytest.raises(SystemExit) as ended:
        main(["train", "model", "--help"])
    assert ended.value.code == 0
    assert not Path("runs").exists()
    Path("runs").write_text("a file")
    unmade = "runs/model/config.yaml: Not a directory, expected a run folder that can be made"
    assert unmade in refusal("train", "model", "run=", capsys=capsys)


@pytest.mark.parametrize(
    ("name", "memory", "gpus"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, Gpus(4, "A100")),
        ("NVIDIA A100-SXM4-40GB", 40960, Gpus(4, "A100", 40960 * MIB)),
        ("NVIDIA H100 80GB HBM3", 81559, Gpus(4, "H100")),
        ("NVIDIA H100 NVL", 95830, Gpus(4, "H100")),
        ("NVIDIA H200", 143771, Gpus(4, "H200")),
    ],
)
def test_gpus_are_those_that_nvidia_smi_names(name: str, memory: int, gpus: Gpus):
    assert gpus_named(name, memory * MIB, 4) == gpus


def test_init_takes_no_other_gpu_for_one_of_a_like_name():
    with pytest.raises(ValueError, match="this machine has NVIDIA GH200 480GB, expected one of"):
        gpus_named("NVIDIA GH200 480GB", 97871 * MIB, 1)


def test_init_plans_for_the_memory_of_these_gpus(here: Path):
    memory = 40960 * MIB
    made = recipe("model", Gpus(1, "A100", memory), Data())
    Path("run.yaml").write_text(made.text())
    plan = compile_plan("run.yaml")
    assert (plan.hardware.gpu, plan.hardware.memory) == ("A100", memory)
    assert "at the peak of 40 GiB" in made.head[0]
    with pytest.raises(ValueError, match=r"does not fit 1 A100 of 40 GiB, expected for example"):
        recipe("zai-org/GLM-4.7-Flash", Gpus(1, "A100", memory), Data())
