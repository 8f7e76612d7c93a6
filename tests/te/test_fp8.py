"""Products in 8 bits by TransformerEngine's reference quantizers: rows, replay, weights."""

from dataclasses import replace

import pytest
import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from tests.helpers import passes
from tests.helpers.probe import Probe
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, QWEN3, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

BF16 = (
    "model.backend=te",
    "model.dtype=bfloat16",
    "batching.tokens_per_microbatch=80",
    "rollout.max_new_tokens=8",
)
FP8 = (*BF16, "model.fp8=tensorwise")


def one_step(*overrides, config=CONFIG):
    """Log-probs, metrics and gradients of a step whose routers are probed, on this rank."""
    plan = tiny_plan(*overrides, config=config)
    batch = random_batch(20)
    with passes.built(plan) as policy:
        schedule = Scheduler(plan).schedule(batch.seqlens)
        assert len(schedule) > 2  # several microbatches in flight
        probe = Probe(policy)
        probe.expect(batch, schedule, training=False)
        scores = passes.scores(policy, batch, schedule)
        probe.finish(policy.llm.replay.layers)
        ready = replace(batch, old_logprobs=scores.logprobs)
        probe.expect(batch, schedule, training=True)
        metrics = passes.accumulate(policy, ready, schedule, build_loss(plan.objective))
        probe.finish(policy.llm.replay.layers)
        assert policy.llm.replay.is_clear
        gradients = {name: grad.clone() for name, grad in policy.gradients()}
        metrics |= policy.step_optimizer()
    return scores.logprobs, metrics, gradients


def on_rank(group):
    layouts = {
        "pp2": ("parallel.pp=2",),
        "pp2 full": ("parallel.pp=2", "model.recompute=full"),
        "pp2 vpp2 selective": ("parallel.pp=2", "parallel.vpp=2", "model.recompute=selective"),
        "cp2 full": ("parallel.cp=2", "model.recompute=full"),
        "cp2 attention": ("parallel.cp=2", "model.te_attention=p2p"),
    }
    found = {name: one_step(*FP8, *more) for name, more in layouts.items()}
    experts = ("parallel.ep=2", "parallel.etp=1")
    return found | {"qwen tp2": one_step(*FP8, "parallel.tp=2", *experts, config=QWEN3)}


@pytest.fixture(scope="module")
def two():
    return run_ranks(on_rank, 2)[0]


@pytest.mark.parametrize("name", ["pp2 full", "pp2 vpp2 selective"])
def test_take_replays_the_right_microbatch_when_te_recomputes(two, name):
    """Each recomputation used its own microbatch's routes (the probe looks at every router), so it
    changes nothing."""
    (logprobs, metrics, gradients), want = two[name], two["pp2"]
    assert (logprobs - want[0]).abs().max() < 2e-2
    assert metrics["grad_norm"] == pytest.approx(want[1]["grad_norm"], rel=0.02)
    assert max(off(gradients[n], grad) for n, grad in want[2].items() if grad.any()) < 0.05


@pytest.mark.parametrize("name", ["qwen tp2", "cp2 full", "cp2 attention", "pp2"])
def test_layouts_under_fp8_are_close_to_one_process(two, name):
    """Not equal: a tensor's scale is of the rows and columns that a rank has."""
    config = QWEN3 if name.startswith("qwen") else CONFIG
    alone, (logprobs, metrics, _) = one_step(*FP8, config=config), two[name]
    assert (logprobs - alone[0]).abs().mean() < 0.04
    assert metrics["grad_norm"] == pytest.approx(alone[1]["grad_norm"], rel=0.05)


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["tiny", "tiny_qwen3"])
def test_fp8_is_near_bfloat16(config, capsys):
    """Log-probs of both, and their gradients; `make test-te` shows how far they are apart."""
    wide, narrow = (one_step(*given, config=config) for given in (BF16, FP8))
    apart = (wide[0] - narrow[0]).abs()
    each = torch.tensor([off(narrow[2][n], g) for n, g in wide[2].items() if g.any()])
    with capsys.disabled():
        print(
            f"\nfp8 by reference quantizers against bfloat16: log-probs differ by "
            f"{apart.mean():.4f} in the mean, {apart.max():.3f} at most; gradient norms "
            f"{narrow[1]['grad_norm']:.3f} and {wide[1]['grad_norm']:.3f}; a tensor's gradient by "
            f"{each.median():.3f} of its norm in the median, {each.max():.3f} at most"
        )
    assert 1e-3 < apart.mean() < 0.06 and apart.max() < 0.5
    assert narrow[1]["grad_norm"] == pytest.approx(wide[1]["grad_norm"], rel=0.1)


def test_weights_under_fp8_are_those_of_bfloat16():
    """Publishing, digests and offloading see 16 bits, and products use what was loaded last:
    TransformerEngine keeps the 8-bit copies that it made."""
    batch = random_batch(9)
    plan = tiny_plan(*FP8)
    with passes.built(plan) as policy:
        schedule = Scheduler(plan).schedule(batch.seqlens)
        first = passes.step(policy, batch, schedule)[0].logprobs
        updated = {name: tensor.clone() for name, tensor in policy.weights()}
        after = passes.scores(policy, batch, schedule).logprobs
        for part in ("weights", "gradients", "optimizer"):
            policy.llm.offload(part)
        policy.llm.onload()
        back = {name: tensor.clone() for name, tensor in policy.weights()}
        again = passes.scores(policy, batch, schedule).logprobs
    kept = {tensor.dtype for name, tensor in updated.items() if not name.endswith("bias")}
    assert kept == {torch.bfloat16}
    assert all(torch.equal(back[name], tensor) for name, tensor in updated.items())
    assert torch.equal(after, again) and not torch.equal(first, after)
    with passes.built(plan) as fresh:
        live = dict(fresh.weights())
        assert fresh.llm.table and live.keys() == updated.keys()
        with torch.no_grad():
            for name, tensor in updated.items():
                live[name].copy_(tensor)
        assert torch.equal(passes.scores(fresh, batch, schedule).logprobs, after)


def off(got, want) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-12))
