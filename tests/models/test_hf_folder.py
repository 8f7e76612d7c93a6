"""Checkpoint folders: what is read, what is written, and what is refused."""

import json
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pyrl_ext import train
from pyrl_ext.models import weight_table
from pyrl_ext.models.hf_folder import (
    INDEX,
    SafetensorsFolder,
    save_checkpoint_hf,
    written_config,
)
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.tools import export
from tests.helpers import passes
from tests.helpers.configs import hf_of, write_sizes
from tests.helpers.models import (
    DEEPSEEK,
    GLM,
    HF,
    QWEN3_SMALL,
    exact_logprobs,
    plan_of,
    write_model,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

TOKENIZER = CONFIG.parent / "tiny"
LITE = hf_of()
FAMILIES = {
    "glm4_moe_lite": LITE,
    "glm4_moe": GLM | {"num_hidden_layers": 4},
    "deepseek_v3": DEEPSEEK | {"num_hidden_layers": 4},
    "qwen3_moe": HF,
    "qwen3": QWEN3_SMALL,
}
MODELS = FAMILIES | {
    "odd vocabulary": LITE | {"vocab_size": 125},
    "tied": QWEN3_SMALL | {"tie_word_embeddings": True},
}
BF16 = "model.dtype=bfloat16"
LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.pp=2",),
    "ep2": ("parallel.dp=2", "parallel.ep=2"),
}
COMMON = (f"model.tokenizer={TOKENIZER}", "replay=off")
THIRD = 3.5  # files of that part of a checkpoint, so that it is at least three


def tensors_of(folder):
    """All tensors of a checkpoint folder, by transformers' own reading of its index or file."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    wrong = [n for n, t in found.items() if t.dtype != wanted[n].dtype or not t.equal(wanted[n])]
    assert not wrong, wrong


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> a random model's folder as transformers saves it; next to it ``bf16`` holds its
    tensors, but for the routers' biases, in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    for name, hf in MODELS.items():
        write_model(folder / name, hf)
        fused = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        fused.save_pretrained(folder / name / "fused", save_original_format=False)
        exact = load_file(folder / name / "model.safetensors")
        (folder / name / "bf16").mkdir()
        shutil.copy(folder / name / "config.json", folder / name / "bf16")
        rounded = {n: t if n.endswith("_bias") else t.bfloat16() for n, t in exact.items()}
        save_file(rounded, folder / name / "bf16/model.safetensors")
    return folder


class Counted:
    """A tensor of a file, and the bytes that were taken of it."""

    def __init__(self, stored, sizes):
        self.stored = stored
        self.shape = stored.shape
        self.sizes = sizes

    def __getitem__(self, at):
        part = self.stored[at]
        self.sizes.append(part.nbytes)
        return part


def there_and_back(source, out, *overrides):
    """Read a folder and write it to ``out``; (bytes read, bytes held) of the weights here."""
    plan = plan_of(source, *COMMON, *overrides)
    with passes.built(plan, trainable=False) as policy:
        limit = int(sum(f.stat().st_size for f in source.glob("*.safetensors")) / THIRD)
        save_checkpoint_hf(out, policy.weights(), plan, policy.topo, max_shard_bytes=limit)
        llm = policy.llm
        live = llm.named_parameters()
        folder = SafetensorsFolder(source)
        sizes = []
        weight_table.load(llm.table, live, lambda n: Counted(folder(n), sizes), llm.topo)
        return sum(sizes), sum(tensor.nbytes for tensor in live.values())


def jobs():
    """name -> source below the models' folder, overrides."""
    for name in MODELS:
        layouts = [layout for layout in LAYOUTS if layout == "tp2" or name in FAMILIES]
        if name == "qwen3":
            layouts.remove("ep2")
        for layout in layouts:
            bf16 = layout == "pp2"
            part, dtype = (f"{name}/bf16", (BF16,)) if bf16 else (name, ())
            yield f"{name} {layout}", (part, (*dtype, *LAYOUTS[layout]))


def on_rank(group, models):
    torch.set_num_threads(1)
    found = {}
    for name, (source, overrides) in jobs():
        out = models / f"rank{group.rank()}" / name  # the main rank's is the only one written
        found[name] = there_and_back(models / source, out, *overrides)
    if (models / "run").exists():
        command = [str(models / "run"), str(models / "exported by two"), "parallel.tp=2"]
        found["exit"] = export.main(command)
    found["full"] = fill_disk(models)
    return found


