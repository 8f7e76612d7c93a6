"""The memory forecast of a plan: by hand, against a real step, and against megatron's buffers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.end_to_end import index_of
from pyrl_ext.pack.batch import Batch
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.activations import in_flight
from pyrl_ext.plan.forecast.fits import fits, seems_to_fit
from pyrl_ext.plan.forecast.memory import Load, StageMemory, stage_memory
from pyrl_ext.plan.forecast.parameters import published
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.phases import MEMORY_PHASES, START
from pyrl_ext.plan.schema import Hardware
from tests.helpers import passes
from tests.helpers.configs import REPOSITORY, write_sizes
from tests.helpers.models import MINIMAX
from tests.helpers.plan_pages import glm47
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, QWEN3, random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SHIPPED = (
    *(REPOSITORY / "configs").glob("*.yaml"),
    *(REPOSITORY / "configs/examples").glob("*.yaml"),
)
ON_GPUS = [path for path in sorted(SHIPPED) if compile_plan(path).device == "cuda"]

# One minibatch: what the graph of another leaves behind is freed whenever Python collects it. With
# a limit on the mismatch its log-probs are scored before the update
SHORT = (
    "batching.prompts=2",
    "batching.minibatches=1",
    "data.max_prompt_tokens=16",
    "rollout.max_mismatch=10",
)


# By hand ----------------------------------------------------------------------------------------

PARAMETERS = 303_424  # of the tiny model, as transformers counts them (tests/plan/test_compile.py)


def items_of(plan: Plan, stage: int = 0) -> dict[str, int]:
    return {item.name: item.bytes for item in stage_memory(plan)[stage].items}


def test_stage_memory_holds_vocabulary_and_latents_whole_where_megatron_does():
    tp2 = items_of(tiny_plan("parallel.tp=2"))
    norms = 4 * (2 * 64 + 32 + 32) + 64  # two, and of the latents, of 4 layers; the last
    routers = 3 * 8 * 64
    latents = 4 * 64 * (32 + 32 + 16)
    whole = norms + routers + latents
    assert tp2["weights"] == 4 * (whole + (PARAMETERS - whole) // 2)
    plan = tiny_plan("parallel.tp=2")
    plan.hf["vocab_size"] = 129  # odd: a row of padding in the embedding and in the head
    assert items_of(plan)["weights"] == tp2["weights"] + 2 * 4 * 64


def test_stage_memory_of_frozen_weights_is_without_gradients_and_optimizer_state():
    """The embedding, 128 x 64, and three routers, 8 x 64, in two stages of two layers."""
    freeze = "model.freeze=[model.embed_tokens.weight, '*.mlp.gate.weight']"
    plan, frozen = (tiny_plan("parallel.pp=2", *more) for more in ((), (freeze,)))
    for stage, number in enumerate((128 * 64 + 8 * 64, 2 * 8 * 64)):
        all_trained = items_of(plan, stage)
        held = items_of(frozen, stage)
        assert held["weights"] == all_trained["weights"]
        assert all_trained["gradients"] - held["gradients"] == 4 * number
        assert all_trained["optimizer"] - held["optimizer"] == 8 * number
    for engine, left in (("hf", 128 * 64 + 3 * 8 * 64), ("vllm", 128 * 64)):
        named = f"rollout.engine={engine}"
        sent = [published(tiny_plan(named, *more)).numbers for more in ((), (freeze,))]
        assert sent[0] - sent[1] == left  # vLLM takes whole layers


def test_stage_memory_of_a_dense_layer_equals_a_count_by_hand():
    """One layer, float32, on a CPU: every tensor that autograd saves, in floats a row."""
    plan = tiny_plan("parallel.pp=4")
    plan.hf["mlp_layer_types"] = ["dense"] * 4
    norm = 64 + 1
    up = 3 * 128
    latents = (48 + 1 + 32) + (32 + 1 + 32)  # the kv norm's input holds the rotary key
    attention = 4 * 128 + 4 + 2 + 128  # q k v o, sums, an order, o in order
    row = 4 * (norm + 64 + latents + attention + norm + 64 + up + 16)  # 16: of the angles
    sent = 4 * 64  # the schedule keeps what was sent on; what came the first norm has saved
    rows = plan.batching.tokens_per_microbatch
    held = [each.bytes_of("activations") for each in stage_memory(plan)]
    assert held[1] == 3 * rows * (row + sent)
    assert held[3] == rows * (row + sent + 4 * (norm + 64))  # the last norm, and the head's input


def test_stage_memory_of_routes_equals_a_count_by_hand():
    plan = tiny_plan("parallel.tp=2", "parallel.pp=2")
    rows = plan.batching.tokens_per_microbatch // 2
    first, last = (items_of(plan, stage) for stage in range(2))
    assert first["routes"] == rows * (2 + 8 + 1 + 2)  # layer 1 of 0 and 1; ids, row, flag, ids
    assert last["routes"] == rows * (4 + 8 + 1 + 4)
    assert last["routes ahead"] == rows * (4 + 8 + 1)
    share = 128 * (64 + 12 - 1) // 2  # of two tensor-parallel ranks
    assert first["routes of the batch"] == share * 1 * 2  # one layer, two experts
    assert last["routes of the batch"] == share * 2 * 2
    assert "routes" not in items_of(tiny_plan("replay=off"))


def test_stage_memory_shrinks_with_recomputation_and_packing():
    def kept(*overrides: str) -> int:
        return items_of(tiny_plan(*overrides))["activations"]

    none, selective, full = (kept(f"model.recompute={x}") for x in ("none", "selective", "full"))
    assert none > selective > full
    act, core_and_act = (
        kept("model.recompute=selective", f"model.recompute_modules=[{x}]")
        for x in ("moe_act", "core_attn,moe_act")
    )
    assert none > act > core_and_act > selective
    assert kept("batching.tokens_per_microbatch=1024") * 2 == none
    assert none / 2 < kept("parallel.tp=2") < none  # angles and the head's statistics are whole
    assert none < kept("parallel.cp=2") < 1.5 * none  # keys of other ranks


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("samples", [2, 8, 64])
def test_in_flight_equals_megatrons_warm_up(pp: int, vpp: int, samples: int):
    from types import SimpleNamespace as Fields

    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    plan: Any = Fields(parallel=Fields(pp=pp, vpp_size=vpp, dp=1), samples_per_minibatch=samples)
    number = -(-samples // pp) * pp if vpp > 1 else samples
    for stage in range(pp):
        pipe: Any = Fields(
            pp_group=Fields(size=lambda: pp, rank=lambda at=stage: at),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        )
        total, _, warm_up, _ = get_pp_rank_microbatches(number, vpp, pp, p2p_communicator=pipe)
        assert sum(in_flight(plan, stage)) == min(warm_up + 1, total)


# The machine and the engine ---------------------------------------------------------------------

GLM47 = REPOSITORY / "configs/glm47.yaml"


def held_by(*overrides: str) -> StageMemory:
    (stage,) = stage_memory(glm47(*overrides, memory=10**12))
    return stage


def test_stage_memory_of_a_shared_gpu_holds_the_engine():
    total = parameters(compile_plan(GLM47).sizes).total
    state = held_by("rollout.gpus=8").held("rollout", exact=True)
    assert held_by().held("rollout", exact=True) == state + 600 * 10**9
    assert held_by().held("publish", exact=True) == state + 2 * total  # the cache sleeps
    assert held_by("rollout.tp=2").held("publish", exact=True) == state + total
    separate = held_by("rollout.gpus=8")
    sends = separate.bytes_of("send buffers") + (256 << 20)  # and a communicator for them
    assert held_by().held("update") == separate.held("update") - sends
    awake = held_by("rollout.sleep=false")
    assert awake.held("update") == held_by().held("update") + 600 * 10**9
    away = held_by("rollout.offload_trainer=all")
    assert away.held("rollout", exact=True) == 600 * 10**9
    host = {item.name: item for item in away.items if item.host and item.exact}
    assert not [name for name in host if "gradients" in name]  # their contents are dropped
    for name in ("weights", "optimizer"):
        kept = host[f"{name} on the host"]
        assert kept.bytes == away.bytes_of(name) and kept.phases == MEMORY_PHASES
    assert away.held("update") == held_by().held("update")


def test_stage_memory_of_the_start_holds_the_engine_alone():
    """It starts on an empty GPU, and sleeps while the trainer is built."""
    shared = held_by()
    apart = held_by("rollout.gpus=8")
    assert shared.phases == (START, *MEMORY_PHASES) and apart.phases == MEMORY_PHASES
    assert shared.held(START) == 600 * 10**9 + shared.bytes_of("CUDA and NCCL")
    embedded = held_by("rollout.engine=hf")
    assert embedded.held(START, exact=True) == embedded.bytes_of("engine weights")
    assert stage_memory(tiny_plan())[0].phases == MEMORY_PHASES  # no GPU to share


def test_stage_memory_of_a_publish_holds_the_experts_that_vllm_keeps():
    """GLM-4.7-Flash in bfloat16: a vocabulary of 154,880 x 2,048, 64 experts of width 1,536."""
    table = 154_880 * 2048
    experts = 64 * 3 * 2048 * 1536
    bucket = 100 * 2**20
    one = f"rollout.bucket_bytes={bucket}"
    gathered = 3 * table + max(bucket, 2 * table, 2 * experts)  # a copy, its check, a bucket
    assert held_by(one, "rollout.engine=hf").bytes_of("publish") == gathered
    assert held_by(one).bytes_of("publish") == gathered + 2 * experts
    remote_engines = held_by(one, "rollout.gpus=8").bytes_of("publish")
    assert remote_engines == gathered  # vLLM's experts are elsewhere


def test_stage_memory_holds_the_two_buffers_of_a_sender_in_every_phase():
    """A bucket of GLM-4.7-Flash is at least a layer's experts: 64 of width 1,536, in bfloat16."""
    bucket = 2 * 64 * 3 * 2048 * 1536
    (on_cpu,) = stage_memory(tiny_plan("rollout.transport=shm", "rollout.bucket_bytes=1048576"))
    of_each = ((held_by("rollout.gpus=8"), bucket, False), (on_cpu, 1_048_576, True))
    for stage, size, host in of_each:
        (buffers,) = [item for item in stage.items if item.name == "send buffers"]
        assert buffers.bytes == 2 * size
        assert buffers.host == host and buffers.phases == MEMORY_PHASES
    assert not held_by().bytes_of("send buffers")


