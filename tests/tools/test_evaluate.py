"""`pyrl eval`: the numbers of a run's own evaluation, from every kind of folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyrl_ext import train
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.data.rewards import number_match
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.metrics.history import load_run
from pyrl_ext.plan import Plan
from pyrl_ext.samples import Prompt
from pyrl_ext.tools import eval as evaluate
from pyrl_ext.tools import export
from pyrl_ext.tools.evaluation import RESULTS
from tests.helpers.hosts import TORCHRUN
from tests.helpers.ranks import DEADLINE
from tests.helpers.run_pages import page_of
from tests.helpers.tiny import CONFIG, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SUMS = [("1+2=", "3"), ("2+2=", "4"), ("3+5=", "8")]
DRAWN = ("evaluate.samples=4", "evaluate.temperature=1.0", "evaluate.pass_k=[1,4]")


def sums_file(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    lines = (json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in SUMS)
    path.write_text("\n".join(lines) + "\n")
    return path


def options_of(folder: Path) -> list[str]:
    reward = "pyrl_ext.data.rewards:number_match"
    return [
        *QUICK,
        *DRAWN,
        "steps=2",
        "evaluate.every=2",
        f"evaluate.sets={{sums: {{file: {sums_file(folder)}, reward: '{reward}'}}}}",
        "rollout.record=rollouts",
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of two steps, evaluated on two sets before and after them."""
    folder = tmp_path_factory.mktemp("trained")
    run = folder / "run"
    assert train.main([str(CONFIG), f"run={run}", *options_of(folder)]) == 0
    return run


def last(folder: Path) -> dict:
    """The sets of the newest call of `pyrl eval`."""
    return json.loads((folder / RESULTS).read_text().splitlines()[-1])["sets"]


def own(run: Path) -> dict[str, float]:
    """The metrics of the run's evaluation of its final weights."""
    return load_run(run).rows[-1]


def assert_equal(found: dict, row: dict[str, float]) -> None:
    held_out = found["held_out"]
    assert held_out["reward"]["mean"] == row["eval_reward"]
    assert held_out["reward"]["error"] == row["eval/held_out/reward_error"]
    assert held_out["passes"]["4"]["mean"] == row["eval/held_out/pass@4"]
    sums = found["sums"]
    assert sums["reward"]["mean"] == row["eval/sums/reward"]
    assert sums["length"] == row["eval/sums/response_len"]
    assert sums["prompts"] == len(SUMS)


def test_metrics_of_a_set_are_those_of_its_recorded_samples(trained):
    plan = Plan.read(trained / "plan.json")
    assert plan.tokenizer_path is not None
    decode = load_tokenizer(plan.tokenizer_path).decode
    samples = load_samples(trained / "rollouts/eval/sums/step-000002.safetensors")
    assert len(samples) == 4 * len(SUMS)
    for sample in samples:
        text, answer = SUMS[-1 - sample.prompt_id]
        response = [token for token in sample.response if token != plan.hf["eos_token_id"]]
        prompt = Prompt(sample.prompt_id, (), answer, text)
        assert sample.reward == number_match(prompt, decode(response), sample.response)
    means = [sum(s.reward for s in samples if s.prompt_id == -1 - i) / 4 for i in range(len(SUMS))]
    assert own(trained)["eval/sums/reward"] == pytest.approx(sum(means) / len(SUMS))


def test_eval_of_a_run_gives_the_numbers_of_its_last_evaluation(trained, capsys):
    assert evaluate.main([str(trained)]) == 0
    assert_equal(last(trained / "eval"), own(trained))
    assert "pass@4" in capsys.readouterr().out
    samples = load_samples(trained / "eval/held_out/step-000002.safetensors")
    recorded = load_samples(trained / "rollouts/eval/held_out/step-000002.safetensors")
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in recorded]
    checkpoint = trained / "checkpoints/step-2"
    assert evaluate.main([str(checkpoint), "--n", "1", "--temperature", "0", "--pass-k", "1"]) == 0
    greedy = last(trained / "eval")["held_out"]
    assert (greedy["samples"], greedy["temperature"]) == (1, 0)
    page = page_of(trained)
    assert "Evaluations" in page and "temperature 1" in page and "greedy" in page


def test_eval_of_an_exported_model_gives_the_numbers_of_the_run(trained, tmp_path):
    assert export.main([str(trained), str(tmp_path / "hf")]) == 0
    config = tmp_path / "eval.yaml"
    config.write_text(f"extends: {CONFIG}\n")
    options = ["--config", str(config), "--out", str(tmp_path / "out"), *options_of(tmp_path)]
    assert evaluate.main([str(tmp_path / "hf"), *options]) == 0
    assert_equal(last(tmp_path / "out"), own(trained))


