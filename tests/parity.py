"""Every parallel layout against one process: `make parity` prints the table.

Per layout three train steps (scores, forward with replayed routes, loss, backward, reduction,
optimizer, export) on batches of very uneven lengths; then loss, every gradient gathered to its full
shape, the gradient norm and what each parameter moved by are compared with the single process, and
every router's experts with the samples'.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from pathlib import Path

import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.samples import route_dtype
from pyrl_ext.trainer.policy import Policy
from tests.helpers import lora, passes
from tests.helpers.deadline import DEADLINE
from tests.helpers.models import LLAMA, MINIMAX, MIXTRAL, QWEN2
from tests.helpers.nccl_rules import mark
from tests.helpers.passes import WholeBatch
from tests.helpers.probe import Probe
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_sets
from tests.helpers.vision import KIMI_VL, QWEN_VL

CONFIGS = Path(__file__).parents[1] / "configs"
# deviations allowed: loss absolute, gradients and changes by their norm, per parameter
BOUNDS = {"loss": 1e-6, "grad": 2e-5, "grad norm": 2e-5, "change": 1e-3}
COMMON = (
    "batching.tokens_per_microbatch=128",
    "objective.entropy_coef=0.01",
    "objective.tis_cap=2.0",
    "optimizer.eps=1e-3",
    "optimizer.lr=1e-2",
)
BIAS = "model.router_bias_update_rate=1e-3"  # where the routers have one


@dataclass(frozen=True)
class Model:
    """A small model: the config file of its family, and what differs from it; or a config."""

    config: str
    changes: dict = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    mtp_routes: bool = False  # the samples have routes of the multi-token-prediction layers
    instead: dict = field(default_factory=dict)  # of the config file
    rounding: float = 1.0  # factor of the bound of gradients


def _kinds(pattern: str) -> list[str]:
    return [{"d": "dense", "m": "sparse"}[letter] for letter in pattern]


MTP = ("model.mtp=true", "objective.mtp_coef=0.3")
# and narrow projections that no two ranks divide: every rank has them whole
MANY_EXPERTS = {
    "q_lora_rank": 33,
    "kv_lora_rank": 31,
    "num_hidden_layers": 2,
    "mlp_layer_types": _kinds("dm"),
    "n_routed_experts": 384,
    "moe_intermediate_size": 8,
}
MUON = ("optimizer.name=muon",)
LORA = ("lora.rank=4", "lora.expert_rank=8", "lora.alpha=8")
SHARED = ("lora.experts=shared_outer",)
LATENT = "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"
WITH_GATE = f"[{LATENT}, gate_proj, up_proj, down_proj, gate]"
MINIMAX_4 = MINIMAX | {"num_key_value_heads": 4}
KIMI_4 = KIMI_VL | {"text_config": KIMI_VL["text_config"] | {"num_hidden_layers": 4}}
KIMI_MTP = KIMI_4 | {"text_config": KIMI_4["text_config"] | {"num_nextn_predict_layers": 1}}
MODELS = {
    "glm": Model("tiny", {}, (BIAS,)),
    # dense layers before, between and behind those with experts
    "glm mixed": Model(
        "tiny",
        {
            "num_hidden_layers": 6,
            "mlp_layer_types": _kinds("dmdmmd"),
            "first_k_dense_replace": None,
        },
        (BIAS,),
    ),
    "glm 5 layers": Model(
        "tiny", {"num_hidden_layers": 5, "mlp_layer_types": _kinds("dmmmm")}, (BIAS,)
    ),
    "glm mtp": Model("tiny", {"num_nextn_predict_layers": 1}, (BIAS, *MTP)),
    "glm mtp 2": Model(
        "tiny", {"num_nextn_predict_layers": 2}, (BIAS, *MTP, "objective.mtp_detach=false"), True
    ),
    # tokens drawn from sets that top-k left, of which the trainer scores them
    "glm mtp kept": Model(
        "tiny", {"num_nextn_predict_layers": 1}, (BIAS, *MTP, "rollout.top_k=20")
    ),
    "qwen kept": Model(
        "tiny_qwen3", overrides=("rollout.top_p=0.9", "rollout.top_k=20", "logprob.head=logits")
    ),
    # ids of two bytes
    "glm 384": Model("tiny", MANY_EXPERTS, (BIAS,)),
    "glm 384 off": Model("tiny", MANY_EXPERTS, (BIAS, "replay=off")),
    "qwen": Model("tiny_qwen3"),
    # layers that carry a state; in one process, weights changed by 1e-7 of themselves move the
    # gradient of a decay by 3.7e-5 of itself
    "qwen next": Model("tiny_qwen3_next", rounding=3.0),
    "qwen next mtp": Model("tiny_qwen3_next", overrides=MTP, rounding=3.0),
    # layers of one block each: mixers with states, an MLP, attention, experts without gates; in one
    # process, weights changed by 1e-7 of themselves move the gradient of a mixer's dt_bias (layer
    # 6, step 2) by 8e-6 to 3.4e-5 of itself. TP moves it by up to 2.6e-5, which depends on the
    # instructions of the processor, and all gradients by 8.9e-14 where everything is in float64
    "nemotron": Model("tiny_nemotron", overrides=(BIAS,), rounding=3.0),
    # positions beyond the original context; experts in every layer
    "llama": Model("tiny_qwen3", overrides=("model.family=llama", "replay=off"), instead=LLAMA),
    "mixtral": Model("tiny_qwen3", overrides=("model.family=mixtral",), instead=MIXTRAL),
    # biases of query, key and value
    "qwen2": Model("tiny_qwen3", overrides=("model.family=qwen2", "replay=off"), instead=QWEN2),
    # norms over all heads, which tensor-parallel ranks split
    "minimax": Model("tiny_qwen3", overrides=("model.family=minimax_m2", BIAS), instead=MINIMAX_4),
    # matrices stepped by Muon
    "glm muon": Model("tiny", overrides=(BIAS, *MUON)),
    "qwen muon": Model("tiny_qwen3", overrides=MUON),
    "qwen 5 layers": Model("tiny_qwen3", {"num_hidden_layers": 5}),
    "qwen mixed": Model("tiny_qwen3", {"num_hidden_layers": 6, "mlp_only_layers": [0, 3, 5]}),
    # with vision towers: features for the first layers and positions of three axes; or neither
    "qwen vl": Model("tiny_qwen3", overrides=("model.family=qwen3_vl_moe",), instead=QWEN_VL),
    "kimi vl": Model("tiny_qwen3", overrides=("model.family=kimi_k25", BIAS), instead=KIMI_4),
    "kimi vl mtp": Model(
        "tiny_qwen3",
        overrides=("model.family=kimi_k25", BIAS, *MTP, "objective.mtp_detach=false"),
        instead=KIMI_MTP,
    ),
    # adapters on a frozen base: on all linears; of experts that share the factors which face the
    # hidden size, of multi-token prediction and routers; on some of the linears that are fused
    "glm lora": Model("tiny", overrides=LORA),
    "qwen lora": Model("tiny_qwen3", overrides=LORA),
    "glm mtp lora": Model(
        "tiny", {"num_nextn_predict_layers": 1}, (*MTP, *LORA, *SHARED, "lora.targets=" + WITH_GATE)
    ),
    "qwen next lora": Model("tiny_qwen3_next", overrides=LORA, rounding=3.0),
    "mixtral lora": Model(
        "tiny_qwen3", overrides=("model.family=mixtral", *LORA, *SHARED), instead=MIXTRAL
    ),
    "nemotron lora": Model("tiny_nemotron", overrides=LORA),
    "qwen some lora": Model(
        "tiny_qwen3", overrides=(*LORA, *SHARED, "lora.targets=[q_proj, v_proj, up_proj, gate]")
    ),
}


@dataclass(frozen=True)
class Layout:
    """``parallel`` and what else a run is started with, on one of the models."""

    name: str
    overrides: tuple[str, ...]
    model: str = "glm"

    @property
    def title(self) -> str:
        return f"{self.name}, {self.model}"


def _layouts(names: str, *models: str) -> list[Layout]:
    """``tp2 etp1 recompute:full`` and the like, one layout a line, on each of ``models``."""
    found = []
    for line in filter(None, map(str.strip, names.splitlines())):
        found += [Layout(line, tuple(_override(w) for w in line.split()), m) for m in models]
    return found


def _override(word: str) -> str:
    short = {
        "first": "parallel.num_layers_in_first_pipeline_stage",
        "last": "parallel.num_layers_in_last_pipeline_stage",
        "embedding": "parallel.account_for_embedding_in_pipeline_split=true",
        "loss": "parallel.account_for_loss_in_pipeline_split=true",
        "layout": "parallel.pipeline_model_parallel_layout",
        "recompute": "model.recompute",
        "moe_act": "model.recompute_modules=[core_attn,moe_act]",
        "distributed": "optimizer.distributed=true",
        "overlapped": "optimizer.overlap_grad_reduce=true",
        "dynamic": "parallel.dynamic_cp",
        "te": "model.backend=te",
        "attention": "model.te_attention",
        "bias": "model.router_bias_update_rate",
    }
    name, _, value = word.partition(":")
    if name in short:
        return f"{short[name]}={value}" if value else short[name]
    size = name.rstrip("0123456789")
    return f"parallel.{size}={name[len(size) :]}"


STATES = "qwen next"
MAMBA = "nemotron"
BOTH = ("glm", "qwen")
MIXED = ("glm mixed", "qwen mixed")
WITH_LORA = ("glm lora", "qwen lora")
OTHER_LORA = ("glm mtp lora", "qwen some lora")
LAYOUTS = {
    1: [
        *_layouts("recompute:selective\nrecompute:full", *BOTH, "glm mtp", *WITH_LORA, STATES),
        *_layouts("recompute:full", MAMBA),
    ],
    2: [
        *_layouts("dp2\ntp2\ncp2\npp2\ndp2 ep2\npp2 vpp2\ndp2 distributed", *BOTH),
        *_layouts("dp2 overlapped\ndp2 distributed overlapped\ndp2 ep2 distributed", *BOTH),
        *_layouts("tp2 etp1\ntp2 ep2 etp1\ncp2 ep2", *BOTH),
        *_layouts("pp2 recompute:selective moe_act", *BOTH),
        *_layouts("pp2 recompute:full\ncp2 recompute:full", *BOTH),
        *_layouts("pp2 first:1\npp2 last:1\npp2 layout:Et|tttL", *BOTH),
        *_layouts("pp2 layout:Et|t|t|tL vpp2", *BOTH),
        *_layouts("pp2 embedding\npp2 loss", "glm 5 layers", "qwen 5 layers"),
        *_layouts("pp2 embedding loss\npp2 first:4\npp2 vpp3", *MIXED),
        *_layouts("dp2\ntp2\ncp2\npp2\npp2 vpp2\ncp2 recompute:full", "glm mtp"),
        *_layouts("tp2\ncp2\npp2 recompute:full\ndp2 ep2", "glm mtp 2"),
        *_layouts("tp2\ncp2\npp2 vpp2\ndp2 dynamic:2", "glm mtp kept"),
        *_layouts("tp2\ncp2\npp2 vpp2", "qwen next mtp"),
        *_layouts("tp2\ncp2\npp2", "qwen kept"),
        *_layouts("tp2", "glm 384", "glm 384 off"),
        *_layouts("tp2\ncp2\npp2 vpp2", "llama", "qwen2"),
        *_layouts("tp2 ep2 etp1\ncp2\npp2 first:1\ndp2 ep2 dynamic:2", "mixtral"),
        *_layouts("tp2 ep2 etp1\npp2 first:1", "mixtral lora"),
        *_layouts("tp2\ncp2\npp2 first:1\ndp2 ep2\ntp2 ep2 etp1 recompute:full", "minimax"),
        *_layouts("dp2 dynamic:2", *BOTH, "glm mtp", STATES, MAMBA),
        *_layouts("tp2\ncp2 recompute:full\npp2 vpp2\ndp2 ep2\ndp2 distributed overlapped", MAMBA),
        *_layouts("tp2 ep2 etp1\npp2 layout:Ett|t|ttt|ttL vpp2", MAMBA),
        *_layouts("tp2\ncp2\npp2\npp2 vpp2\ndp2 ep2\ndp2 distributed overlapped", STATES),
        *_layouts("tp2\ncp2", STATES + " lora", MAMBA + " lora"),
        *_layouts("tp2 etp1\ncp2 recompute:full", STATES),
        *_layouts("dp2 ep2 dynamic:2 recompute:full", *BOTH),
        *_layouts("tp2\ntp2 ep2 etp1\npp2 vpp2", "glm muon"),
        *_layouts("tp2\ncp2\ndp2 ep2", "qwen muon"),
        *_layouts("dp2\ntp2\ntp2 etp1\ncp2\npp2\npp2 vpp2\ndp2 ep2\ntp2 ep2 etp1", *WITH_LORA),
        *_layouts("dp2 distributed\ndp2 distributed overlapped", *WITH_LORA),
        *_layouts("dp2 ep2 distributed\npp2 recompute:full\ntp2 recompute:full", *WITH_LORA),
        *_layouts("tp2\ntp2 ep2 etp1\ncp2\npp2 recompute:full\ndp2 dynamic:2", *OTHER_LORA),
    ],
    3: [
        *_layouts("dp3 dynamic:3", *BOTH),
    ],
    4: [
        *_layouts("dp4 dynamic:4\ndp2 cp2 dynamic:4\ndp4 ep4 dynamic:4 distributed", *BOTH),
        *_layouts("dp2 pp2 dynamic:2\ndp2 pp2 vpp2 dynamic:2\ndp2 tp2 ep2 dynamic:2", *BOTH),
        *_layouts("dp4 ep2 dynamic:4 recompute:full", "glm mtp", "glm mtp 2"),
        *_layouts("dp4\ntp4\ncp4\npp4\ndp4 ep4\ntp2 pp2\ntp2 cp2\npp2 cp2", *BOTH),
        *_layouts("dp2 pp2 ep2\ncp2 dp2 ep2\npp2 vpp2 cp2", *BOTH),
        *_layouts("cp4\ntp4\ntp2 cp2\npp2 cp2\ndp4 dynamic:4\ndp2 tp2 ep2 dynamic:2", STATES),
        *_layouts("dp2 pp2 vpp2 dynamic:2\ndp4 ep4 dynamic:4 distributed", STATES, MAMBA),
        *_layouts("tp4\ntp2 cp2\npp2 cp2\ndp2 tp2 ep2 dynamic:2", MAMBA),
        *_layouts("tp4 etp1\ntp2 dp2 ep2", *BOTH),
        *_layouts("dp4 distributed overlapped\ndp2 pp2 ep2 distributed overlapped", *BOTH),
        *_layouts("pp2 vpp2 cp2 recompute:full", *BOTH),
        *_layouts("pp4 first:1 last:1\npp4 layout:Ett|t|tt|tL", *MIXED),
        *_layouts("tp2 cp2\npp2 cp2", "glm mtp"),
        *_layouts("tp4 etp1\ntp2 cp2\ntp2 pp2 first:1", "minimax"),
        *_layouts("pp4 layout:Et|tt|tm|L", "glm mtp"),
        *_layouts("tp2 pp2", "glm mtp 2"),
        *_layouts("tp4\ntp2 pp2\ntp2 cp2\ndp2 pp2 ep2\ntp2 dp2 ep2\ntp4 etp1", *WITH_LORA),
        *_layouts("dp2 pp2 ep2 distributed overlapped", *WITH_LORA),
        *_layouts("tp2 dp2 ep2\ndp2 pp2 vpp2 dynamic:2 recompute:full", *OTHER_LORA),
    ],
    6: [
        *_layouts("dp6 dynamic:6\ndp2 cp3 dynamic:6\ndp3 pp2 vpp2 dynamic:3", *BOTH),
        *_layouts("dp3 tp2 dynamic:3 recompute:full", "glm mtp"),
    ],
    8: [
        *_layouts(
            "tp2 pp2 cp2 ep2 etp1\ntp2 pp2 dp2 ep4 etp1\ndp2 pp2 vpp2 cp2 ep4", "glm", "qwen"
        ),
        *_layouts("dp8 ep8\ntp2 cp2 dp2 ep8 etp1 distributed overlapped", *BOTH),
        *_layouts("tp2 pp2 cp2 ep2 etp1 recompute:full", "glm mtp"),
        *_layouts("dp2 tp2 pp2 vpp2 ep2 dynamic:2 recompute:full\ndp8 ep4 dynamic:8", *BOTH),
    ],
}


def compiled(
    model: str, folder: Path, overrides: tuple[str, ...] = (), common: tuple[str, ...] = COMMON
) -> Plan:
    """The plan of a layout, through the compiler; the model's config is written to ``folder``."""
    chosen = MODELS[model]
    path = folder / model.replace(" ", "_") / "config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        read = (CONFIGS / chosen.config / "config.json").read_text
        hf = chosen.instead or json.loads(read()) | chosen.changes
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))
        written.rename(path)
    all_overrides = (f"model.config={path}", *common, *chosen.overrides, *overrides)
    return compile_plan(CONFIGS / f"{chosen.config}.yaml", all_overrides)