def fill_disk(models):
    """The error on this rank when the main rank's file system takes no more than 100 kB a file."""
    plan = plan_of(models / "tied", *COMMON, *LAYOUTS["tp2"])
    with passes.built(plan, trainable=False) as policy:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if policy.topo.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            save_checkpoint_hf(models / "full", policy.weights(), plan, policy.topo)
        except OSError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# there and back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["", "bf16", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_save_checkpoint_hf_restores_every_tensor(models, tmp_path, name, source):
    """Also from what transformers writes with a layer's experts in one tensor."""
    overrides = (BF16,) * (source == "bf16")
    there_and_back(models / name / source, tmp_path / "out", *overrides)
    assert len(list((tmp_path / "out").glob("model-0000?-of-0000?.safetensors"))) >= 3
    equal(tensors_of(tmp_path / "out"), tensors_of(models / name / source.replace("fused", "")))


def test_written_config_describes_the_checkpoint(tmp_path):
    quantised = {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
    plan = tiny_plan(write_sizes(tmp_path, LITE | quantised | {"torch_dtype": "float32"}))
    assert written_config(plan, "bfloat16") == LITE | {
        "num_nextn_predict_layers": 0,  # model.mtp is off
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


@pytest.mark.parametrize("name", MODELS)
def test_save_checkpoint_hf_writes_what_transformers_loads(models, tmp_path, name):
    """Without a missing or unexpected name; its log-probs are megatron's, as is the tokenizer."""
    batch = random_batch(9)
    batch = replace(batch, tokens=batch.tokens % 125, targets=batch.targets % 125)
    plan = plan_of(models / name, *COMMON)
    with passes.built(plan, trainable=False) as policy:
        ours = passes.scores(policy, batch, plan_microbatches(batch.seqlens, 1, 64), replay=False)
        out = tmp_path / "out"
        save_checkpoint_hf(out, policy.weights(), plan, policy.topo, max_shard_bytes=100_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    exact = exact_logprobs(theirs.eval(), batch)
    torch.testing.assert_close(ours.logprobs, exact, atol=1e-4, rtol=0)
    words = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (
        words("0123")["input_ids"] == AutoTokenizer.from_pretrained(TOKENIZER)("0123")["input_ids"]
    )


# commands ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(models):
    """A run folder of two steps, the second after a resume, that writes hf/ next to each."""
    quick = ("batching.prompts=4", "evaluate.every=0", "log.progress=false", "checkpoint.every=1")
    for steps in (1, 2):
        command = [str(CONFIG), f"run={models / 'run'}", f"steps={steps}", *quick]
        assert train.main([*command, "checkpoint.hf=true"]) == 0
    return models / "run"


@pytest.fixture(scope="module")
def two(models, run):
    return run_ranks(on_rank, 2, models)


def test_export_writes_what_the_run_wrote(run, tmp_path, capsys):
    assert export.main([str(run), str(tmp_path / "last")]) == 0
    assert "step-2" in capsys.readouterr().out
    assert export.main([str(run), str(tmp_path / "first"), "--step", "1"]) == 0
    for name, step in (("first", 1), ("last", 2)):
        files = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
        assert files == {
            p.name: p.read_bytes() for p in (run / f"checkpoints/step-{step}/hf").iterdir()
        }
        assert {"tokenizer.json", "config.json", "model.safetensors"} < files.keys()
    first, last = (tensors_of(tmp_path / name) for name in ("first", "last"))
    assert not first["lm_head.weight"].equal(last["lm_head.weight"])
    assert export.main([str(run), str(tmp_path / "small"), "--dtype", "bfloat16"]) == 0
    equal(
        tensors_of(tmp_path / "small"),
        {n: t if n.endswith("_bias") else t.bfloat16() for n, t in last.items()},
    )


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (("--step", "9"), 1, "step-9 holds no checkpoint (there: step-1, step-2), expected"),
        (("parallel.tp=3",), 2, "parallel.tp=3: 3 does not divide num_attention_heads 4"),
        (("parallel.tpp=3",), 2, "parallel.tpp"),
        (("--tokenizer", "gone"), 1, "gone is not there, expected its folder"),
        (("model.family=qwen3",), 2, "model.family: 'qwen3' now, 'glm4_moe_lite' in"),
    ],
)
def test_export_refuses_wrong_arguments(run, tmp_path, capsys, changes, code, words):
    assert export.main([str(run), str(tmp_path / "out"), *changes]) == code
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# on two ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", dict(jobs()))
def test_save_checkpoint_hf_writes_the_same_in_every_layout(two, models, name):
    source, _ = dict(jobs())[name]
    equal(tensors_of(models / "rank0" / name), tensors_of(models / source))
    assert not (models / "rank1").exists()


@pytest.mark.parametrize("name", dict(jobs()))
def test_load_reads_only_the_part_of_the_rank(two, name):
    for read, held in (result[name] for result in two):
        padding = 2 * 64 * 4 if name == "odd vocabulary tp2" else 0  # a row of embedding and head
        assert held - padding <= read <= held


def test_export_on_two_ranks_writes_the_same(two, run, models):
    assert [result["exit"] for result in two] == [0, 0]
    equal(tensors_of(models / "exported by two"), tensors_of(run / "checkpoints/step-2/hf"))


def test_save_checkpoint_hf_on_a_full_disk_fails_every_rank_and_leaves_nothing(two, models):
    for result in two:
        assert "full could not be written (rank 0: " in result["full"]
        assert "rank 1" not in result["full"] and "resume" not in result["full"]
    assert not list(models.glob("full*"))


# what is refused ---------------------------------------------------------------------------------


def spoil(folder, how):
    """Changes files of a checkpoint of several; returns the refusal's kind and words."""
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    index = json.loads((folder / INDEX).read_text())
    name = next(iter(load_file(one)))
    if how == "a file is missing":
        two.unlink()
        return FileNotFoundError, rf"{two.name} does not exist \(1 of \d files missing\)"
    if how == "truncated":
        two.write_bytes(two.read_bytes()[:-10])
        return ValueError, rf"{two.name} \(\d+ bytes\): .*expected a complete safetensors file"
    if how == "in two files":
        save_file(load_file(two) | {name: load_file(one)[name]}, two)
        return ValueError, rf"{name} is in .*{one.name} and in {two.name}, expected it in one"
    if how == "no index":
        (folder / INDEX).write_text('{"weight_map": 3}')
        return ValueError, rf"{INDEX}: TypeError.*expected HF's JSON with weight_map"
    if how == "elsewhere":
        (folder / INDEX).write_text(
            json.dumps({"weight_map": index["weight_map"] | {name: two.name}})
        )
        return ValueError, rf"says that {name} is in {two.name}, but it is in {one.name}"
    assert how == "nowhere"
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"x": two.name}}))
    return ValueError, r"says that x is in .*, but it is in none of its files"


