"""Steps of verl's Megatron engine before and after `install`: equal where verl is right, and its
faults gone. Each fault is shown before it is gone; a number is that of verl's issue."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

PRELOAD = ("tests.helpers.verl_cpu",)
LAYERS = 4
LENGTHS = [5, 7, 3, 6]
LAYOUTS = [
    ("R3", {"tp": 2}),
    ("R3", {"pp": 2, "recompute": True}),
    ("R2", {"cp": 2}),
    ("R2", {"pp": 2, "vpp": 2, "layers": 8, "dense": 3}),  # #5452; a chunk without routers
]


@contextmanager
def installed(really):
    from pyrl_ext.integrations import uninstall, verl

    if really:
        verl.install()
    try:
        yield
    finally:
        uninstall()


class Probe:
    """The routing maps of each router's forwards: layer number -> [[M, E] bool]."""

    def __init__(self, engine):
        from megatron.core.transformer.moe.router import TopKRouter

        self.maps = {}
        self.held = []  # entries that each router keeps for a recomputation
        for chunk in engine.module:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._note)

    def _note(self, router, _args, output):
        self.maps.setdefault(router.layer_number, []).append(output[1].detach().clone())
        self.held.append(len(router.router_replay.replay_backward_list))


def run(engine, batch, forward_only=False):
    from tests.helpers.verl_cpu import loss_of

    with torch.set_grad_enabled(not forward_only):
        return engine.forward_backward_batch(batch, loss_of, forward_only=forward_only)


def numbers_of(output):
    """Without the log-probs of last tokens, which have no next one."""
    if not output:
        return []  # not the last stage
    found = output["model_output"]
    logprobs = torch.cat([each[:-1] for each in found["log_probs"].unbind()])
    return [logprobs.detach(), found["entropy"].values().detach()]


def train(mode, layout, steps=2):
    """[steps] of [log-probs, entropies], and the weights afterwards."""
    from tests.helpers import verl_cpu

    engine = verl_cpu.new_engine(mode, **layout)
    layers = layout.get("layers", LAYERS)
    seen = []
    for step in range(steps):
        batch = verl_cpu.new_batch(LENGTHS, layers, seed=step, enable_routing_replay=True)
        if mode == "R2":
            batch.pop("routed_experts")
            recorded = run(engine, batch, forward_only=True)
            routes: list[Any] = [recorded["model_output"]["routed_experts"] if recorded else None]
            torch.distributed.broadcast_object_list(routes, src=1)  # the last stage
            seen.append(routes[0].values())
            batch["routed_experts"] = routes[0]
        seen += numbers_of(run(engine, batch))
        with torch.no_grad():
            for chunk in engine.module:
                for weight in chunk.parameters():
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    return seen, [weight.detach() for chunk in engine.module for weight in chunk.parameters()]


def steps_on_rank(group):
    from tests.helpers.verl_cpu import megatron_groups

    for mode, layout in LAYOUTS:
        sizes = {name: layout[name] for name in ("tp", "pp", "cp", "vpp") if name in layout}
        with megatron_groups(**sizes):
            with installed(False):
                theirs = train(mode, layout)
            with installed(True):
                ours = train(mode, layout)
        for found, want in zip(ours, theirs, strict=True):
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_steps_are_theirs_on_two_ranks():
    run_ranks(steps_on_rank, 2, preload=PRELOAD)


def faults_on_rank(group):
    from tests.helpers.verl_cpu import megatron_groups

    with megatron_groups(tp=2):
        for check in (padding, registry, exception, unpacked, queue, columns, repeats, wrapper):
            for really in (False, True):
                with installed(really):
                    check(really)


def replayed(mode="R3", mask=True, **layout):
    from tests.helpers import verl_cpu

    engine = verl_cpu.new_engine(mode, tp=2, **layout)
    batch = verl_cpu.new_batch(LENGTHS, LAYERS, enable_routing_replay=True)
    return engine, batch


def uses(engine, batch, probe):
    """True if the first microbatch's first router used the routes of its tokens but the last."""
    from megatron.core import parallel_state

    layer, maps = next(iter(probe.maps.items()))
    wanted = []
    for routes in batch["routed_experts"].unbind()[:2]:
        pad = -len(routes) % 2
        wanted += [*routes[:-1, layer - 1].tolist(), None, *[None] * pad]
    rank = parallel_state.get_tensor_model_parallel_rank()
    half = len(wanted) // 2
    pairs = zip(wanted[rank * half : (rank + 1) * half], maps[0], strict=True)
    return all(ids is None or row.nonzero().flatten().tolist() == sorted(ids) for ids, row in pairs)