def batches(plan: Plan, mtp_routes: bool) -> list[WholeBatch]:
    """One a step: uneven lengths, some below any alignment; fewer samples than ranks; others."""
    g = torch.Generator().manual_seed(0)
    uneven = [1, 1, 2, 60, 3, 7, 31, 1, 12, 5, 2, 23, 1, 17, 4, 9, 44, 6, 1, 8, 3, 2, 15, 10]
    lengths = [uneven, [40, 1, 2], torch.randint(1, 30, (20,), generator=g).tolist()]
    extra = plan.num_mtp_layers if mtp_routes else 0
    layers = plan.router_layers + tuple(plan.sizes.num_hidden_layers + i for i in range(extra))
    return [_batch(plan, seqlens, layers, g) for seqlens in lengths]


def _batch(
    plan: Plan, seqlens: list[int], layers: tuple[int, ...], g: torch.Generator
) -> WholeBatch:
    rows = sum(seqlens)
    sizes = plan.sizes
    scores = torch.rand(rows, len(layers), sizes.num_experts, generator=g)
    tokens = torch.randint(3, sizes.vocab_size, (rows + 1,), generator=g)
    batch = WholeBatch(
        seqlens=tuple(seqlens),
        tokens=tokens[:-1],
        targets=tokens[1:],
        loss_mask=torch.rand(rows, generator=g) > 0.4,
        rollout_logprobs=-4 - torch.rand(rows, generator=g),
        advantages=torch.randn(rows, generator=g),
        routes=scores.argsort(-1)[..., : sizes.topk].to(route_dtype(sizes.num_experts)),
        layer_ids=layers,
        route_mask=torch.rand(rows, generator=g) >= 0.1,
    )
    return replace(batch, kept=random_sets(batch, 20, g)) if plan.trains_on_sampling_mask else batch


