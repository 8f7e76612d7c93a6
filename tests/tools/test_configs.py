"""The shipped configs: their list, copies that are whole, and what a config without a path is."""

import subprocess
import sys
from pathlib import Path

import pytest

from pyrl_ext.cli import main
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.shipped import config_file, config_name, config_names, first_sentence
from pyrl_ext.tools.configs import copy, files_of

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
EVERY = sorted(
    path.relative_to(ROOT / "configs").as_posix().removesuffix(".yaml")
    for path in (ROOT / "configs").rglob("*.yaml")
)


def test_configs_lists_every_config_with_a_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["configs"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert sorted(lines) == sorted(config_names()) == EVERY
    assert lines["glm47"] == (
        "GLM-4.7-Flash (30B parameters, 3B active) on one node of eight GPUs."
    )
    assert all(len(text) <= 110 for text in lines.values())


@pytest.mark.parametrize("name", EVERY)
def test_copy_of_a_config_is_whole(name: str, tmp_path: Path):
    """Its plan is that of the original, file by file: nothing is read from where it came from."""
    copy(name, tmp_path)
    original = compile_plan(config_file(name)).model_dump(mode="json", exclude={"source"})
    copied = compile_plan(tmp_path / f"configs/{name}.yaml").model_dump(
        mode="json", exclude={"source"}
    )
    assert copied == original
    for file in files_of(config_file(name)):
        assert (tmp_path / file.relative_to(ROOT)).read_bytes() == file.read_bytes()


def test_copy_holds_what_a_run_reads(tmp_path: Path):
    """Prompts, the tokenizer, and the module of the reward; not other configs."""
    copy("examples/reward", tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "chat_template.jinja",
        "config.json",
        "reward.py",
        "reward.yaml",
        "special_tokens_map.json",
        "sums.jsonl",
        "tiny.yaml",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_copied_reward_is_found_in_the_folder_of_the_copy(tmp_path: Path):
    """`configs.examples.reward:near` there is the copied file."""
    copy("examples/reward", tmp_path)
    script = (
        "from pyrl_ext.parallel.user_code import load_callable; "
        "print(load_callable('data.reward', 'configs.examples.reward:near').__code__.co_filename)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(tmp_path / "configs/examples/reward.py")


def test_configs_copies_and_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "--copy", "tiny"]) == 0
    *files, empty, last = capsys.readouterr().out.splitlines()
    assert "configs/tiny.yaml" in files and not empty
    assert last == "Check it: pyrl plan configs/tiny.yaml"
    assert main(["plan", "configs/tiny.yaml"]) == 0
    assert main(["configs", "--copy", "configs/tiny_qwen3.yaml", "there"]) == 0
    assert capsys.readouterr().out.endswith("cd there && pyrl plan configs/tiny_qwen3.yaml\n")


def test_configs_never_writes_over_a_changed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["configs", "--copy", "tiny", str(tmp_path)]) == 0
    assert main(["configs", "--copy", "tiny", str(tmp_path)]) == 0  # the same files
    mine = tmp_path / "configs/tiny.yaml"
    mine.write_text("steps: 1\n")
    (tmp_path / "configs/tiny/tokenizer.json").unlink()
    assert main(["configs", "--copy", "tiny", str(tmp_path)]) == 2
    assert f"{mine}: differs from the shipped file" in capsys.readouterr().err
    assert mine.read_text() == "steps: 1\n"
    assert not (tmp_path / "configs/tiny/tokenizer.json").exists()


def test_configs_refuses_an_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["configs", "--copy", "glm4", str(tmp_path)]) == 2
    assert "glm4: no shipped config. Did you mean glm47?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["configs", str(tmp_path)])
    assert "expected --copy NAME before it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["glm47", "glm47.yaml", "configs/glm47.yaml", "./glm47.yaml"])
def test_plan_of_a_name_without_a_file_is_of_the_shipped_config(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert config_name(text) == "glm47"
    monkeypatch.chdir(tmp_path)
    assert compile_plan(text).source == str(config_file("glm47"))
    assert main(["plan", text]) == 0


def test_plan_of_an_unknown_name_lists_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "glm48"]) == 2
    assert capsys.readouterr().err == (
        "glm48: No such file or directory, expected a YAML file. Shipped configs with a name like "
        "this: glm47\n"
    )


def test_plan_of_a_name_says_which_file_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    copy("glm47", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "glm47"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean configs/glm47.yaml?\n")
    monkeypatch.chdir(tmp_path / "configs")
    assert main(["plan", "glm47"]) == 2  # a folder has this name
    assert capsys.readouterr().err == (
        "glm47: Is a directory, expected a YAML file. Did you mean glm47.yaml?\n"
    )


def test_first_sentence_ends_where_the_comment_does(tmp_path: Path):
    file = tmp_path / "x.yaml"
    file.write_text("# One 3.5B model\n# in two lines. And more.\n#\n# Not this.\nsteps: 1\n")
    assert first_sentence(file) == "One 3.5B model in two lines."
    file.write_text("steps: 1\n# later\n")
    assert first_sentence(file) == ""