def test_stage_memory_has_no_context_on_a_cpu():
    assert not [i for i in stage_memory(tiny_plan())[0].items if "CUDA" in i.name]
    assert held_by().bytes_of("CUDA and NCCL") == (1024 + 256) * 2**20  # of all ranks


def test_stage_memory_says_when_and_why_of_every_item():
    for plan in (tiny_plan("objective.kl_coef=0.1"), compile_plan(GLM47)):
        for stage in stage_memory(plan):
            names = [item.name for item in stage.items]
            assert len({*names}) == len(names)
            assert all(i.why and i.phases and {*i.phases} <= {*stage.phases} for i in stage.items)
            assert all(isinstance(i.bytes, int) and i.bytes >= 0 for i in stage.items)


# Whether it fits --------------------------------------------------------------------------------


def test_fits_names_what_is_sure_not_to_fit():
    plan = compile_plan(GLM47, ["rollout.gpus=8", "parallel.ep=2"])
    plan = plan.model_copy(update={"hardware": Hardware(gpu="H100")})
    assert fits(plan) == (
        "a rank needs 131.5 GiB in phase update (gradients 59.8 GiB + optimizer 41.83 GiB + "
        "weights 29.9 GiB), expected at most 79.65 GiB (H100); it would run out of memory. Shard "
        "over more GPUs (parallel.ep, tp, pp)"
    )
    assert seems_to_fit(plan) is None  # said once