@dataclass
class Outcome:
    """The results of one layout; tensors whole, by checkpoint name."""

    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    grads: list[dict[str, torch.Tensor]]
    changes: dict[str, torch.Tensor]
    checked: int = 0
    seconds: float = 0.0


def train_steps(plan: Plan, mtp_routes: bool) -> Outcome:
    """Three steps on this rank, every router probed, nothing of the replay left after each pass."""
    begun = time.perf_counter()
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        loss = build_loss(plan.objective)
        base = None
        if policy.llm.adapters:
            lora.draw_b(policy.llm)
            base = lora.base_digest(policy.llm)
        probe = Probe(policy)
        decoder = [i for i in policy.llm.replay.layers if i < plan.sizes.num_hidden_layers]
        before = trained(policy)
        out = Outcome([], [], [], [], {})
        for batch in batches(plan, mtp_routes):
            schedule = Scheduler(plan).schedule(batch.seqlens)
            probe.expect(batch, schedule, training=False, replay=plan.replay.old)
            old = passes.scores(policy, batch, schedule, plan.replay.old)
            batch = replace(batch, old_logprobs=old.logprobs)
            probe.finish(decoder)
            assert policy.llm.replay.is_clear
            probe.expect(batch, schedule, training=True, replay=plan.replay.train)
            metrics = passes.accumulate(policy, batch, schedule, loss)
            probe.finish([i for i in policy.llm.replay.layers if i in batch.layer_ids])
            assert policy.llm.replay.is_clear
            out.grads.append(gradients(policy))
            metrics |= policy.step_optimizer()
            out.metrics.append(metrics)
            out.losses.append(metrics["loss"])
            out.norms.append(metrics["grad_norm"])
        out.changes = {name: tensor - before[name] for name, tensor in trained(policy).items()}
        if policy.llm.adapters:
            assert lora.base_digest(policy.llm) == base, "the base moved"
            still = [n for n, change in out.changes.items() if ".lora_" in n and not change.any()]
            assert not still, f"factors without a gradient: {still[:4]}"
        checked = torch.tensor(probe.checked)
        torch.distributed.all_reduce(checked)
        out.checked = int(checked)
        out.seconds = time.perf_counter() - begun
    return out


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    """The weights; or the factors of adapters, and the weights with them."""
    if policy.llm.adapters:
        return on_host((lora.factors(policy.llm) | lora.merged(policy.llm)).items())
    return on_host(policy.weights())


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients of the weights, or of the factors of adapters."""
    if policy.llm.adapters:
        return on_host(lora.gradients(policy.llm).items())
    return on_host(policy.gradients())


def on_host(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of tensors in host memory, by name."""
    return {name: tensor.clone().cpu() for name, tensor in named}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what it should be; 0 of 0."""
    off = float((got.double() - want.double()).norm())
    return off / max(float(want.double().norm()), 1e-30) if off else 0.0


def deviations(got: Outcome, want: Outcome) -> dict[str, tuple[float, str]]:
    """Worst deviation a quantity, and where."""
    grads = [
        (apart(mine[name], whole[name]), f"{name}, step {step}")
        for step, (mine, whole) in enumerate(zip(got.grads, want.grads, strict=True))
        for name in whole.keys() | mine.keys()
    ]
    changes = [(apart(got.changes[n], want.changes[n]), n) for n in want.changes | got.changes]
    metrics = [
        (abs(mine[name] - whole[name]), f"{name}, step {step}")
        for step, (mine, whole) in enumerate(zip(got.metrics, want.metrics, strict=True))
        for name in whole.keys() | mine.keys()
        if name not in ("grad_norm", "lr")
    ]
    norms = [(abs(a / b - 1), "") for a, b in zip(got.norms, want.norms, strict=True)]
    worst = {"loss": metrics, "grad": grads, "grad norm": norms, "change": changes}
    return {name: max(found) for name, found in worst.items()}


def on_ranks(group, layouts: list[Layout], folder: Path, device: str = "cpu") -> list[dict]:
    """Every layout on these ranks, one after the other; rows of the table from the first rank."""
    os.environ["WORLD_SIZE"] = str(group.size())
    rows = []
    for layout in layouts:
        mark(layout.title)
        plan = compiled(layout.model, folder, (*layout.overrides, f"device={device}"))
        got = train_steps(plan, MODELS[layout.model].mtp_routes)
        gc.collect()  # the policy's process groups, with their threads
        if group.rank():
            continue
        want = torch.load(folder / f"{layout.model}.pt", weights_only=False)
        rows.append(
            {
                "layout": layout.name,
                "model": layout.model,
                "ranks": group.size(),
                "off": deviations(got, want),
                "checked": got.checked,
                "seconds": got.seconds,
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def reference(group, models: list[str], folder: Path, device: str = "cpu") -> None:
    """The single process' outcome of each model, into ``folder``."""
    for model in models:
        plan = compiled(model, folder, (f"device={device}",))
        outcome = train_steps(plan, MODELS[model].mtp_routes)
        torch.save(outcome, folder / f"{model}.pt")


