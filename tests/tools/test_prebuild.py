"""Kernels compiled ahead of a run: the run finds every one, and refuses another plan's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.compiler")

from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.ops import prebuilt
from pyrl_ext.ops.gather_fields.triton import gather_fields
from pyrl_ext.ops.rms_norm.native import rows_of
from pyrl_ext.pack.schedule import plan_microbatches
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.tools.prebuild import kernels as prebuild
from pyrl_ext.tools.prebuild import main as prebuild_command
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUT = ["hardware.gpu=H200", "parallel.cp=2", "parallel.dp=4"]


def config_of(plan: Plan) -> dict[str, Any]:
    return plan.sizes.megatron_config()


def use(plan: Plan, folder: Path) -> int:
    return prebuilt.use(plan, config_of(plan), folder)


def plan(*overrides: str) -> Plan:
    return compile_plan(CONFIGS / "glm47.yaml", [*LAYOUT, *overrides])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", "pyrl_ext.plan", str(CONFIGS / "glm47.yaml"), *LAYOUT]
    done = subprocess.run([*command, "--build", folder], check=True, capture_output=True, text=True)
    assert "replay_probs 4 of 64 x 1.8: 2 variants compiled" in done.stdout
    return folder


LAUNCH = """
import sys
from pathlib import Path
from pyrl_ext.ops import prebuilt
from pyrl_ext.plan import compile_plan
from pyrl_ext.tools.prebuild import kernels as tool

plan = compile_plan(sys.argv[1], sys.argv[3:])
config = plan.sizes.megatron_config()
with tool._cache(Path(sys.argv[2])), tool._driver(tool.Offline(90)), tool.compiled() as found:
    for _, launch in prebuilt.launches(plan, config):
        for rows in (1, 2, 15, 16, 4097, 65552):
            launch(rows)
assert found
print([name for name, hit in found if not hit])
"""


@pytest.mark.parametrize("more", [(), ("logprob.head=logits", "logprob.accept_rounded_logits=on")])
def test_build_compiles_every_kernel_that_another_process_looks_for(
    built: Path, more: tuple[str, ...]
):
    command = [sys.executable, "-c", LAUNCH, str(CONFIGS / "glm47.yaml"), str(built), *LAYOUT]
    done = subprocess.run([*command, *more], check=True, capture_output=True, text=True)
    missed = json.loads(done.stdout.replace("'", '"'))
    if more:  # other dtypes: the test would see a miss
        assert missed == ["token_logprob_stats_kernel", "token_logprob_grad_kernel"]
    else:
        assert missed == []


def test_gather_fields_compiles_with_any_fill(tmp_path: Path):
    """Triton makes an integer argument of 1 a constant, which is no tensor in the kernel."""
    dtypes = [torch.bool, torch.uint8, torch.bfloat16, torch.int32, torch.int64, torch.float32]
    fields = [torch.empty(64, 3, dtype=dtype, device="meta") for dtype in dtypes]
    rows = torch.empty(32, dtype=torch.int64, device="meta")
    fills: list[list[float]] = [[1] * 6, [0, 1, 1, -1, 1, 2], [0] * 6]
    with (
        prebuild._cache(tmp_path),
        prebuild._driver(prebuild.Offline(90)),
        prebuild.compiled() as found,
    ):
        for each in fills:
            gather_fields(fields, rows, each, False)
    assert found == [("gather_rows_kernel", False)] * len(fills)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an H200, as far as `use` asks."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr("triton.knobs.compilation.listener", None)
    return monkeypatch


def test_use_loads_from_the_folder_and_says_what_is_missing(
    built: Path, hopper: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert use(plan(), built) == len(list(prebuilt.launches(plan(), config_of(plan()))))
    assert knobs.cache.dir == str(built)
    listener: Any = knobs.compilation.listener
    for hit in (True, False):
        listener(src=type("Source", (), {"name": f"kernel_{hit}"}), cache_hit=hit)
    said = capsys.readouterr().out
    assert said == "kernels: kernel_False was compiled during the run, not prebuilt\n"


def test_use_refuses_kernels_of_another_plan_or_gpu_or_triton(
    built: Path, tmp_path: Path, hopper: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"another plan: it lacks \['token_logprob bfloat16"):
        use(plan("logprob.head=logits", "logprob.accept_rounded_logits=on"), built)
    with pytest.raises(ValueError, match=r"no pyrl_kernels\.json, expected what --build wrote"):
        use(plan(), tmp_path)
    hopper.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    with pytest.raises(ValueError, match="built for target sm_90, expected sm_100"):
        use(plan(), built)
    hopper.setattr("triton.__version__", "9.9")
    with pytest.raises(ValueError, match=r"built for triton [\d.]+, expected 9.9"):
        use(plan(), built)


def test_build_needs_the_name_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"hardware\.gpu: null, expected the GPU to compile"):
        prebuild.build(compile_plan(CONFIGS / "tiny.yaml"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_main_refuses_a_file_to_write_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.write_text("")
    assert prebuild_command([str(CONFIGS / "glm47.yaml"), "--into", str(file)]) == 2
    assert "expected --into a folder to write to" in capsys.readouterr().err


class Called(TorchDispatchMode):
    """Notes the operators of this package that are called with tensors of the model's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, op = func.name().partition("::")
        if namespace == "pyrl_ext":
            self.names |= {name} if (name := launch_name(op, args)) else set()
        return func(*args, **(kwargs or {}))


