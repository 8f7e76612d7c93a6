"""The experts a router uses are the experts the samples say, in every pass and also recomputed."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.end_to_end import microbatch, shard_at
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.replay import Replay, RoutedExperts
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.tiny import (
    CONFIG,
    EXPERTS,
    LAYERS,
    QWEN3,
    TOPK,
    random_batch,
    schedule_of,
    tiny_plan,
)

pytestmark = pytest.mark.multiprocess

RECOMPUTE = ["none", "selective", "full"]


class Probe:
    """Records the routing map each live router hands to megatron's dispatcher."""

    def __init__(self, policy):
        from megatron.core.transformer.moe.router import TopKRouter

        self.used = defaultdict(list)  # layer id -> [routing map [M, E] of each forward]
        for module in policy.llm.chunks[0].modules():
            if isinstance(module, TopKRouter):
                assert module.layer_number is not None
                module.register_forward_hook(self._note(module.layer_number - 1))

    def _note(self, layer):
        def hook(_module, _args, output):
            self.used[layer].append(output[1].detach().clone())

        return hook


def expected_map(batch, micro, layer):
    """[M, E] bool by a plain loop: routes of the row's token; None where the router chooses."""
    rows = []
    for m, row in enumerate(micro.rows.tolist()):
        if row < 0:
            ids = [(m * TOPK + j) % EXPERTS for j in range(TOPK)]
        elif batch.route_mask[row]:
            ids = batch.routes[row, batch.layer_ids.index(layer)].tolist()
        else:
            rows.append(None)
            continue
        rows.append([e in ids for e in range(EXPERTS)])
    return rows


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_use_forces_the_given_ids(recompute):
    plan = tiny_plan(f"model.recompute={recompute}")
    batch = random_batch(12)
    with passes.built(plan) as policy:
        probe = Probe(policy)
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        batch = replace(batch, old_logprobs=torch.zeros(len(batch.tokens)))
        passes.update(policy, batch, schedule, build_loss(plan.objective))
        micros = [
            microbatch(batch, g.samples, policy.topo.place()) for (g,) in schedule.microbatches
        ]
    times = 1 if recompute == "none" else 2
    for layer in LAYERS:
        assert len(probe.used[layer]) == times * len(micros)
        # without pipelining each microbatch's backward (and recomputation) follows its forward
        for i, micro in enumerate(micros):
            for used in probe.used[layer][times * i : times * (i + 1)]:
                assert (used.sum(-1) == TOPK).all()
                for got, want in zip(used.tolist(), expected_map(batch, micro, layer), strict=True):
                    assert want is None or got == want


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (CONFIG, {}),
        (QWEN3, {}),
        (CONFIG, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
        # tokens above an expert's capacity are dropped by megatron (the plan refuses this field)
        (CONFIG, {"moe_expert_capacity_factor": 0.5}),
    ],
    ids=["sigmoid with bias", "softmax", "groups", "capacity"],
)
def test_use_routes_as_megatron_does(config, fields):
    """One kernel in the place of megatron's function gives the same bits and the same gradient, of
    given experts and of those that the router chooses."""
    from megatron.core.transformer.moe.router import TopKRouter

    plan = tiny_plan(config=config)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"megatron": fields})})
    with passes.built(plan) as policy:
        given = []
        for unrouted in (0.0, 0.3):
            batch = random_batch(6, unrouted=unrouted)
            prefetch = passes.prefetch(policy, batch, schedule_of([range(6)]), replayed=True)
            _, ready = next(prefetch.microbatches(0))
            given.append(ready.routes)
        every, some = given
        assert every is not None and every.use is None
        assert some is not None and some.use is not None
        replay = policy.llm.replay
        routers = [m for m in policy.llm.chunks[0].modules() if isinstance(m, TopKRouter)]
        hooks = dict(zip(routers, replay.hooks[0], strict=True))
        for router, routes, counting in product(routers, (every, some, None), (False, True)):
            hook = hooks[router]
            if router.expert_bias is not None:
                router.expert_bias.normal_()
            rows = len(ready.micro.rows if routes is None else routes.of_layers(LAYERS)[0].ids)
            logits = torch.randn(rows, 1, plan.sizes.num_experts)
            found = []
            for routing in (router.routing, lambda x, r=router: TopKRouter.routing(r, x)):
                hook.counts.zero_()
                hook.counting = counting
                replay.use(0, routes)
                hook.take(rows, router.topk)  # megatron's function alone takes none
                leaf = logits.clone().requires_grad_()
                probs, routing_map = routing(leaf)
                (grad,) = torch.autograd.grad(probs.square().sum(), leaf)
                found.append((probs, routing_map, hook.counts.tolist(), grad))
            (ours, our_map, our_counts, our_grad), (theirs, their_map, their_counts, their_grad) = (
                found
            )
            assert torch.equal(ours, theirs) and torch.equal(our_map, their_map)
            assert our_counts == their_counts and any(our_counts) == (
                counting and routes is not None
            )
            torch.testing.assert_close(our_grad, their_grad, rtol=1e-6, atol=1e-7)
            hook.counting = False
        replay.use(0, None)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_session_counts_a_recomputed_row_once(recompute):
    plan = tiny_plan(f"model.recompute={recompute}", "batching.minibatches=1")
    assert plan.scores_in_update
    batch = random_batch(8, unrouted=0.0)
    with passes.built(plan) as policy:
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        passes.update(policy, batch, schedule, build_loss(plan.objective))
        assert policy.scored is not None
        agreement = policy.scored.agreement
    assert {found.rows for found in agreement.values()} == {len(batch.tokens)}