def line(row: dict) -> str:
    cells = [f"{row['off'][name][0]:9.1e}" for name in BOUNDS]
    title = f"{row['layout']:38s} {row['model']:13s}"
    text = f"{title} {row['ranks']:5d} {' '.join(cells)} {row['checked']:8d} {row['seconds']:6.1f}"
    bad = [f"{name}: {row['off'][name][1]}" for name in beyond(row)]
    return text + (f"   TOO FAR {bad}" if bad else "")


def beyond(row: dict) -> list[str]:
    """The quantities of a row that deviate by more than their bound."""
    bounds = BOUNDS | {"grad": BOUNDS["grad"] * MODELS[row["model"]].rounding}
    return [name for name, bound in bounds.items() if row["off"][name][0] > bound]


def too_far(rows: list[dict]) -> list[str]:
    return [line(row) for row in rows if beyond(row)]


def run(
    layouts: dict[int, list[Layout]], timeout: float = DEADLINE, device: str = "cpu"
) -> list[dict]:
    """Rows of the table: one spawn a world size."""
    rows = list[dict]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = sorted({layout.model for some in layouts.values() for layout in some})
        run_ranks(reference, 1, models, folder, device, timeout=timeout, device=device)
        for size, some in layouts.items():
            found = run_ranks(on_ranks, size, some, folder, device, timeout=timeout, device=device)
            rows += found[0]
    return rows