def launch_name(op: str, args: tuple) -> str | None:
    """How `launches` calls such a call; None: it works on the batch, which is on the host."""
    first = args[0]
    if op in ("gather_fields", "expand_runs", "gather_rows", "invert_rows"):
        return None
    if op == "gather_routes":
        return f"gather_routes {first.dtype} {first.shape[1]} x {first.shape[2]} of {args[3]}"
    if op.startswith("replay_probs"):
        scores, ids, _, scale = args[:4] if op == "replay_probs" else args[1:5]
        return f"replay_probs {ids.shape[1]} of {scores.shape[1]} x {scale:g}"
    if op.startswith("rotary"):
        query, key, turns, *_, back = args
        shape = f"{query.shape[1]} x {query.shape[2]}, {key.shape[1]} x {key.shape[2]}"
        return f"rotary {query.dtype} {shape}, {turns.shape[1]} turned{' back' * back}"
    if op.startswith("latent_keys"):
        key, second, plain = args
        back = op == "latent_keys_grad"
        rest = second.shape[2] if back else key.shape[2] - plain
        shared = key.shape[2] - plain if back else second.shape[1]
        name = f"latent_keys {key.dtype} {key.shape[1]} x {plain}, {rest}, {shared} shared"
        return name + " back" * back
    if op.startswith("rms_norm"):
        x = args[op == "rms_norm_grad"]
        return f"rms_norm {x.dtype} {rows_of(x).heads} x {x.shape[-1]}"
    if op.startswith("swiglu"):
        gate_up = args[op == "swiglu_grad"]
        return f"swiglu {gate_up.dtype} x {gate_up.shape[1]}"
    if op == "expert_rows":
        return f"expert_rows {args[2]} of {first.shape[1]}"
    if op == "expert_rows_grad":
        return f"expert_rows {len(first) // args[3]} of {args[4]}"
    if op == "token_logprob_combine":
        return None  # launched with the statistics of a shard
    if op.startswith("token_logprob"):
        start, width = (0, args[3]) if op == "token_logprob_rows" else args[3:5]
        return f"token_logprob {first.dtype} {width} of {first.shape[1]} from {start}"
    return f"{op} {first.dtype} x {math.prod(first.shape[1:])}"


def test_launches_names_all_that_a_real_step_launches():
    with topology.start(plan := tiny_plan()) as topo:
        policy = Policy.build(plan, topo)
        batch = random_batch(unrouted=0.0)
        schedule = plan_microbatches(batch.seqlens, 1, plan.batching.tokens_per_microbatch, 1)
        with Called() as called:
            old = passes.scores(policy, batch, schedule, True)
            batch = batch.with_(old_logprobs=old.logprobs)
            passes.update(policy, batch, schedule, build_loss(plan.objective))
    found = {name.replace("torch.", "") for name in called.names}
    assert {name.split()[0] for name in found} == {
        "gather_routes",
        "replay_probs",
        "token_logprob",
        "sum_rows",
        "swiglu",
        "rotary",
        "rms_norm",
        "latent_keys",
        "expert_rows",
    }
    assert found <= {name for name, _ in prebuilt.launches(plan, config_of(plan))}