@pytest.mark.parametrize("replayed", [True, False])
def test_use_leaves_padding_out_of_the_counts(replayed):
    """Padding is spread over the experts, and neither agrees with the router nor counts as a row;
    tokens without a route go where the router sends them."""
    from megatron.core.transformer.moe.router import TopKRouter

    plan = tiny_plan()
    batch = random_batch(4, unrouted=0.3)
    shard = shard_at(batch, range(4), RankCoords(), tile_rows=16)
    micro = Microbatch.of(shard, 0, RankCoords())
    rows = micro.rows.tolist()
    assert min(rows) < 0 and not batch.route_mask.all()
    with passes.built(plan) as policy:
        replay = policy.llm.replay
        chunk = policy.llm.chunks[0]
        routers = [m for m in chunk.modules() if isinstance(m, TopKRouter)]
        with replay.session(counting=True), torch.no_grad():
            layers = replay.layers_to_replay(shard.role.layers) if replayed else ()
            upload = Upload(policy.topo.device)
            routes = RoutedExperts.of(shard, micro.at_router, layers, *replay.sizes, upload)
            for hook, router in zip(replay.hooks[0], routers, strict=True):
                logits = torch.randn(len(rows), 1, EXPERTS)
                native = router.routing(logits)[1]
                replay.use(0, routes)
                used = router.routing(logits)[1]
                wanted = expected_map(batch, micro, hook.layer_id)
                counts = torch.zeros(4)
                for m, row in enumerate(rows):
                    want = wanted[m] if replayed or row < 0 else None
                    assert used[m].tolist() == (native[m].tolist() if want is None else want)
                    if row >= 0 and want is not None:
                        both = int((native[m] & used[m]).sum())
                        counts += torch.tensor([both, both == TOPK, 1, TOPK])
                assert torch.equal(hook.counts.float(), counts)
                replay.use(0, None)


def test_use_lets_the_router_choose_for_tokens_without_a_route():
    """With no route at all, a replayed pass is the native one."""
    plan = tiny_plan()
    batch = random_batch(8, unrouted=1.1)
    schedule = plan_microbatches(batch.seqlens, 1, 128)
    with passes.built(plan) as policy:
        replayed = passes.scores(policy, batch, schedule, replay=True)
        native = passes.scores(policy, batch, schedule, replay=False)
    assert torch.equal(replayed.logprobs, native.logprobs)
    assert not replayed.agreement