def markdown(rows: list[dict]) -> str:
    """The table for the documentation."""
    head = ["layout", "model", "ranks", *BOUNDS, "experts checked"]
    lines = [head, ["---"] * 3 + ["---:"] * (len(BOUNDS) + 1)]
    lines.append(["*allowed*", "", "", *(f"{bound:.0e}" for bound in BOUNDS.values()), ""])
    for row in rows:
        off = [f"{row['off'][name][0]:.1e}" for name in BOUNDS]
        title = [f"`{row['layout']}`".replace("|", "\\|"), row["model"], str(row["ranks"])]
        lines.append([*title, *off, str(row["checked"])])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


ONE_WORD = {"qwen next": "qwen-next", "5 layers": "5-layers", "mtp 2": "mtp mtp-2"}


def features(layout: Layout) -> frozenset[str]:
    """The words of a layout's name and of its model: the family, and what differs from it."""
    model = layout.model
    for several, one in ONE_WORD.items():
        model = model.replace(several, one)
    return frozenset([*layout.name.split(), *model.split()])


def feature_pairs(layouts: Iterable[Layout]) -> set[frozenset[str]]:
    """Every feature, and every two features that meet in one of ``layouts``."""
    return {
        frozenset(pair)
        for layout in layouts
        for pair in combinations_with_replacement(sorted(features(layout)), 2)
    }


