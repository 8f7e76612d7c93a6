"""`python -m pyrl_ext.train`, as a user runs it: learning, resuming, several ranks, bad input."""

import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyrl_ext import train
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.recordings import load_samples, save_samples
from pyrl_ext.metrics.sinks import read_rows
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.rollout.rollouts import Rollouts
from pyrl_ext.tools.doctor_checks import checkpoint_bytes
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights import check
from tests.helpers import browser, teachers
from tests.helpers.deadline import DEADLINE
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers
from tests.helpers.run_pages import opened, page_of
from tests.helpers.teacher_server import TeacherServer
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]


def run(folder, *overrides):
    """Exit code of the command in this process."""
    return train.main([str(CONFIG), *arguments(folder, *overrides)])


def arguments(folder, *overrides):
    named = {o.split("=")[0] for o in overrides}
    quick = [o for o in QUICK if o.split("=")[0] not in named]
    return [f"run={folder}", *quick, *overrides]


def test_train_resumed_has_the_numbers_of_a_run_that_never_stopped(tmp_path):
    common = ("evaluate.every=2", "checkpoint.every=2", "batching.minibatches=2")
    assert run(tmp_path / "whole", "steps=5", *common) == 0
    assert run(tmp_path / "parts", "steps=3", *common) == 0
    assert run(tmp_path / "parts", "steps=5", *common) == 0
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    assert (tmp_path / "whole/report.png").stat().st_size > 10_000
    plan = compile_plan(CONFIG, arguments(tmp_path / "whole", "steps=5", *common))
    assert (tmp_path / "whole/plan.json").read_text() == plan.to_json()  # what `--json` prints
    (tensors,) = (tmp_path / "whole/checkpoints/step-5").glob("*.distcp")
    # numbers alone: the names of so small a model take a tenth more
    assert 1 <= tensors.stat().st_size / checkpoint_bytes(plan) < 1.12


def test_train_resumes_with_more_prompts_than_are_kept(tmp_path):
    """The first four groups of seven, of responses that end at stop strings, are trained on."""
    common = ("rollout.oversample=1.75", 'rollout.stop=["1", "3", "2b"]', "evaluate.every=0")
    assert run(tmp_path / "whole", "steps=3", *common) == 0
    assert run(tmp_path / "parts", "steps=1", *common) == 0
    assert run(tmp_path / "parts", "steps=3", *common) == 0
    rows = numbers(tmp_path / "whole")
    assert rows == numbers(tmp_path / "parts")
    assert all(row["rollout/aborted_groups"] == 3 for row in rows)
    assert any(row["rollout/aborted_tokens"] > 0 for row in rows)
    assert all(row["rollout/response_len"] < 6 for row in rows)


def test_train_repeats_the_steps_lost_in_a_crash(tmp_path):
    assert run(tmp_path / "whole", "steps=4", "checkpoint.every=2") == 0
    assert run(tmp_path / "crashed", "steps=3", "checkpoint.every=2") == 0
    import shutil

    shutil.rmtree(tmp_path / "crashed/checkpoints/step-3")  # as if step 2 had never been saved
    with (tmp_path / "crashed/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')
    assert run(tmp_path / "crashed", "steps=4", "checkpoint.every=2") == 0
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "crashed")


def test_train_checks_the_first_batch_after_a_resume(tmp_path, monkeypatch, capsys):
    """Trainer and engine differ in rounding, which a limit of 0 does not allow."""
    assert run(tmp_path, "steps=1", "evaluate.every=0") == 0
    monkeypatch.setattr(check, "FLOAT32_LIMIT", 0.0)
    assert run(tmp_path, "steps=2", "evaluate.every=0") == 1
    assert "step 1" in (error := capsys.readouterr().err) and "mean" in error
    assert [row["step"] for row in numbers(tmp_path)] == [0]


def test_train_refuses_another_plan_in_the_same_folder(tmp_path, capsys):
    assert run(tmp_path, "steps=1") == 0
    assert run(tmp_path, "steps=2", "optimizer.lr=0.5") == 2
    assert "optimizer.lr: 0.5 now, 0.003 in the saved plan" in capsys.readouterr().err


