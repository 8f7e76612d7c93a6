"""A checkpoint of one backend loads under the other, bit for bit, and training goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyrl_ext.megatron.optimizer import name_of
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.checkpoints import assert_goes_on, content
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, QWEN3, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

TE = "model.backend=te"
LOCAL = "model.backend=local"
COMMON = ("optimizer.eps=1e-3", "batching.tokens_per_microbatch=128")
CONFIGS = {"tiny": CONFIG, "tiny_qwen3": QWEN3}  # latent attention, and grouped queries
TP2 = ("parallel.tp=2", "parallel.ep=2", "parallel.etp=1")
DISTRIBUTED = ("parallel.dp=2", "optimizer.distributed=true")
BF16 = "model.dtype=bfloat16"
PACKAGE = "transformer_engine"
# name -> (what it goes on from, overrides); in this order
TWO = {
    "te tp2": ("local", (TE, *TP2)),
    "te distributed": ("te tp2", (TE, *DISTRIBUTED)),
    "local distributed": ("te distributed", (LOCAL, *DISTRIBUTED)),
    "te pp2": ("local distributed", (TE, "parallel.pp=2", "parallel.vpp=2")),
    "bf16 te distributed": ("bf16 local", (TE, BF16, *DISTRIBUTED)),
    "bf16 local tp2": ("bf16 te distributed", (LOCAL, BF16, *TP2)),
}


def step(policy):
    """One update on the same rows in every layout."""
    plan = policy.plan
    batch = random_batch()
    sizes = policy.topo.dp_size, 128, plan.row_alignment, policy.topo.cp_size
    schedule = plan_microbatches(batch.seqlens, *sizes)
    _, metrics = passes.step(policy, batch, schedule, replay=False)
    return metrics, {name: tensor.clone() for name, tensor in policy.weights()}


def plan_of(model, *overrides):
    return tiny_plan("replay=off", *COMMON, *overrides, config=CONFIGS[model])


def go_on(folder, model, name):
    """Load, save as it is, make a step, and save that."""
    source, overrides = TWO[name]
    with passes.built(plan_of(model, *overrides)) as policy:
        policy.load(folder / source)
        policy.save(folder / f"{name}, loaded")
        found = step(policy)
        policy.save(folder / name)
        return found, name_of(policy.llm.optimizer)


def on_rank(group, folder):
    return {(m, name): go_on(folder / m, m, name) for m in CONFIGS for name in TWO}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backends")


@pytest.fixture(scope="module")
def never_stopped(folder):
    """(model, dtype) -> what each step of the local backend gives; saved after the first."""
    found = {}
    for model in CONFIGS:
        for dtype, name in (("float32", "local"), ("bfloat16", "bf16 local")):
            with passes.built(plan_of(model, f"model.dtype={dtype}")) as policy:
                steps = [step(policy)]
                policy.save(folder / model / name)
                steps += [step(policy) for _ in range(4 if dtype == "float32" else 2)]
            found[model, dtype] = steps
    return found


@pytest.fixture(scope="module")
def two(folder, never_stopped):
    return run_ranks(on_rank, 2, folder)[0]


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("model", CONFIGS)
def test_load_continues_under_the_other_backend(model, name, two, never_stopped):
    (metrics, weights), optimizer = two[model, name]
    assert optimizer == ("transformer_engine.FusedAdam" if "te" in name.split() else "torch.AdamW")
    bf16 = name.startswith("bf16")
    number = 1 + [n for n in TWO if n.startswith("bf16") == bf16].index(name)
    wanted = never_stopped[model, "bfloat16" if bf16 else "float32"][number]
    assert_goes_on(metrics, weights, wanted, bf16)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("model", CONFIGS)
def test_load_restores_what_the_other_backend_saved(model, name, two, folder):
    """Bit for bit, under names in which neither backend nor layout shows; model and optimizer."""
    saved, back = (content(folder / model / n) for n in (TWO[name][0], f"{name}, loaded"))
    assert saved.keys() == back.keys() and not any("_extra_state" in key for key in saved)
    moments = [key for key in saved if key.startswith("optimizer.state.exp_avg_sq.")]
    assert len(moments) > 30 and all(saved[key].any() for key in moments)
    for key in saved.keys() - {"optimizer"}:
        assert saved[key].dtype == back[key].dtype and torch.equal(saved[key], back[key]), key


# the local backend, whatever is installed ---------------------------------------------------------


def test_use_kernels_keeps_the_local_backend_as_without_transformer_engine():
    """The same bits after two steps in a process that has TransformerEngine, and in one without."""
    here = Path(__file__).parents[2]
    paths = os.environ["PYTHONPATH"].split(":")
    kept = [path for path in paths if not (here / path / PACKAGE).is_dir()]
    found = []
    for shown, first in ((kept, ""), (paths, "import tests.te.formulas; ")):
        command = f"{first}from tests.te import local_step; print(local_step.step_digest())"
        done = subprocess.run(
            [sys.executable, "-c", command],
            env=os.environ | {"PYTHONPATH": ":".join(shown)},
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split()[-2:])
    assert found[0] == found[1] and found[0][0] == "torch.AdamW"