def pairwise_cover(table: Mapping[int, Sequence[Layout]]) -> dict[int, list[Layout]]:
    """Few layouts of ``table`` in which every two features meet that meet in any of them.

    Greedy: again and again the layout with the most pairs a rank that no chosen one has; then those
    that the others make superfluous go, on the most ranks first.
    """
    every = [(ranks, layout) for ranks, some in table.items() for layout in some]
    pairs = {layout: feature_pairs([layout]) for _, layout in every}
    left = set[frozenset[str]]().union(*pairs.values())
    chosen = list[tuple[int, Layout]]()
    while left:
        best = max(every, key=lambda each: len(pairs[each[1]] & left) / each[0])
        chosen.append(best)
        left -= pairs[best[1]]
    for each in sorted(chosen, key=lambda each: -each[0]):
        others = [pairs[layout] for _, layout in chosen if layout != each[1]]
        if pairs[each[1]] <= set[frozenset[str]]().union(*others):
            chosen.remove(each)
    return {ranks: [layout for n, layout in chosen if n == ranks] for ranks in table}


def with_titles(table: dict[int, list[Layout]], titles: Sequence[str]) -> dict[int, list[Layout]]:
    """The layouts of ``table`` with exactly these titles.

    Raises: ValueError for a title that no layout has.
    """
    known = {layout.title for some in table.values() for layout in some}
    if missing := sorted(set(titles) - known):
        raise ValueError(f"parity: no layout has the title {missing}, expected some of LAYOUTS")
    return {ranks: [x for x in some if x.title in titles] for ranks, some in table.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="world sizes")
    parser.add_argument("--pairs", action="store_true", help="only enough that all pairs meet")
    parser.add_argument("--only", default="", help="layouts whose title contains this")
    parser.add_argument("--titles", nargs="+", help="layouts with exactly these titles")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: over NCCL")
    parser.add_argument("--write", type=Path, help="put the rows into this file, as a table")
    options = parser.parse_args(arguments)
    chosen = {n: [x for x in LAYOUTS[n] if options.only in x.title] for n in options.ranks}
    if options.titles:
        chosen = with_titles(chosen, options.titles)
    if options.pairs:
        chosen = pairwise_cover(chosen)
    cells = " ".join(f"{name:>9s}" for name in BOUNDS)
    print(f"{'layout':38s} {'model':13s} ranks {cells}  experts  seconds", flush=True)
    rows = run({n: some for n, some in chosen.items() if some}, device=options.device)
    if options.write:
        options.write.write_text(markdown(rows))
    bounds = " ".join(f"{bound:9.1e}" for bound in BOUNDS.values())
    print(f"{'allowed':58s} {bounds}")
    bad = too_far(rows)
    print(f"{len(rows)} layouts, {len(bad)} too far from one process")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
