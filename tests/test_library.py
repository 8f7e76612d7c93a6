"""The examples of docs/library.md run as they stand, and do what the page says."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrl_ext import pack, schedule
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

PAGE = Path(__file__).parents[1] / "docs/library.md"
LAYERS = 4
EXPERTS = 8
TOPK = 2
LENGTH = 16
MICROBATCHES = 4


@cache
def example(section: str) -> str:
    """The Python block below a heading of the page."""
    _, _, text = PAGE.read_text("utf-8").partition(f"\n## {section}\n")
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block, section
    return block[1]


def run(section: str, **names: Any) -> dict[str, Any]:
    """The names that an example leaves behind."""
    exec(compile(example(section), f"library.md, {section}", "exec"), names)
    return names


# Routing replay -----------------------------------------------------------------------------------


def start_megatron() -> None:
    """Two pipeline ranks with two virtual stages each, on a CPU."""
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from pyrl_ext.megatron import cpu

    cpu.install()
    # megatron makes it on a GPU; the trainer here uses other attention
    fused_softmax.get_default_causal_mask = lambda rows: torch.ones(rows, rows).triu(1).bool()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    model_parallel_cuda_manual_seed(7)


def model_chunks_of_rank(recompute: bool) -> list[Any]:
    """Two chunks of a model of four layers with experts, of which every rank of two has two."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    chunks = []
    for stage in range(2):
        place: dict[str, Any] = dict(ignore_virtual=False, vp_stage=stage)
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False),
            vocab_size=64,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=stage,
        )
        chunk.model_type = None
        chunks.append(chunk)
    return chunks


def batches() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(MICROBATCHES):
        routes = torch.rand(1, LENGTH, LAYERS, EXPERTS, generator=draw).argsort(-1)[..., :TOPK]
        tokens = torch.randint(64, (1, LENGTH), generator=draw)
        has_route = torch.ones(1, LENGTH, dtype=torch.bool)
        has_route[0, -1] = False
        found.append(
            {
                "routed_experts": routes,
                "attention_mask": torch.ones(1, LENGTH),
                "has_route": has_route,
                "tokens": tokens,
                "positions": torch.arange(LENGTH)[None],
                "targets": tokens.roll(-1, 1),
            }
        )
    return found


class Keep:
    """A hook that appends a router's map of tokens to experts to a list."""

    def __init__(self, maps: list[torch.Tensor]):
        self.maps = maps

    def __call__(self, _module: Any, _arguments: Any, output: tuple[Any, torch.Tensor]) -> None:
        self.maps.append(output[1])


def replayed_on_rank(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Without and with recomputation."""
    start_megatron()
    return [replayed(recompute) for recompute in (False, True)]


def replayed(recompute: bool) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = model_chunks_of_rank(recompute)
    used: dict[int, list[torch.Tensor]] = {}
    for chunk in chunks:
        for router in chunk.modules():
            if isinstance(router, TopKRouter):
                assert router.layer_number is not None
                used[router.layer_number - 1] = maps = []
                router.register_forward_hook(Keep(maps))
    names = run(
        "Routing replay",
        model_chunks=chunks,
        iterators=[iter(batches()) for _ in chunks],
        forward_backward_func=get_forward_backward_func(),
    )
    gradient = chunks[0].decoder.layers[0].mlp.router.weight.grad
    return {
        "layers": names["replay"].layers,
        "clear": names["replay"].is_clear,
        "used": {layer: torch.stack(maps) for layer, maps in used.items()},
        "losses": len(names["losses"]),
        "trained": bool(gradient.abs().sum() > 0),
    }


def test_routing_replay_runs_with_virtual_pipeline_stages():
    first, last = run_ranks(replayed_on_rank, 2)
    for passes, results in enumerate(zip(first, last, strict=True), 1):
        check_replayed(*results, passes)


def check_replayed(first: dict[str, Any], last: dict[str, Any], passes: int) -> None:
    assert (first["layers"], last["layers"]) == ((0, 2), (1, 3))
    assert (first["losses"], last["losses"]) == (0, MICROBATCHES)
    wanted = [batch["routed_experts"][0] for batch in batches()]
    for rank in (first, last):
        assert rank["clear"] and rank["trained"]
        for layer, maps in rank["used"].items():
            assert len(maps) == MICROBATCHES * passes
            # interleaved stages and recomputation mix the order: every pass is one microbatch's
            seen = [match(used, wanted, layer) for used in maps]
            assert sorted(seen) == sorted([*range(MICROBATCHES)] * passes)


def match(used: torch.Tensor, wanted: list[torch.Tensor], layer: int) -> int:
    """The microbatch whose routes a pass used; the last token's are the router's own."""
    assert (used.sum(1) == TOPK).all()
    for number, routes in enumerate(wanted):
        given = torch.zeros(LENGTH, EXPERTS, dtype=torch.bool).scatter_(1, routes[:, layer], True)
        if torch.equal(used[:-1], given[:-1]):
            return number
    raise AssertionError(f"a pass of layer {layer} used the routes of no microbatch")


# The others ---------------------------------------------------------------------------------------


def packed_on_rank(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, str]:
    tokens = torch.arange(2900)
    rows = pack.TokenLayout((700, 300, 1900), cp_size=2, tp_size=4).rows(group.rank())
    said = io.StringIO()
    with redirect_stdout(said):
        names = run(
            "Packed sequences",
            tokens=tokens,
            cp_rank=group.rank(),
            local_values=10 * rows,
            cp_group=group,
        )
    local = names["local_tokens"]
    assert torch.equal(local[rows >= 0], rows[rows >= 0])
    return names["values"], local, said.getvalue()


def test_packed_sequences_place_every_token_once():
    for rank, (values, local, said) in enumerate(run_ranks(packed_on_rank, 2)):
        assert torch.equal(values, 10 * torch.arange(2900))
        assert local.shape == (1456,)
        assert said == f"rank {rank} computes 1456 rows of 2912\n"


def logprobs_on_rank(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 16, generator=draw)
    head = torch.randn(1024, 16, generator=draw)
    part = slice(512 * group.rank(), 512 * (group.rank() + 1))
    leaf = head[part].clone().requires_grad_()
    names = run(
        "Log-probs over a sharded vocabulary",
        logits=hidden @ leaf.T,
        targets=torch.arange(24) * 40,
        tp_group=group,
        advantages=torch.linspace(-1, 1, 24),
        hidden=hidden,
        head_weight=head[part],
    )
    exact = head.double().requires_grad_()
    logits = (hidden.double() @ exact.T)[:, :1000] / 0.9
    log_p = logits.log_softmax(-1)
    logprobs = log_p[torch.arange(24), torch.arange(24) * 40]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (-(torch.linspace(-1, 1, 24) * logprobs).sum() - 0.001 * entropy.sum()).backward()
    assert leaf.grad is not None and exact.grad is not None
    return (
        names["logprobs"] - logprobs,
        names["entropy"] - entropy,
        leaf.grad - exact.grad[part],
    )


def test_logprobs_and_their_gradient_equal_float64():
    for errors in run_ranks(logprobs_on_rank, 2, preload=()):
        for error in errors:
            assert error.abs().max() < 1e-4


def test_dynamic_context_parallelism_plans_all_samples(capsys: pytest.CaptureFixture[str]):
    plan = run("Dynamic context parallelism")["plan"]
    assert isinstance(plan, schedule.Schedule)
    assert sorted(plan.samples) == [0, 1, 2, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(plan) + 1
    assert lines[0].startswith("microbatch 0: samples (")
    assert 1 <= float(lines[-1].split()[0]) < 2