def padding(ours):
    """#7524: rows of padding are K times expert 0 in R2."""
    engine, batch = replayed("R2")
    probe = Probe(engine)
    run(engine, batch)
    rows = torch.cat([each for maps in probe.maps.values() for each in maps])
    counts = rows.sum(1)
    if ours:
        assert (counts == 2).all()
    else:
        assert rows[counts == 1].any() and rows[counts == 1][:, 0].all()


def registry(ours):
    """#7106: the engine that was built last has the registry, others silently do not replay."""
    engine, batch = replayed()
    replayed()
    probe = Probe(engine)
    run(engine, batch)
    assert uses(engine, batch, probe) == ours


def exception(ours):
    """Routes and the replay of a batch that failed stay for the next one."""
    engine, batch = replayed(recompute=True)
    engine.mini_layer_topk_idx_list = ["of a recording that failed"]

    def fail(**_):
        raise ArithmeticError("loss")

    with pytest.raises(ArithmeticError):
        engine.forward_backward_batch(batch, fail)
    hooks = [m.router_replay for m in engine.module[0].modules() if hasattr(m, "router_replay")]
    clear = [not h.replay_backward_list and h.router_replay_action is None for h in hooks]
    assert len(clear) == 3 and all(clear) == any(clear) == ours
    assert (not engine.mini_layer_topk_idx_list) == ours


def unpacked(ours):
    """Without packed sequences routes go to other rows, or rows lose their experts."""
    engine, batch = replayed("R2")
    engine.engine_config.use_remove_padding = False
    probe = Probe(engine)
    if ours:
        with pytest.raises(RuntimeError, match="Set use_remove_padding=True"):
            run(engine, batch)
        return
    torch.use_deterministic_algorithms(False)  # with them it is an error in theirs, too
    run(engine, batch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert not torch.cat([maps[0] for maps in probe.maps.values()]).any(1).all()


def queue(ours):
    """verl keeps the routes of every microbatch, although nothing is recomputed."""
    engine, batch = replayed()
    probe = Probe(engine)
    run(engine, batch)
    assert max(probe.held) == (0 if ours else 2)
    engine, batch = replayed(recompute=True)
    probe = Probe(engine)
    run(engine, batch)
    assert max(probe.held) == 1 and min(probe.held) == 0


def columns(ours):
    """#5037, for another number of columns: layers are shifted by those without experts."""
    engine, batch = replayed()
    routes = [torch.cat([r, r[:, -1:]], 1) for r in batch["routed_experts"].unbind()]
    batch["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    probe = Probe(engine)
    if ours:
        with pytest.raises(RuntimeError, match="of 5 layers, expected 4, all layers, or 3"):
            run(engine, batch)
    else:
        run(engine, batch)
        assert not uses(engine, batch, probe)


def repeats(ours):
    """A token with one expert twice, such as the zeros of a prompt whose routes are missing."""
    engine, batch = replayed()
    batch["routed_experts"].values()[[1, 8]] = 0  # one on each rank
    probe = Probe(engine)
    if ours:
        with pytest.raises(ValueError, match=r"experts \[0, 0\] repeat"):
            run(engine, batch)
    else:
        run(engine, batch)
        assert any((each.sum(1) == 1).any() for maps in probe.maps.values() for each in maps)


def wrapper(ours):
    """#7340's kin: in a model that contains the language model, MTP layers take the numbers, and
    the routes, of decoder layers."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils.megatron import router_replay_utils

    engine, _ = replayed()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = TopKRouter(engine.tf_config, groups, is_mtp_layer=True)
    router.set_layer_number(1)
    language = engine.module[0]
    language.mtp = torch.nn.ModuleList([router])
    whole = torch.nn.ModuleDict({"language_model": language})
    numbers = [number for number, _ in router_replay_utils.iter_model_routers(whole)]
    assert numbers == ([2, 3, 4] if ours else [2, 3, 4, 1])


def test_faults_of_theirs_are_gone():
    run_ranks(faults_on_rank, 2, preload=PRELOAD)