def test_eval_of_a_run_that_began_with_weights_takes_those_of_its_checkpoint(trained, tmp_path):
    weights = tmp_path / "hf"
    assert export.main([str(trained), str(weights)]) == 0
    run = tmp_path / "run"
    options = [*options_of(tmp_path), f"model.weights={weights}", "optimizer.lr=0.01"]
    assert train.main([str(CONFIG), f"run={run}", *options]) == 0
    shutil.rmtree(weights)
    assert evaluate.main([str(run)]) == 0
    assert_equal(last(run / "eval"), own(run))
    assert evaluate.main([str(run), "rollout.max_new_tokens=3"]) == 0
    assert last(run / "eval")["held_out"]["length"] <= 3 < own(run)["eval/held_out/response_len"]


def test_eval_of_an_adapter_gives_the_numbers_of_the_run(tmp_path):
    config = tmp_path / "lora.yaml"
    config.write_text(f"extends: {CONFIG}\nlora: {{rank: 4, alpha: 8, targets: [o_proj]}}\n")
    weights = tmp_path / "base"
    base = tmp_path / "base_run"
    assert train.main([str(CONFIG), f"run={base}", *QUICK, "steps=1", "evaluate.every=0"]) == 0
    assert export.main([str(base), str(weights)]) == 0
    run = tmp_path / "run"
    options = [*options_of(tmp_path), f"model.weights={weights}", "optimizer.lr=0.01"]
    assert train.main([str(config), f"run={run}", *options]) == 0
    assert export.main([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    out = ["--config", str(config), "--out", str(tmp_path / "out")]
    assert evaluate.main([str(tmp_path / "adapter"), *out, *options]) == 0
    found = last(tmp_path / "out")
    assert_equal(found, own(run))
    assert (
        evaluate.main([str(weights), "--config", str(CONFIG), *out[2:], *options_of(tmp_path)]) == 0
    )
    assert last(tmp_path / "out") != found


def test_eval_on_two_ranks_gives_the_numbers_of_one(trained, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "pyrl_ext.tools.eval"]
    arguments = [str(trained), "parallel.dp=2", "--out", str(tmp_path)]
    subprocess.run([*command, *arguments], check=True, timeout=DEADLINE)
    assert_equal(last(tmp_path), own(trained))


def test_eval_finds_a_reward_next_to_the_config(tmp_path):
    code = "def fn(prompt, text, tokens):\n    return len(tokens)\n"
    (tmp_path / "long_enough.py").write_text(code)
    config = tmp_path / "mine.yaml"
    data = f"prompts: {sums_file(tmp_path).name}, reward: 'long_enough:fn'"
    config.write_text(f"extends: {CONFIG}\ndata: {{task: null, task_options: {{}}, {data}}}\n")
    quick = [each.replace("prompts=4", "prompts=2") for each in QUICK]
    run = tmp_path / "run"
    commands = (
        ["pyrl_ext.train", str(config), f"run={run}", *quick, "steps=1"],
        ["pyrl_ext.tools.eval", str(run)],
    )
    for command in commands:  # in processes that have not imported it, from another folder
        subprocess.run([sys.executable, "-m", *command], check=True, timeout=DEADLINE, cwd="/")
    assert last(run / "eval")["held_out"]["reward"]["mean"] >= 1


def test_eval_says_what_it_needs(trained, tmp_path, capsys):
    for arguments, problem in (
        ([str(tmp_path)], "expected a run folder, a checkpoint, a Hugging Face folder or an"),
        ([str(trained), "--step", "9"], "step-9 holds no checkpoint (there: step-2)"),
        ([str(trained), "--set", "sums"], "--set sums, expected NAME=FILE"),
        ([str(trained), "--set", "a=nope.jsonl"], "nope.jsonl does not exist, expected a file"),
        ([str(trained), "--n", "4", "--temperature", "0"], "4 with temperature 0, expected 1"),
        (
            [str(trained), "lora.rank=4", "lora.alpha=8", "lora.targets=[o_proj]"],
            "saved plan, expected the model of the weights. Leave that override out",
        ),
    ):
        assert evaluate.main(arguments) != 0
        assert problem in capsys.readouterr().err
    shutil.copy(CONFIG.parent / "tiny" / "config.json", tmp_path)
    assert evaluate.main([str(tmp_path)]) == 1
    assert "has no plan, expected --config FILE" in capsys.readouterr().err