def test_seems_to_fit_notes_what_may_not_fit():
    plan = compile_plan(GLM47, ["hardware.gpu=H100", "rollout.gpus=8", "model.recompute=none"])
    assert fits(plan) is None
    note = seems_to_fit(plan)
    assert note and note.startswith("a rank needs about ") and "activations" in note


def test_fits_advises_a_list_of_modules_that_saves_more():
    """With a list, model.recompute: full is refused."""
    given = ["model.recompute=selective", "batching.tokens_per_microbatch=40960"]
    for modules, advice in (
        ("[core_attn,moe_act]", "model.recompute_modules: [core_attn, moe] ("),
        ("[moe]", "Use batching.tokens_per_microbatch: 20480 ("),
    ):
        plan = compile_plan(GLM47, [*given, f"model.recompute_modules={modules}"])
        note = seems_to_fit(plan)
        assert note and advice in note and "model.recompute:" not in note


def test_stage_memory_of_an_update_has_no_copy_of_the_moments():
    """torch's fused AdamW needs no more memory: GLM-4.7-Flash trains on 8 H100s, with chunks of
    logits of 1 GiB."""
    given = ["hardware.gpu=H100", "rollout.offload_trainer=all"]
    plan = compile_plan(GLM47, given)
    (stage,) = stage_memory(plan)
    assert not [item for item in stage.items if item.name == "optimizer scratch"]
    assert fits(plan) is None
    assert "logprob.chunk_bytes: 1073741824 (79." in (seems_to_fit(plan) or "")
    plan = compile_plan(GLM47, [*given, "logprob.chunk_bytes=1GiB"])
    assert fits(plan) is seems_to_fit(plan) is None