def wait_for_rows(process, lines, count):
    deadline = time.monotonic() + DEADLINE
    while not (lines.exists() and lines.read_text().count("\n") >= count):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def test_train_saves_on_ctrl_c_and_the_same_command_resumes(tmp_path):
    command = [sys.executable, "-m", "pyrl_ext.train", str(CONFIG), f"run={tmp_path}", *QUICK]
    command += ["steps=10000", "checkpoint.every=0", "evaluate.every=0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = tmp_path / "metrics.jsonl"
    wait_for_rows(process, lines, 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    done = len(read_rows(lines))
    assert f"stopped after step {done}" in output
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{done}"]
    more = ("checkpoint.every=0", "evaluate.every=0")
    assert run(tmp_path, f"steps={done + 1}", *more) == 0
    assert [row["step"] for row in read_rows(lines)] == list(range(done + 1))


def test_train_with_a_reference_policy_starts_equal_and_parts(tmp_path):
    """KL to the initial policy: nothing at the first step, something once the policy moved."""
    options = ("objective.kl_coef=0.1", "batching.minibatches=1", "log.tensorboard=true")
    assert run(tmp_path, *options, "steps=3", "evaluate.every=0") == 0
    first, *later = numbers(tmp_path)
    assert first["policy/ref_kl"] == pytest.approx(0, abs=1e-9)
    assert all(row["policy/ref_kl"] > 1e-6 for row in later)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_train_resumes_between_refreshes_of_the_reference_to_the_bit(tmp_path, capsys):
    """Steps 2 and 4 refresh it; the checkpoint after step 2 holds the weights of before it."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    common = ("objective.kl_coef=0.1", "batching.minibatches=1", "evaluate.every=0")
    every = (*common, "objective.reference_refresh=2")
    assert run(whole, *every, "steps=5", "checkpoint.every=3") == 0
    assert capsys.readouterr().out.count("the reference takes the policy's weights") == 2
    assert run(parts, *every, "steps=3") == 0
    plan = compile_plan(CONFIG, arguments(parts, *every, "steps=3"))
    (tensors,) = (parts / "checkpoints/step-3").glob("*.distcp")
    assert 1 <= tensors.stat().st_size / checkpoint_bytes(plan) < 1.12
    assert run(parts, *every, "steps=5") == 0
    rows = numbers(parts)
    assert rows == numbers(whole)
    found = [row["policy/ref_kl"] for row in rows]
    assert found[0] == found[2] == found[4] == 0 and min(found[1], found[3]) > 1e-6
    capsys.readouterr()
    allow = "resume_allow=[objective.reference_refresh]"
    assert run(parts, *common, "steps=6", allow) == 0  # the initial weights are further away
    assert "step-5 holds is not used; the KL, if there is one," in capsys.readouterr().out
    assert numbers(parts)[5]["policy/ref_kl"] > 2 * found[3]
    assert run(parts, *common, "steps=8", "objective.reference_refresh=7", allow) == 0
    assert "step-6 holds no reference: it is model.weights until step 7" in capsys.readouterr().out
    *_, before, after = numbers(parts)
    assert before["policy/ref_kl"] > 2 * found[3] and after["policy/ref_kl"] == 0


def test_train_with_replay_brings_a_bf16_engine_and_trainer_together(tmp_path):
    """The same weights and samples: without replay some routers disagree with the engine."""
    common = ("model.dtype=bfloat16", "steps=1", "evaluate.every=0", "batching.prompts=32")
    assert run(tmp_path / "on", *common) == 0
    assert run(tmp_path / "off", *common, "replay=off") == 0
    (on,), (off,) = numbers(tmp_path / "on"), numbers(tmp_path / "off")
    assert on["reward"] == off["reward"] and 0.9 < on["route/agree_topk"] < 1
    for name in ("mismatch/k3", "mismatch/abs_mean"):
        assert 0 < on[name] < off[name], name


def test_train_goes_on_where_no_response_is_trained_on(tmp_path, capsys):
    """All responses are cut off at two tokens and filtered, but for those that stop at once."""
    cut = ("rollout.max_new_tokens=2", "objective.overlong_filter=true", "evaluate.every=1")
    assert run(tmp_path, *cut, "steps=2", "batching.prompts=2", "batching.minibatches=2") == 0
    rows = numbers(tmp_path)
    skipped = [row["policy/skipped_updates"] for row in rows[:2]]
    assert sum(skipped) > 0
    shown = capsys.readouterr().out
    assert shown.count("has no loss tokens, no update") == sum(skipped)
    assert "optimizer: torch.AdamW\n" in shown


def test_train_reports_the_norm_without_clipping(tmp_path):
    assert run(tmp_path, "optimizer.clip_grad=0", "steps=1", "evaluate.every=0") == 0
    assert numbers(tmp_path)[0]["grad_norm"] > 0


def test_train_takes_an_engine_of_another_dtype(tmp_path):
    assert run(tmp_path, "rollout.dtype=bfloat16", "steps=1", "evaluate.every=0") == 0
    assert 1e-5 < numbers(tmp_path)[0]["mismatch/abs_mean"] < 0.05


# several ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Three steps of real rollouts (of the initial weights, of other prompts each step)."""
    folder = tmp_path_factory.mktemp("recorded")
    plan = tiny_plan(*QUICK)
    with topology.start(plan) as topo:
        rollouts = Rollouts(plan, topo, build_source(plan))
        weights = list(Policy.build(plan, topo).weights())
        for step in range(3):
            rollouts.engine.load_weights(weights, version=step)
            save_samples(folder / f"step-{step}.safetensors", rollouts.train(step).samples)
    return folder


def on_rank(_group, folder, *overrides):
    os.environ["WORLD_SIZE"] = "2"
    assert run(folder, *overrides) == 0


@pytest.fixture(scope="module")
def replayed(recording):
    """The rows of three steps on the recording by one process, and its overrides."""
    overrides = ("rollout.engine=recorded", f"rollout.path={recording}", "evaluate.every=0")
    overrides += ("batching.epochs=2", "objective.kl_coef=0.1", "objective.reference_refresh=2")
    assert run(recording.parent / "one", "steps=3", *overrides) == 0
    return numbers(recording.parent / "one"), ("steps=3", *overrides)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2"])
def test_train_on_two_ranks_equals_one(layout, replayed, tmp_path):
    of_one, overrides = replayed
    run_ranks(on_rank, 2, tmp_path / "two", f"parallel.{layout}", *overrides)
    for one, two in zip(of_one, numbers(tmp_path / "two"), strict=True):
        assert one["reward"] == two["reward"]
        for name in ("loss", "grad_norm", "policy/entropy", "policy/ref_kl", "mismatch/abs_mean"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), (name, one["step"])


TAUGHT = ("parallel.dp=2 parallel.ep=2", "parallel.tp=2", "parallel.pp=2", "parallel.cp=2")


COMPARED = ("objective.distill=js", "objective.distill_share=0.3")


def on_ranks_with_a_teacher(_group, folder, *overrides):
    os.environ["WORLD_SIZE"] = "2"
    for layout in TAUGHT:
        assert run(folder / layout, *layout.split(), *overrides) == 0
        assert run(folder / f"js {layout}", *layout.split(), *overrides, *COMPARED) == 0
    assert run(folder / "two of two stages", "parallel.pp=2", *two_teachers(folder)) == 0
    assert run(folder / "deep of two stages", "parallel.pp=2", *deep_teacher(folder)) == 0


def deep_teacher(folder):
    """A teacher of seven layers: two stages have four and three of them."""
    return (
        f"teacher.model={folder / 'deep'}",
        "objective.distill_coef=0.5",
        "objective.distill=reverse",
        "steps=1",
        "evaluate.every=0",
    )


def two_teachers(folder):
    dense, sparse = folder / "teacher", folder / "sparse"
    sources = f"{{one: {{task: copy, teacher: {dense}}}, two: {{task: sort, teacher: {sparse}}}}}"
    return (
        f"data.sources={sources}",
        "data.task=null",
        "data.task_options={}",
        "objective.distill_coef=0.5",
        "steps=1",
        "evaluate.every=0",
    )


def test_train_with_a_teacher_is_the_same_in_every_layout(recording, tmp_path):
    """A dense teacher, whose ranks have no experts to spread."""
    teachers.write_dense(tmp_path / "teacher")
    teachers.write_sparse(tmp_path / "sparse")
    teachers.write_dense(tmp_path / "deep", num_hidden_layers=7)
    assert run(tmp_path / "two", *two_teachers(tmp_path)) == 0
    assert run(tmp_path / "deep of one", *deep_teacher(tmp_path)) == 0
    overrides = ("rollout.engine=recorded", f"rollout.path={recording}", "evaluate.every=0")
    overrides += (f"teacher.model={tmp_path / 'teacher'}", "objective.distill_coef=0.5", "steps=2")
    assert run(tmp_path / "one", *overrides) == 0
    assert run(tmp_path / "js", *overrides, *COMPARED) == 0
    run_ranks(on_ranks_with_a_teacher, 2, tmp_path, *overrides)
    of_one = numbers(tmp_path / "one")
    assert all(row["policy/teacher_kl"] > 0.1 for row in of_one)
    for layout in TAUGHT:
        for one, two in zip(of_one, numbers(tmp_path / layout), strict=True):
            for name in ("loss", "grad_norm", "policy/teacher_kl"):
                assert two[name] == pytest.approx(one[name], rel=1e-4), (layout, name, one["step"])
    of_one = numbers(tmp_path / "js")
    assert all(row["policy/divergence"] > 0.01 for row in of_one)
    for layout in TAUGHT:
        for one, two in zip(of_one, numbers(tmp_path / f"js {layout}"), strict=True):
            for name in ("loss", "grad_norm", "policy/divergence"):
                assert two[name] == pytest.approx(one[name], rel=1e-4), (layout, name, one["step"])
    (one,), (two,) = numbers(tmp_path / "deep of one"), numbers(tmp_path / "deep of two stages")
    for name in ("loss", "grad_norm", "policy/divergence"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    (one,), (two,) = numbers(tmp_path / "two"), numbers(tmp_path / "two of two stages")
    of_sources = ("source/one/teacher_kl", "source/two/teacher_kl")
    for name in ("loss", "grad_norm", "policy/teacher_kl", *of_sources):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name


def on_ranks_with_servers(_group, folder, *overrides):
    os.environ["WORLD_SIZE"] = "2"
    for layout in TAUGHT:
        assert run(folder / layout, *layout.split(), *overrides) == 0


def test_train_with_a_teacher_on_servers_is_the_same_in_every_layout(recording, tmp_path):
    model = teachers.write_dense(tmp_path / "teacher")
    overrides = ("rollout.engine=recorded", f"rollout.path={recording}", "evaluate.every=0")
    overrides += (f"teacher.model={tmp_path / 'teacher'}", "objective.distill_coef=0.5", "steps=2")
    assert run(tmp_path / "one", *overrides) == 0
    with TeacherServer(model) as server:
        on_server = (*overrides, f"teacher.servers=[{server.address}]")
        run_ranks(on_ranks_with_servers, 2, tmp_path, *on_server)
        assert len(server.asked) == 2 * 16 * len(TAUGHT)
    of_one = numbers(tmp_path / "one")
    for layout in TAUGHT:
        for one, two in zip(of_one, numbers(tmp_path / layout), strict=True):
            for name in ("loss", "grad_norm", "policy/teacher_kl"):
                assert two[name] == pytest.approx(one[name], rel=1e-4), (layout, name, one["step"])


def on_ranks_without_a_server(_group, folder, *overrides):
    os.environ["WORLD_SIZE"] = "2"
    assert run(folder, "parallel.dp=2", *overrides) == 1


def test_train_saves_what_it_has_when_the_server_of_a_teacher_dies(recording, tmp_path):
    model = teachers.write_dense(tmp_path / "teacher")
    overrides = ("rollout.engine=recorded", f"rollout.path={recording}", "evaluate.every=0")
    overrides += (f"teacher.model={tmp_path / 'teacher'}", "objective.distill_coef=0.5", "steps=2")
    with TeacherServer(model) as server:
        server.answers = 16 + 8  # those of the first step, and half of the second one's
        on_server = (*overrides, f"teacher.servers=[{server.address}]")
        run_ranks(on_ranks_without_a_server, 2, tmp_path / "run", *on_server)
    assert (tmp_path / "run/checkpoints/step-1").is_dir()
    text = (tmp_path / "run/error.txt").read_text()
    assert "samples have no log-probs, expected at least one server that answers" in text
    with TeacherServer(model) as another:
        on_server = (*overrides, f"teacher.servers=[{another.address}]")
        assert run(tmp_path / "run", *on_server) == 0
    assert [row["step"] for row in numbers(tmp_path / "run")] == [0, 1]


def test_train_with_a_teacher_resumes(tmp_path):
    teachers.write_dense(tmp_path / "teacher")
    overrides = (f"teacher.model={tmp_path / 'teacher'}", "objective=opd", "evaluate.every=0")
    assert run(tmp_path / "whole", "steps=3", *overrides) == 0
    assert run(tmp_path / "parts", "steps=1", *overrides) == 0
    assert run(tmp_path / "parts", "steps=3", *overrides) == 0
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")


def test_train_refuses_replay_of_a_recording_without_routes(recording, tmp_path, capsys):
    for file in recording.iterdir():
        bare = [
            replace(s, routes=None, layer_ids=(), route_mask=torch.zeros_like(s.route_mask))
            for s in load_samples(file)
        ]
        save_samples(tmp_path / "bare" / file.name, bare)
    played = ("rollout.engine=recorded", f"rollout.path={tmp_path / 'bare'}", "steps=1")
    assert run(tmp_path / "on", *played, "evaluate.every=0") == 2  # before anything is built
    assert "routes" in capsys.readouterr().err
    assert run(tmp_path / "off", *played, "evaluate.every=0", "replay=off") == 0


def two_ranks(folder, *overrides):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [*command, "2", "-m", "pyrl_ext.train", str(CONFIG), f"run={folder}", *QUICK, *overrides]


def test_train_on_two_ranks_rolls_out_like_one_until_ctrl_c(tmp_path):
    """The same samples, up to a draw that rounding turns; one Ctrl-C saves once for all ranks."""
    endless = ("steps=10000", "checkpoint.every=0", "evaluate.every=0")
    command = two_ranks(tmp_path / "two", "parallel.dp=2", *endless)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    lines = tmp_path / "two/metrics.jsonl"
    wait_for_rows(process, lines, 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(timeout=DEADLINE)
    done = len(read_rows(lines))
    assert [p.name for p in (tmp_path / "two/checkpoints").iterdir()] == [f"step-{done}"]
    assert run(tmp_path / "one", "steps=2", "evaluate.every=0") == 0
    for one, two in zip(numbers(tmp_path / "one"), numbers(tmp_path / "two"), strict=False):
        assert two["reward"] == pytest.approx(one["reward"], abs=0.05)
        assert two["rollout/tokens"] == pytest.approx(one["rollout/tokens"], rel=0.1)


def test_train_takes_dp_from_torchrun_and_resumes_in_one_process(tmp_path, capsys):
    folder = tmp_path / "two"
    command = two_ranks(folder, "steps=1", "evaluate.every=0")
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE)
    assert Plan.read(folder / "plan.json").parallel.dp == 2
    assert run(folder, "steps=2", "evaluate.every=0") == 0
    assert "written under dp 2" in capsys.readouterr().out
    assert Plan.read(folder / "plan.json").parallel.dp == 1
    assert [row["step"] for row in numbers(folder)] == [0, 1]


def test_main_says_how_to_start_the_right_number_of_processes(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    assert run(folder, "parallel.dp=2") == 2
    assert capsys.readouterr().err == (
        f"{CONFIG}: parallel: dp 2 * tp 1 * pp 1 * cp 1 = 2 processes, but the run has 1. Start it "
        "with torchrun --nproc-per-node 2, or leave parallel.dp out or set parallel.dp=1\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert run(folder) == 2
    assert "WORLD_SIZE='two', expected a number" in capsys.readouterr().err
    assert not folder.exists()


def test_torchrun_ends_with_the_reason_for_refusing_a_run(tmp_path):
    command = two_ranks(tmp_path / "run", "parallel.dp=3")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    _, _, last = done.stderr.partition("Root Cause (first observed failure):")
    assert f"{CONFIG}: parallel: dp 3 * tp 1 * pp 1 * cp 1 = 3 processes, but the run has 2" in last


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_main_says_on_one_message_what_to_do_without_a_gpu(tmp_path, capsys):
    config = "configs/glm47.yaml"
    assert train.main([str(ROOT / config), f"run={tmp_path / 'run'}"]) == 2
    path = ROOT / config
    assert capsys.readouterr().err.splitlines() == [
        f"{path}: device: cuda, 8 x H200 wanted, but torch sees no GPU on this machine.",
        f"  To see what the run would need: pyrl plan {path}",
        "  To try the trainer on this machine: pyrl configs --copy tiny, then pyrl train "
        "configs/tiny.yaml",
    ]
    assert train.main([str(path), f"run={tmp_path / 'run'}", "device=cpu"]) == 2
    end = ". Its sizes are for 8 x H200; for a CPU: pyrl configs --copy tiny\n"
    assert capsys.readouterr().err.endswith(end)
    assert not (tmp_path / "run").exists()


# prompts from a file ------------------------------------------------------------------------------

FILE = ("data.task=null", "data.task_options={}", "data.prompts=data/arithmetic.jsonl")
REWARD = "data.reward=pyrl_ext.data.rewards:number_match"


def in_parts(prompt, text, tokens):
    return {"length": len(tokens) / 10, "digits": float(text.isdigit())}


def test_train_logs_and_records_components_of_the_reward(tmp_path):
    own = f"data.reward={__name__}:in_parts"
    assert run(tmp_path, *FILE, own, "steps=1", "evaluate.every=0", "rollout.record=kept") == 0
    (row,) = numbers(tmp_path)
    samples = load_samples(tmp_path / "kept/step-000000.safetensors")
    for name in ("length", "digits"):
        kept = [sample.components[name] for sample in samples]
        assert row[f"reward/{name}"] == pytest.approx(sum(kept) / len(kept))
    assert all(s.components["length"] == len(s.response) / 10 for s in samples)
    assert all(s.reward == sum(s.components.values()) for s in samples)
    assert row["reward"] == pytest.approx(row["reward/length"] + row["reward/digits"])
    page = page_of(tmp_path)
    assert "Recorded in step 0." in page and "times its share" in page
    if browser.find() is not None:
        found = opened(tmp_path, tmp_path)
        assert found["wrong"] == [] and found["drawn"] == found["charts"] > 40


def test_train_finds_a_reward_next_to_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the run adds the folder
    (tmp_path / "reward_next_to_config.py").write_text("def two(prompt, text, tokens): return 2\n")
    config = tmp_path / "mine.yaml"
    prompts = ROOT / "configs/data/arithmetic.jsonl"
    data = "{task: null, task_options: {}, reward: 'reward_next_to_config:two', prompts: %s}"
    config.write_text(f"extends: {CONFIG}\ndata: {data % prompts}\n")
    folder = tmp_path / "run"
    settings = arguments(folder, "steps=1", "evaluate.every=0")
    assert train.main([str(config), *settings]) == 0
    (row,) = numbers(folder)
    assert row["reward"] == 2.0


def test_train_takes_the_shipped_prompt_file(tmp_path):
    assert run(tmp_path, *FILE, REWARD, "steps=2", "evaluate.every=1") == 0
    rows = numbers(tmp_path)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(r["grad_norm"] > 0 for r in rows[:2]) and "eval_reward" in rows[2]


# bad input ----------------------------------------------------------------------------------------


def raises(prompt, text, tokens):
    raise KeyError("colour")


def exits(prompt, text, tokens):
    sys.exit()


def gradients_off(logprobs, entropy, fields):
    torch.set_grad_enabled(False)
    return logprobs.sum(), fields.loss_mask.sum(), {}


def not_a_number(prompt, text, tokens):
    return float("nan")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.tpp=2",), "parallel.tpp"),
        (("steps=many",), "steps"),
        (("batching.minibatches=3",), "3 does not divide"),
        (("parallel.tp=3",), "num_attention_heads"),
        (("rollout.max_new_tokens=0",), "max_new_tokens"),
        (("data.prompts=data/nowhere.jsonl",), "data.task"),
        ((*FILE, "data.reward=nowhere:fn"), "no module 'nowhere'"),
        ((*FILE, f"data.reward={__name__}:raises"), "raised KeyError: 'colour'"),
        (
            (*FILE, f"data.reward={__name__}:not_a_number"),
            "returned nan, expected a finite number",
        ),
        (
            (*FILE, f"data.reward={__name__}:exits"),
            "raised SystemExit (",
        ),
        (
            (f"objective.loss={__name__}:gradients_off",),
            "gradients_off': changed torch.is_grad_enabled() from True to False, expected it",
        ),
        (("objective.loss=nowhere:fn",), "no module 'nowhere'"),
    ],
)
def test_main_answers_bad_input_with_one_clear_error(overrides, message, tmp_path, capsys):
    assert run(tmp_path / "run", *overrides) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_main_names_a_missing_config(tmp_path, capsys):
    assert train.main([str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err


def test_main_names_broken_prompt_lines_before_a_model_is_built(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "2+2="', '{"prompt": ""}']
    prompts.write_text("\n".join(lines) + "\n")
    overrides = ("data.task=null", "data.task_options={}", f"data.prompts={prompts}", REWARD)
    assert run(tmp_path / "run", *overrides) == 2
    error = capsys.readouterr().err
    assert f"{prompts}:2" in error and f"{prompts}:3" in error
    assert not (tmp_path / "run/metrics.jsonl").exists()


def with_small_files(_group, folder, *overrides):
    """Exit code and stderr of the command where a file holds 50 kB at most."""
    os.environ["WORLD_SIZE"] = "1"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(folder, *overrides)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return code, said.getvalue()


def test_train_leaves_no_half_checkpoint_on_a_full_disk(tmp_path):
    """A file size limit stops the writing of the second checkpoint as a full disk does."""
    overrides = ["evaluate.every=0", "checkpoint.every=1", "checkpoint.keep=5"]
    assert run(tmp_path, "steps=1", *overrides) == 0
    ((code, said),) = run_ranks(with_small_files, 1, tmp_path, "steps=2", *overrides)
    assert code == 1, said
    assert re.search(
        r"step-2 could not be written \(rank 0: .*; [\d.]+ [KMGT]iB free on its disk", said
    )
    assert "the same command resumes from " in said
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert run(tmp_path, "steps=2", *overrides) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_on_a_gpu_gives_the_numbers_of_the_cpu(dtype, recording, tmp_path):
    common = ("rollout.engine=recorded", f"rollout.path={recording}", f"model.dtype={dtype}")
    assert run(tmp_path / "cpu", *common, "steps=3", "evaluate.every=0") == 0
    code = "import sys; from pyrl_ext import train; sys.exit(train.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(CONFIG), f"run={tmp_path / 'gpu'}", *QUICK, *common]
    command += ["device=cuda", "steps=3", "evaluate.every=0"]
    subprocess.run(command, cwd=ROOT, check=True)
    close = 1e-4 if dtype == "float32" else 3e-2
    for cpu, gpu in zip(numbers(tmp_path / "cpu"), numbers(tmp_path / "gpu"), strict=True):
        assert gpu["loss"] == pytest.approx(cpu["loss"], abs=close)
        assert gpu["policy/entropy"] == pytest.approx(cpu["policy/entropy"], rel=close)