HOW = ("a file is missing", "truncated", "in two files", "no index", "elsewhere", "nowhere")


@pytest.mark.parametrize("how", HOW)
def test_SafetensorsFolder_refuses_inconsistent_files(models, tmp_path, how):
    there_and_back(models / "qwen3", tmp_path)
    kind, words = spoil(tmp_path, how)
    with pytest.raises(kind, match=words):
        SafetensorsFolder(tmp_path)


def read_changed(models, tmp_path, name, changes):
    """Build the model ``name`` from its checkpoint with ``changes``; None leaves a tensor out."""
    tensors = {n: t for n, t in (tensors_of(models / name) | changes).items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(models / name / "config.json", tmp_path)
    plan = plan_of(tmp_path, *COMMON)
    with passes.built(plan) as policy:
        return {n: t.clone() for n, t in policy.weights()}


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({EXPERT: None}, rf"1 tensors are missing \['{EXPERT}'\], 0 are unknown"),
        ({"x.bias": torch.zeros(2)}, r"0 tensors are missing \[\], 1 are unknown \['x.bias'\]"),
        ({EXPERT: torch.zeros(33, 64)}, rf"{EXPERT} is \[33, 64\], expected \[32, 64\] for dec"),
        (
            {
                EXPERT: torch.zeros(32, 64, dtype=torch.float8_e4m3fn),
                EXPERT + "_scale_inv": torch.ones(1, 1),
            },
            rf"{EXPERT} in .* is F8_E4M3 \(1 tensors\)",
        ),
    ],
    ids=["missing", "unknown", "wrong shape", "fp8"],
)
def test_check_refuses_tensors_that_do_not_fit_the_model(models, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        read_changed(models, tmp_path, "qwen3_moe", changes)


def test_check_ignores_copies(models, tmp_path):
    """The head of a tied model, and rotary frequencies as older checkpoints have them."""
    copies = {"lm_head.weight": torch.zeros(128, 64)}
    copies["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    assert (
        read_changed(models, tmp_path, "tied", copies).keys() == tensors_of(models / "tied").keys()
    )