@pytest.mark.parametrize("config", ON_GPUS, ids=lambda path: path.stem)
def test_shipped_configs_fit_their_gpus(config: Path):
    plan = compile_plan(config)
    assert memory_limit(plan) is not None
    assert fits(plan) is seems_to_fit(plan) is None
    assert step_time(plan) is not None


def test_fits_and_seems_to_fit_accept_anything_without_a_limit():
    plan = compile_plan(GLM47, ["hardware.gpu=null", "batching.tokens_per_microbatch=100000000"])
    assert fits(plan) is seems_to_fit(plan) is None


# Against real steps -----------------------------------------------------------------------------

MOE_ACT = ("model.recompute=selective", "model.recompute_modules=[moe_act]")
STEPS = [
    ("objective.kl_coef=0.1",),
    ("model.recompute=full",),
    ("model.dtype=bfloat16", "model.recompute=selective"),
    ("optimizer.name=muon", "model.dtype=bfloat16"),
    ("optimizer.moments=bfloat16", "model.dtype=bfloat16", *MOE_ACT),
    *(("lora.rank=8", "lora.alpha=16", x) for x in ("lora.experts=none", "model.dtype=bfloat16")),
]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [*((CONFIG, some) for some in STEPS), *((QWEN3, STEPS[i]) for i in (2, 3, 4, 6))],
    ids=lambda each: each.stem if isinstance(each, Path) else ",".join(each),
)
def test_stage_memory_predicts_what_a_step_holds(config: Path, overrides: tuple[str, ...]):
    from pyrl_ext.parallel import topology
    from tests.helpers.measured_step import measure, report

    as_trained()
    plan = tiny_plan(*SHORT, *overrides, config=config)
    with topology.start(plan) as topo:
        result = report(topo, *measure(plan, topo))
    for name, row in result["items"].items():
        if name == "activations":
            assert row["predicted"] == pytest.approx(row["measured"], rel=0.05), name
        else:
            assert row["predicted"] == row["measured"] > 0, name
    named = {"weights", "gradients", "optimizer", "engine weights", "activations", "routes"}
    assert {*result["items"]} >= named
    assert ("reference" in result["items"]) == (plan.objective.kl_coef > 0 and plan.lora is None)
    for name in ("publish", "logprobs", "update"):
        row = result["phases"][name]
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.3), name
        assert row["seconds"] > 0


