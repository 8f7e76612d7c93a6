"""The plan compiler: every problem at its line, only ConfigError, and a plan that is right."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.compile import draft_of
from pyrl_ext.plan.forecast.memory import logits_bytes, stage_memory
from pyrl_ext.plan.language.yaml_tree import read
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.rules import RULES, check
from pyrl_ext.plan.show.summary import facts
from tests.helpers.configs import REPOSITORY, SMALL, TINY, problems_of

pytestmark = pytest.mark.multiprocess

COUNTDOWN = REPOSITORY / "configs/tiny.yaml"
BROKEN = sorted((REPOSITORY / "tests/plan/broken_configs").glob("*.yaml"))
GLM47 = REPOSITORY / "configs/glm47/config.json"
ROUNDED = "logprob.accept_rounded_logits=true"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)  # messages show paths from here


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest YAML that compiles, next to the tiny model's sizes."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(TINY.read_text())
    (folder / "small.yaml").write_text(SMALL)
    return folder / "small.yaml"


# Problems --------------------------------------------------------------------------------------


def expected_problems(path: Path) -> list[str]:
    """`# error: text` in a file expects that problem on the next line that is no such comment."""
    expected = []
    waiting = []
    lines = [*path.read_text().split("\n"), ""]
    for number, line in enumerate(lines, start=1):
        if line.startswith("# error: "):
            waiting.append(line.removeprefix("# error: "))
            continue
        expected += [f"{path.relative_to(REPOSITORY)}:{number}: {text}" for text in waiting]
        waiting = []
    return expected


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_compile_plan_reports_the_problems_that_a_broken_config_names(path: Path):
    expected = expected_problems(path)
    assert expected, "the file says what is wrong with it"
    assert problems_of(path.relative_to(REPOSITORY)) == expected


def test_check_finds_every_rule_broken_by_a_config():
    left = {rule.__name__ for _, rule in RULES}
    assert len(left) == len(RULES), "every rule has another name"
    for path in BROKEN:
        left -= broken_rules(path)
    assert not left, "rules that no file of broken_configs breaks"
    assert len(BROKEN) >= 80


def broken_rules(path: Path) -> set[str]:
    """Names of the rules that the plan of `path` breaks, found as `compile_plan` finds them."""
    draft = draft_of(read(path))
    return {rule.__name__ for key, rule in RULES if [*check(draft, [(key, rule)])]}


def test_compile_plan_reports_all_problems_at_once(tmp_path: Path):
    path = tmp_path / "many.yaml"
    path.write_text(
        SMALL.replace("config.json", str(TINY)).replace("steps: 10", 'steps: "10"')
        + "parallel:\n  tp: 3\n  pp: true\n  zp: 1\n"
    )
    found = problems_of(path, "batching.prompts=3", "batching.minibatches=2", "lr=1", "seed=-1")
    places = [re.match(r"(?:command line|.*:\d+): [^:]*", line) for line in found]
    assert [place and place[0].replace(f"{path}:", "") for place in places] == [
        "command line: lr=1",
        "command line: seed=-1",
        "command line: batching.minibatches=2",
        "2: steps",
        "10: parallel.tp",
        "10: parallel.tp",
        "9: parallel.etp",
        "11: parallel.pp",
        "12: parallel.zp",
    ] or found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tpp=2", "unknown key. Did you mean parallel.tp?"),
        ("tp=2", "unknown key here. Did you mean parallel.tp or rollout.tp?"),
        ("xyz=2", "unknown key, expected one of device, threads, seed"),
        ("parallel.tp", "not an override, expected section.key=value"),
        ("=2", "not an override"),
        ("parallel..tp=2", "not an override"),
        ("parallel.tp=", "no value, expected section.key=value. Write null for none"),
        ("parallel=2", "parallel is a section, expected one of its keys"),
        ("steps.a=2", "steps is a single value, expected steps=value"),
        ("parallel.tp.a=2", "parallel.tp has no keys, expected parallel.tp=value"),
        ("parallel.tp=[", "not YAML"),
        ("parallel.tp='2'", "'2' is text, expected a whole number"),
        ("parallel.tp=3", "3 does not divide num_attention_heads 4"),
        ("replay=3", "3 is a whole number, expected a mapping of source, old, reference, train"),
        ("data.task_options={a: 1, a: 2}", "data.task_options.a: repeated"),
        ("log.progress=&a on", "not YAML: anchor, alias or tag"),
    ],
)
def test_compile_plan_refuses_an_override_by_its_text(small: Path, override: str, message: str):
    assert problems_of(small, override)[0].startswith(f"command line: {override}: {message}")


HUGE = [10**9, 10**18, 10**30, 10**400]
ENUMERATED = [
    *(f"parallel.{name}" for name in ("dp", "tp", "pp", "cp", "vpp", "ep", "etp", "dynamic_cp")),
    "parallel.num_layers_in_first_pipeline_stage",
    "batching.prompts",
    "parallel.num_layers_in_last_pipeline_stage",
    "batching.samples_per_prompt",
]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{len(str(value))} digits")
@pytest.mark.parametrize("key", ENUMERATED)
def test_compile_plan_refuses_what_it_could_not_enumerate(small: Path, key: str, value: int):
    """Its own field or section says so, before any rule that would count up to it."""
    found = problems_of(small, f"{key}={value}")
    section = key.split(".")[0]
    assert all(line.startswith((f"command line: {key}", f"{small}")) for line in found)
    assert any("expected at most" in line and section in line for line in found)


@pytest.mark.parametrize("override", ["optimizer.lr=1e300", "rollout.temperature=5e-324"])
def test_compile_plan_refuses_numbers_that_float32_does_not_hold(small: Path, override: str):
    (found,) = problems_of(small, override)
    assert found.startswith(f"command line: {override}: ")


def test_compile_plan_refuses_a_repeated_override(small: Path):
    found = problems_of(small, "parallel.dp=2", "parallel.dp=2")
    expected = "repeats parallel.dp=2, expected each key once"
    assert found == [f"command line: parallel.dp=2: {expected}"]


def test_compile_plan_applies_overrides(small: Path):
    plan = compile_plan(
        small, ["parallel.dp=2", "optimizer.lr=2e-4", "replay=off", "data.task_options.length=5"]
    )
    assert (plan.world_size, plan.optimizer.lr, plan.replay.enabled) == (2, 2e-4, False)
    assert plan.data.task_options == {"length": 5}
    assert compile_plan(small, ["replay.train=false"]).replay.old is True
    # an override may fix what the file has wrong
    assert compile_plan(small, ["model.tokenizer=a/b"]).tokenizer_path == "a/b"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory, expected a YAML file"),
        (b"", "1: empty, expected sections"),
        (b"# nothing\n", "1: empty, expected sections"),
        (b"- 1\n", "1: a list, expected a mapping of sections"),
        (b"device: \xff\n", "1: not UTF-8 text"),
        (b"device: cpu\nrun: a\x07b\n", "2: not YAML: character"),
        (b"seed: " + b"9" * 5000, "1: seed: not a value"),
        (b"seed: " + b"[" * 3000, "1: nested too deeply"),
        (b"run: *a\n", "1: not YAML"),
    ],
)
def test_compile_plan_refuses_a_file_that_cannot_be_read(
    tmp_path: Path, content: bytes | None, message: str
):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    assert problems_of(path)[0].startswith(f"{path}:{'' if content is not None else ' '}{message}")


def test_compile_plan_reports_only_overrides_beside_a_missing_file(tmp_path: Path):
    found = problems_of(tmp_path / "none.yaml", "steps=3", "tp=2")
    assert [line.rpartition(": ")[2][:12] for line in found] == ["No such file", "unknown key "]


def test_compile_plan_refuses_a_folder(tmp_path: Path):
    assert problems_of(tmp_path) == [f"{tmp_path}: Is a directory, expected a YAML file"]


def test_compile_plan_says_how_a_saved_plan_is_resumed(tmp_path: Path):
    saved = tmp_path / "plan.json"
    saved.write_text(compile_plan(COUNTDOWN, ["run=runs/mine"]).to_json())
    command = f"To resume the run: pyrl train {os.path.relpath(COUNTDOWN)} run=runs/mine"
    assert problems_of(tmp_path) == [f"{tmp_path}: Is a directory, expected a YAML file. {command}"]
    assert problems_of(saved) == [
        f"{saved}: the plan of a run, expected the YAML file that it was made from. {command}"
    ]
    saved.write_text("{}")
    assert problems_of(saved)[0] != problems_of(tmp_path)[0]
    assert "resume" not in str(problems_of(saved) + problems_of(tmp_path))


def test_compile_plan_names_the_file_that_was_meant(tmp_path: Path):
    config = tmp_path / "mine.yaml"
    config.write_text("extends: bass.yaml\n")
    (tmp_path / "base.yaml").write_text("steps: 1\n")
    (found,) = problems_of(config)
    assert found.endswith(f", expected a YAML file. Did you mean {tmp_path / 'base.yaml'}?")
    assert problems_of(tmp_path / "mime.yaml")[0].endswith(f". Did you mean {config}?")
    assert problems_of(tmp_path / "other.yaml")[0].endswith("expected a YAML file")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = (
        "data.task=null",
        "data.task_options={}",
        "data.reward=pyrl_ext.data.rewards:exact_match",
    )
    (found,) = problems_of(COUNTDOWN, *data, f"data.prompts={tmp_path}/sum.jsonl")
    assert found.endswith(f"Did you mean {tmp_path / 'sums.jsonl'}?")
    (tmp_path / "weights").mkdir()
    (found,) = problems_of(COUNTDOWN, f"model.weights={tmp_path}/wieghts")
    assert found.endswith(f"or a hub id. Did you mean {tmp_path / 'weights'}?")


def test_compile_plan_sets_keys_of_a_section_that_is_null(tmp_path: Path):
    config = tmp_path / "mine.yaml"
    config.write_text(f"extends: {COUNTDOWN}\nlora: null\n")
    plan = compile_plan(config, ["lora.rank=4", "lora.alpha=8"])
    assert plan.lora is not None and (plan.lora.rank, plan.lora.alpha) == (4, 8)
    assert compile_plan(config).lora is None


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("optimizer.lr='1e-6'", "Write 1e-6 without quotes"),
        ("steps='16'", "Write 16 without quotes"),
        ("steps='010'", "steps of the run"),
        ("steps=many", "steps of the run"),
    ],
)
def test_compile_plan_says_that_a_number_needs_no_quotes(override: str, advice: str):
    (found,) = problems_of(COUNTDOWN, override)
    assert " is text, expected a " in found and found.endswith(advice)


# The plan ----------------------------------------------------------------------------------------


def test_compile_plan_derives_sizes_and_paths(small: Path):
    plan = compile_plan(small, ["parallel.dp=2", "parallel.tp=2", "parallel.cp=2", "parallel.ep=4"])
    assert (plan.world_size, plan.samples, plan.samples_per_minibatch) == (8, 8, 8)
    assert (plan.row_alignment, plan.max_rows) == (8, 16)  # 2 * cp * tp; 8 + 4 - 1 rows
    assert plan.parallel.etp_size == 2
    assert plan.router_layers == (1, 2, 3)
    assert plan.rollout_dtype == "float32"
    assert plan.hf == json.loads(TINY.read_text())
    assert plan.source == str(small)
    assert plan.config_path == str(small.parent / "config.json")
    assert plan.weights_path is None and plan.tokenizer_path == "owner/name"
    assert plan.unsupported == ()
    there = plan.model_copy(update={"fetched": {"owner/name": "/cache/words"}})
    assert there.tokenizer_path == "/cache/words" and there.fingerprint == plan.fingerprint


def test_compile_plan_fills_in_defaults(small: Path):
    plan = compile_plan(small)
    assert plan.replay.old and plan.replay.reference and plan.replay.train
    assert plan.optimizer.betas == (0.9, 0.98)
    assert not plan.model.mtp and plan.rollout.top_p == 1.0


def test_plan_refuses_assignment(small: Path):
    plan = compile_plan(small)
    with pytest.raises(ValidationError, match="frozen"):
        plan.parallel.tp = 2
    with pytest.raises(ValidationError, match="frozen"):
        plan.steps = 2


def test_plan_paths_of_local_folders_are_absolute(small: Path, tmp_path: Path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words/tokenizer.json").write_text("{}")
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "1+2="}')
    path = tmp_path / "x.yaml"
    text = SMALL.replace("config.json", str(TINY)).replace("owner/name", "words")
    path.write_text(text.replace("task: copy", "prompts: numbers.jsonl, reward: posixpath:join"))
    plan = compile_plan(path)
    assert plan.tokenizer_path == str(tmp_path / "words")
    assert plan.resolve(str(plan.data.prompts)) == str(tmp_path / "numbers.jsonl")
    assert plan.data.eval_prompts is None


def test_read_returns_the_plan_that_was_saved(small: Path, tmp_path: Path):
    plan = compile_plan(small, ["data.task_options={length: 3}", "parallel.vpp=2", "parallel.pp=2"])
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    assert Plan.read(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text('{"steps": 3}')
    with pytest.raises(ConfigError, match=r"plan\.json: not a plan of this version: device"):
        Plan.read(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="No such file"):
        Plan.read(tmp_path / "none.json")


def test_check_resumes_names_what_may_not_change(small: Path):
    saved = compile_plan(small)
    free = ["steps=99", "log.tensorboard=on", "checkpoint.keep=9", "evaluate.every=3", "run=b"]
    free += ["parallel.tp=2", "optimizer.distributed=on", "model.recompute=full", "device=cuda"]
    free += ["batching.tokens_per_microbatch=4096"]
    assert compile_plan(small, free).diff(saved) == ()
    compile_plan(small, free).check_resumes(saved)
    other = compile_plan(small, [*free, "seed=7", "optimizer.betas=[0.9, 0.99]"])
    assert [tuple(d) for d in other.diff(saved)] == [
        ("seed", 0, 7),
        ("optimizer.betas", [0.9, 0.98], [0.9, 0.99]),
    ]
    with pytest.raises(ConfigError) as caught:
        other.check_resumes(saved)
    assert str(caught.value).splitlines()[0] == (
        f"{small}: seed: 7 now, 0 in the saved plan, expected the same to resume; "
        "it orders the records and draws the samples of all steps"
    )


def test_diff_names_the_key_of_the_hf_config(small: Path):
    saved = compile_plan(small)
    path = small.with_name("config.json")
    text = path.read_text()
    try:
        path.write_text(text.replace("10000.0", "1000000.0"))
        assert [d.name for d in compile_plan(small).diff(saved)] == [
            "hf.rope_parameters.rope_theta"
        ]
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ((), "model.weights is null: training starts from random weights"),
        (("replay={old: true, train: false}",), "replay.old and replay.train differ"),
    ],
)
def test_notes_name_what_a_reader_may_not_expect(small: Path, overrides: tuple, note: str):
    assert any(note in found for found in compile_plan(small, overrides).notes)
    if overrides:
        assert not any(note in found for found in compile_plan(small).notes)


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "changes"), [(TINY, {}), (TINY, {"q_lora_rank": None}), (GLM47, {})]
)
def test_parameters_are_those_that_transformers_counts(path: Path, changes: dict):
    torch = pytest.importorskip("torch")
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    hf = json.loads(path.read_text()) | changes
    with torch.device("meta"):
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**hf))
    assert parameters(read_sizes(hf)).total == sum(p.numel() for p in model.parameters())


def test_read_sizes_of_the_tiny_config_suit_every_engine():
    hf = json.loads(TINY.read_text())
    sizes = read_sizes(hf)
    assert sizes.hidden_size % 32 == 0
    # what vLLM's CPU attention accepts
    assert sizes.qk_nope_head_dim + sizes.qk_rope_head_dim in (32, 64, 80, 96, 112, 128)
    from transformers import Glm4MoeLiteConfig

    config = Glm4MoeLiteConfig(**hf)
    assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, 2)
    assert config.mlp_layer_types == ["dense", "sparse", "sparse", "sparse"]


def test_read_sizes_of_glm47_are_the_published_ones():
    from transformers import Glm4MoeLiteConfig

    ours = json.loads(GLM47.read_text())
    theirs = Glm4MoeLiteConfig()
    special = {"architectures", "dtype", "rope_parameters", "pad_token_id", "eos_token_id"}
    named = {
        key: getattr(theirs, key) for key in ours if key not in special and hasattr(theirs, key)
    }
    assert {key: ours[key] for key in named} == named
    counts = parameters(read_sizes(ours))
    assert round(counts.total / 1e9, 1) == 29.9 and round(counts.active / 1e9, 1) == 3.9


def bytes_of(path: Path, *overrides: str) -> dict[str, int]:
    (stage,) = stage_memory(compile_plan(path, overrides))
    return {item.name: item.bytes for item in stage.items}


def test_stage_memory_is_what_a_hand_computes(small: Path):
    count = parameters(read_sizes(json.loads(TINY.read_text()))).total
    whole = bytes_of(small)
    assert [whole[x] for x in ("weights", "gradients", "optimizer")] == [
        4 * count, 4 * count, 8 * count
    ]  # fmt: skip
    spread = bytes_of(small, "parallel.dp=2", "optimizer.distributed=true")
    assert (spread["weights"], spread["optimizer"]) == (4 * count, 4 * count)
    half = bytes_of(small, "model.dtype=bfloat16", "objective.kl_coef=0.1")
    assert [half[x] for x in ("weights", "optimizer", "reference")] == [
        2 * count, 12 * count, 2 * count
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("logprob.head=logits",), 128 * 4),
        (("logprob.head=logits", "model.dtype=bfloat16", ROUNDED), 128 * 2),
        (("logprob.head=logits", "parallel.tp=2"), 64 * 4),
        ((), 128 * 4),
        (("model.dtype=bfloat16",), 128 * 6),
        (("logprob.cache_bytes=1000000000",), 128 * (4 + 2)),
        (("logprob.loss_in_chunk=true",), 128 * (4 + 4)),  # 64 tokens, 64 wide
    ],
)
def test_logits_bytes_of_a_microbatch(small: Path, overrides: tuple[str, ...], expected: int):
    plan = compile_plan(small, overrides)
    assert plan.sizes.vocab_size == 128
    rows = plan.batching.tokens_per_microbatch
    assert logits_bytes(plan, rows) == expected * rows


def test_logits_bytes_are_at_most_chunk_and_cache(small: Path):
    chosen = ["logprob.chunk_bytes=1000", "logprob.cache_bytes=300"]
    plan = compile_plan(small, chosen)
    assert logits_bytes(plan, plan.batching.tokens_per_microbatch) == 1300


# The command -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "glm47"])
def test_compile_plan_takes_the_shipped_configs(name: str):
    plan = compile_plan(f"configs/{name}.yaml")
    assert any("is a hub id" in each for each in plan.notes) == (name == "glm47")
    assert plan.unsupported == () or name == "glm47"


def test_main_prints_tables_and_json(small: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(small), "parallel.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name, _ in facts(compile_plan(small)))
    assert "[ranks]" in shown  # units are not taken for markup
    assert main([str(small), "--json", "steps=3"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == compile_plan(small, ["steps=3"])


def test_main_prints_a_problem_a_line(small: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(small), "parallel.tp=3", "stepss=3"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.splitlines() == problems_of(small, "parallel.tp=3", "stepss=3")


def test_compile_plan_refuses_a_named_pipe_and_reads_an_open_one(tmp_path: Path):
    """Opening a named pipe waits until somebody writes to it."""
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml: Not a regular file, expected a YAML file"):
        compile_plan(tmp_path / "pipe.yaml")
    read, write = os.pipe()
    os.write(write, b"steps: many\n")
    os.close(write)
    with pytest.raises(ConfigError, match="steps: 'many' is text, expected a whole number"):
        compile_plan(f"/dev/fd/{read}")
    os.close(read)
