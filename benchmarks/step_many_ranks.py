"""A wide MoE step next to megatron's experts: `python -m benchmarks.step_many_ranks [--rounds N]`.

Scores and an update of 8,192 tokens by three layers with experts, 4 of 64 a token, hidden 512,
width 256, attention and the layer without experts as narrow as the demo's: with the experts and
dispatcher of this package; with megatron's ``SequentialMLP`` and its permutation; and with these,
torch's norms, and the optimizer as megatron builds it: torch's AdamW in a dozen passes over all
weights. Weights and routes are equal, and everything else is the same. They take turns in one
process on one thread; the clock is the processor's, the fastest of the rounds counts.

The floor is the matrix products and attention alone: what else a step does could become free, and
it would still take that long. Prints what else takes time, too.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases_experts import fill
from benchmarks.configs import TINY, hf_config, write_config
from benchmarks.end_to_end import batch_of
from benchmarks.measure import in_turns, near
from benchmarks.tables import show
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron import expert_rows, grouped_experts
from pyrl_ext.megatron.ddp import unwrap
from pyrl_ext.megatron.local_layers import ResidualNorm, RMSNorm
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.schedule import Schedule, plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.passes import WholeBatch

EXPERTS = 64
TOP_K = 4
LAYERS = (1, 2, 3)
WIDE = {
    **{"hidden_size": 512, "moe_intermediate_size": 256},
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K},
}
PRODUCTS = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}


class Spent(TorchDispatchMode):
    """Processor seconds of each operator inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = defaultdict[str, float](float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = process_time()
        out = func(*args, **(kwargs or {}))
        self.seconds[func._schema.name.partition("::")[2]] += process_time() - start
        return out

    def products(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name in PRODUCTS)


def wide_plan(folder: str, tokens: int) -> Plan:
    return compile_plan(
        TINY,
        [
            write_config(folder, hf_config("tiny") | WIDE),
            f"run={folder}/run",
            "log.progress=false",
            f"batching.tokens_per_microbatch={tokens}",
            "batching.minibatches=1",
        ],
    )


def random_batch(tokens: int) -> WholeBatch:
    """Sequences of 512 tokens whose routes are drawn evenly."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, len(LAYERS), EXPERTS, generator=g)
    length = min(512, tokens)
    return batch_of(
        (length,) * (tokens // length),
        WholeBatch,
        tokens=torch.randint(3, 128, (tokens,), generator=g),
        targets=torch.randint(3, 128, (tokens,), generator=g),
        loss_mask=torch.rand(tokens, generator=g) > 0.4,
        rollout_logprobs=-4 - torch.rand(tokens, generator=g),
        advantages=torch.randn(tokens, generator=g),
        routes=scores.topk(TOP_K).indices.to(torch.uint8),
        layer_ids=LAYERS,
    )


@contextmanager
def megatrons() -> Iterator[None]:
    """Models built inside have megatron's experts and dispatcher."""
    experts = LocalSpecProvider().grouped_mlp_modules(False)
    with ExitStack() as stack:
        stack.enter_context(patch.object(grouped_experts, "GroupedExperts", experts))
        stack.enter_context(patch.object(expert_rows, "RowMoELayer", MoELayer))
        yield


def build_pair(plan: Plan, topo: Any) -> dict[str, Policy]:
    """Policies with our experts and with megatron's, of equal weights."""
    ours = Policy.build(plan, topo)
    with megatrons():
        theirs = Policy.build(plan, topo)
    left, right = (unwrap(each.llm.models[0]) for each in (ours, theirs))
    found = dict(right.named_parameters())
    with torch.no_grad():
        for name, weight in left.named_parameters():
            if name in found:
                found[name].copy_(weight)
        for name, module in right.named_modules():
            if isinstance(module, SequentialMLP):
                _fill(module, left.get_submodule(name))
    for policy in (ours, theirs):
        policy.llm.optimizer.reload_model_params()
    return {"ours": ours, "megatron's experts": theirs}


def _fill(theirs: Any, ours: Any) -> None:
    """megatron's experts get our weights, and run as megatron runs them without this package."""
    theirs.config.bias_activation_fusion = False
    fill(theirs, ours)
    for expert in theirs.local_experts:
        expert.linear_fc1.gradient_accumulation_fusion = False
        expert.linear_fc2.gradient_accumulation_fusion = False


def experts_of(policy: Policy, tokens: int) -> Callable[[], list[Tensor]]:
    """Forward and backward of one layer's experts and its dispatcher, without router."""
    model: Any = unwrap(policy.llm.models[0])
    layer = model.decoder.layers[-1].mlp
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter(1, ids, True)
    hidden, grad = torch.randn(2, tokens, 1, WIDE["hidden_size"], generator=g)
    weights = torch.rand(tokens, EXPERTS, generator=g) * chosen

    def run() -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        probs = weights.clone().requires_grad_()
        dispatcher = layer.token_dispatcher
        rows, of_rows = dispatcher.dispatch_preprocess(x, chosen, probs)
        rows, of_rows = dispatcher.token_dispatch(rows, of_rows)
        rows, counts, of_rows = dispatcher.dispatch_postprocess(rows, of_rows)
        out, _ = layer.experts(rows, counts, of_rows)
        out = dispatcher.token_combine(dispatcher.combine_preprocess(out))
        out = dispatcher.combine_postprocess(out)
        out.backward(grad)
        assert x.grad is not None
        return [out.detach(), x.grad]

    return run


def step_of(
    policy: Policy, batch: WholeBatch, schedule: Schedule, fused: bool = True
) -> Callable[[], list[Tensor]]:
    """Old log-probs of the batch, and an update on it; ``fused``: with this package's norms, and
    AdamW as it builds it; otherwise with torch's norms, and AdamW in passes."""
    loss = build_loss(policy.plan.objective)

    def run() -> list[Tensor]:
        for group in policy.llm.optimizer.param_groups:
            group["fused"] = fused
        with ExitStack() as stack:
            for norm in (RMSNorm, ResidualNorm) * (not fused):
                stack.enter_context(patch.object(norm, "forward", torch.nn.RMSNorm.forward))
            old = passes.scores(policy, batch, schedule, True)
            passes.update(policy, replace(batch, old_logprobs=old.logprobs), schedule, loss)
        return [old.logprobs]

    return run


def compare(
    runs: Mapping[str, Callable[[], list[Tensor]]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each in turns, then one call of each operator by operator.

    Raises: ValueError: they compute different things.
    """
    first = {name: run() for name, run in [*runs.items()][:2]}  # also warms up
    if not near(*first.values(), bound=1e-4):
        raise ValueError("step_many_ranks: the results differ, expected the same up to 1e-4")
    times = in_turns(runs.values(), rounds, warm=0, clock=process_time)
    found = {}
    for (name, run), seconds in zip(runs.items(), times, strict=True):
        with Spent() as spent:
            run()
        found[name] = {"seconds": min(seconds), "all": seconds, "spent": spent}
    return found


def show_times(title: str, found: Mapping[str, dict[str, Any]]) -> None:
    ours = found["ours"]
    rows = []
    for name, each in found.items():
        products = each["spent"].products()
        numbers = each["seconds"], products, each["seconds"] - products
        rows.append((name, *(f"{x:.3f}" for x in numbers)))
    show(("", "s", "of it products", "the rest"), rows, width=120, title=title)
    for name, each in [*found.items()][1:]:
        pairs = sorted(b / a for a, b in zip(ours["all"], each["all"], strict=True))
        limit = each["seconds"] / ours["spent"].products()
        print(
            f"ours is {each['seconds'] / ours['seconds']:.2f} times as fast as {name} (pairs "
            f"{pairs[0]:.2f} to {pairs[-1]:.2f}); its products alone allow {limit:.2f}"
        )
    for name, each in found.items():
        spent = sorted(each["spent"].seconds.items(), key=lambda item: -item[1])
        rest = [(n, s) for n, s in spent if n not in PRODUCTS]
        line = ", ".join(f"{n} {1e3 * s:.0f}" for n, s in rest[:12])
        print(f"{name}, without matrix products [ms]: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_many_ranks", description=__doc__
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        plan = wide_plan(folder, args.tokens)
        with topology.start(plan) as topo:
            pair = build_pair(plan, topo)
            experts = {name: experts_of(policy, args.tokens) for name, policy in pair.items()}
            sizes = f"{EXPERTS} experts of 512 x 256, {args.tokens} tokens"
            title = f"experts and dispatcher, both passes: {sizes}"
            show_times(title, compare(experts, args.rounds))
            batch = random_batch(args.tokens)
            schedule = plan_microbatches(batch.seqlens, 1, args.tokens, 1)
            steps = {name: step_of(policy, batch, schedule) for name, policy in pair.items()}
            last = [*pair][-1]
            steps[f"{last}, norms, AdamW"] = step_of(pair[last], batch, schedule, fused=False)
            title = f"scores and update, three such layers: {sizes}"
            show_times(title, compare(steps, args.rounds))


if __name__ == "__main__":
    main()