# Each on two processes
LAYOUTS = [
    ("parallel.tp=2", "parallel.etp=1", "parallel.ep=2", "model.dtype=bfloat16"),
    ("parallel.tp=2", "parallel.etp=1", "parallel.ep=2", "optimizer.name=muon"),
    ("parallel.pp=2", "parallel.vpp=2", "batching.tokens_per_microbatch=40"),
    ("parallel.cp=2", "optimizer.distributed=true", "model.recompute=selective"),
    ("parallel.dp=2", "optimizer.distributed=true", "optimizer.moments=bfloat16"),
]


def equal_samples(count: int, rows: int) -> Batch:
    """`count` samples of `rows` rows each, so that microbatches are of one size as well."""
    long = random_batch(4 * count * 24 // rows, unrouted=0.0)
    cut = {f.name: getattr(long, f.name) for f in fields(long)}
    cut = {n: x[: count * rows] for n, x in cut.items() if isinstance(x, Tensor)}
    return replace(long, seqlens=(rows,) * count, **cut)


def as_trained() -> None:
    """In torch's deterministic mode, which poisons empty tensors, the experts' rows are put back by
    an operator that saves them."""
    torch.use_deterministic_algorithms(False)


def on_rank(_group: Any) -> list[dict[str, tuple[int, int]]]:
    as_trained()
    return [of_an_update(tiny_plan(*layout, *SHORT)) for layout in LAYOUTS]


def of_an_update(plan: Plan) -> dict[str, tuple[int, int]]:
    """(predicted, measured) bytes of each item on this rank, over an update."""
    from pyrl_ext.loss.registry import build_loss
    from pyrl_ext.pack.schedule import Scheduler
    from pyrl_ext.parallel import topology
    from pyrl_ext.trainer.policy import Policy
    from tests.helpers.measured_step import Saved, tensors_of

    batch = equal_samples(plan.samples_per_minibatch, 20)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        known = tensors_of(policy)
        (planned,) = Scheduler(plan).minibatches(index_of(batch))
        with Saved(x for each in known.values() for x in each).watched() as saved:
            passes.update(policy, batch, planned, build_loss(plan.objective))
        align = plan.row_alignment
        here = topo.dp_rank * topo.cp_size + topo.cp_rank
        groups = [planned.group_of(i, here) for i in range(len(planned))]
        rows = max(
            sum(-(-batch.seqlens[i] // align) * align for i in each.samples) // each.cp_size
            for each in groups
        )
        memory = stage_memory(plan, Load(rows, len(batch.tokens), 0))[topo.pp_rank]
        held = {n: sum(x.nbytes for x in each) for n, each in tensors_of(policy).items()}
        held["activations"] = saved.peak
        return {name: (memory.bytes_of(name), size) for name, size in held.items()}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_stage_memory_predicts_what_norms_over_all_heads_save(tmp_path: Path, recompute: str):
    as_trained()
    hf = MINIMAX | {"head_dim": 128, "rotary_dim": 64}  # most that is saved
    config = (write_sizes(tmp_path, hf), "model.family=minimax_m2", "replay=off")
    plan = tiny_plan(*config, *SHORT, f"model.recompute={recompute}", config=QWEN3)
    for name, (predicted, measured) in of_an_update(plan).items():
        off = 0.06 if name == "activations" else 0
        assert predicted == pytest.approx(measured, rel=off), name


def test_stage_memory_predicts_what_every_rank_holds():
    for layout, *ranks in zip(LAYOUTS, *run_ranks(on_rank, 2), strict=True):
        for found in ranks:
            for name, (predicted, measured) in found.items():
                # megatron cuts the distributed optimizer's parts where its padded buffers end
                off = {
                    "activations": 0.07,
                    "optimizer": 1e-3 * ("optimizer.distributed=true" in layout),
                }
                assert predicted == pytest.approx(measured, rel=off.get(name, 0)), (layout, name)