def test_agreement_counts_what_the_router_would_have_chosen():
    """Replaying the router's own choice agrees fully; one wrong expert of two agrees by half."""
    plan = tiny_plan()
    batch = random_batch(8, unrouted=0.0)
    schedule = plan_microbatches(batch.seqlens, 1, 4096)
    with passes.built(plan) as policy:
        probe = Probe(policy)
        passes.scores(policy, batch, schedule, replay=False)
        assert batch.routes is not None
        own = torch.stack([probe.used[layer][0].int().topk(TOPK).indices for layer in LAYERS], 1)
        order = microbatch(batch, schedule.samples, policy.topo.place()).rows
        routes = torch.empty_like(batch.routes)
        routes[order] = own.to(torch.uint8)
        own_scores = passes.scores(policy, replace(batch, routes=routes), schedule)
        half = routes.clone()
        wrong = torch.arange(EXPERTS, dtype=torch.uint8)[:, None, None, None] == routes
        free = (~wrong.any(-1)).int().argmax(0).to(torch.uint8)  # an expert not chosen
        half[:, 0, 1] = free[:, 0]
        half_scores = passes.scores(policy, replace(batch, routes=half), schedule)
    rows = len(batch.tokens)
    assert own_scores.agreement == {layer: (rows, rows, rows) for layer in LAYERS}
    assert half_scores.agreement[1] == (rows / 2, 0, rows)


def test_use_keeps_the_gradient_of_the_gate():
    plan = tiny_plan()
    batch = random_batch(8, unrouted=0.0)
    batch = replace(batch, old_logprobs=torch.zeros(len(batch.tokens)))
    with passes.built(plan) as policy:
        before = {n: t.clone() for n, t in policy.weights() if n.endswith("mlp.gate.weight")}
        passes.update(
            policy, batch, plan_microbatches(batch.seqlens, 1, 64), build_loss(plan.objective)
        )
        after = dict(policy.weights())
    assert len(before) == len(LAYERS)
    for name, weight in before.items():
        assert (after[name] != weight).all(), name


def test_session_leaves_no_state_after_an_exception():
    plan = tiny_plan("model.recompute=full")
    batch = random_batch(8)
    batch = replace(batch, old_logprobs=torch.zeros(len(batch.tokens)))
    schedule = plan_microbatches(batch.seqlens, 1, 64)

    def fails(logprobs, entropy, inputs):
        raise ArithmeticError("in the middle of the schedule")

    with topology.start(plan) as topo:
        policy, other = (Policy.build(plan, topo) for _ in range(2))
        clean = passes.scores(other, batch, schedule).logprobs
        with pytest.raises(ArithmeticError):
            passes.update(policy, batch, schedule, fails)
        for hook in policy.llm.replay._all():
            assert hook.current is None and not hook.for_recompute
        assert torch.equal(passes.scores(other, batch, schedule).logprobs, clean)
        assert torch.equal(passes.scores(policy, batch, schedule).logprobs, clean)


def test_prepare_refuses_missing_layers():
    plan = tiny_plan()
    batch = random_batch(4)
    with passes.built(plan) as policy:
        assert batch.routes is not None
        batch = replace(batch, routes=batch.routes[:, :2], layer_ids=LAYERS[:2])
        with pytest.raises(ValueError, match=r"layers \[3\] have a router but no routes"):
            passes.scores(policy, batch, plan_microbatches(batch.seqlens, 1, 128))
        with pytest.raises(ValueError, match="samples carry no routes"):
            passes.scores(
                policy,
                replace(batch, routes=None),
                plan_microbatches(batch.seqlens, 1, 128),
                replay=True,
            )


def test_use_takes_a_chunk_by_number_or_itself():
    with passes.built(tiny_plan()) as policy:
        (chunk,) = policy.llm.chunks
        found = Replay(policy.llm.chunks)
        assert found.device == policy.topo.device
        (hook, *_) = found.hooks[0]
        routes = torch.arange(EXPERTS).repeat(4, len(LAYERS), 1)[..., :TOPK]
        taken = RoutedExperts.from_ragged(
            routes, [4], num_experts=EXPERTS, layer_ids=LAYERS, layers=found.layers
        )
        for number in (0, chunk):
            found.use(number, taken)
            assert hook.current is not None
            found.use(number, None)
            assert hook.current is None
        with pytest.raises(ValueError, match="chunk is a Linear, expected one of the 1 model"):
            found.use(torch.nn.Linear(1, 1), taken)


def test_replay_refuses_a_fused_router():

    plan = tiny_plan()
    with passes.built(plan) as policy:
        policy.llm.config.moe_router_fusion = True
        with pytest.raises(RuntimeError, match="return before the replay hook"):
            Replay(policy.llm.chunks, policy.topo.device)
