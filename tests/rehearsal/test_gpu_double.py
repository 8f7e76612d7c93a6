"""The double of a GPU finds what a GPU would not forgive: each check with a fault planted for it,
and the trainer's own passes under all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.megatron.ddp import buffers
from pyrl_ext.megatron.optimizer import state_bytes, state_tensors
from pyrl_ext.ops import gather_rows
from pyrl_ext.ops.tensors import to_device
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.offload import storage_bytes
from pyrl_ext.parallel.upload import Upload
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.phases import Offloadable
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.policy import Policy
from tests.helpers import gpu_double, passes
from tests.helpers.gpu_double import AT_ONCE, EARLY, LATE
from tests.helpers.gpu_double.memory import LEDGER, device
from tests.helpers.gpu_double.seen import Seen, without_lines
from tests.helpers.gpu_double.tensor import put, value
from tests.helpers.gpu_double.whole import on_double
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import LAYERS, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

EXTREMES = (LATE, EARLY)
BF16 = "model.dtype=bfloat16"


def alone(check: Callable[..., Any], *args: Any) -> Any:
    """``check(*args)`` in a new process, since a device once registered stays."""
    return run_ranks(_without_group, 1, check, args)[0]


def _without_group(_group: Any, check: Callable[..., Any], args: tuple) -> Any:
    os.environ["WORLD_SIZE"] = "1"
    gpu_double.install()
    return check(*args)


# both sides ---------------------------------------------------------------------------------------


def mixes() -> None:
    with gpu_double.rehearsed():
        x = torch.ones(4, 8, device="gpu")
        rows = torch.tensor([1, 0])
        for planted in (
            lambda: x + torch.ones(8),
            lambda: x @ torch.ones(8, 2),
            lambda: torch.cat([x, torch.ones(1, 8)]),
            lambda: x.add_(torch.ones(8)),
            lambda: torch.nn.functional.embedding(rows, x),
            lambda: torch.ops.pyrl_ext.gather_rows(x, rows, None),
        ):
            with pytest.raises(RuntimeError, match=r"on gpu:0.* on cpu|on cpu.* on gpu:0"):
                planted()
        assert value((x * torch.tensor(2.0)).sum()) == 64  # a number of the host is an argument


def test_tensors_of_both_sides_in_one_operator_raise():
    alone(mixes)


def operators_agree(order: str) -> None:
    """Autograd, an operator of this package, a fused optimizer, in place and out."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    rows = torch.tensor([3, -1, 0, 3])
    found = []
    with gpu_double.rehearsed(order) as seen:
        for there in (False, True):
            w = (put(weight) if there else weight.clone()).requires_grad_()
            at = put(rows) if there else rows
            optimizer = torch.optim.AdamW([w], fused=True)
            for _ in range(2):
                optimizer.zero_grad()
                gathered = gather_rows(w @ w.mT, at)
                gathered.relu().square().sum().backward()
                optimizer.step()
            found.append(value(w.detach()))
    assert torch.equal(*found)
    assert not seen.waits
    assert not seen.unqueued


@pytest.mark.parametrize("order", [AT_ONCE, *EXTREMES])
def test_operators_give_the_same_numbers_in_every_order(order: str):
    alone(operators_agree, order)


# waits --------------------------------------------------------------------------------------------


def waits() -> dict[str, int]:
    with gpu_double.rehearsed() as seen:
        x = torch.arange(4.0, device="gpu")
        x.to("gpu", torch.float64).sum().neg_()
        pinned = torch.ones(3).pin_memory()
        pinned.to("gpu", non_blocking=True)
        assert not seen.waits
        for planted in (
            lambda: x.sum().item(),
            lambda: x.tolist(),
            lambda: x.nonzero(),
            lambda: x[x > 1],
            lambda: x.cpu(),
            lambda: bool(x.any()),
            lambda: torch.tensor([1, 2], device="gpu"),
            lambda: pinned.to("gpu"),
            lambda: x[torch.tensor([1])],
            lambda: pinned.copy_(x[:3]),
            lambda: torch.get_device_module(device()).synchronize(),
        ):
            before = seen.waits.total()
            planted()
            assert seen.waits.total() == before + 1, (before, seen.waits)
        return dict(seen.waits)


def test_waits_are_counted_by_line():
    found = alone(waits)
    assert len(found) == 11  # each on another line
    assert all(key.startswith("tests/rehearsal/test_gpu_double.py:") for key in found), found


# the policy ---------------------------------------------------------------------------------------

PER_PASS = {  # one for a pass or an update each; none for a microbatch
    "pyrl_ext/replay/router_hook.py Replay.agreement aten.copy_.default": 1,
    "pyrl_ext/trainer/policy.py Policy._scores aten.copy_.default": 1,
    "pyrl_ext/trainer/policy.py Policy._sums aten.copy_.default": 1,
    "pyrl_ext/megatron/optimizer.py step_all aten._local_scalar_dense.default": 1,
}
ONCE = {  # in the first update, when the optimizer makes what it keeps
    "pyrl_ext/megatron/optimizer.py step_all aten._local_scalar_dense.default": 1,
    "pyrl_ext/megatron/optimizer.py step_all aten.copy_.default": 1,
}


def trained(
    seen: Seen, topo: Any, plan: Any, number: int = 2, between: Any = None, loss: Any = None
) -> list[Any]:
    """A policy's waits, scores, metrics of ``number`` updates, and weights at the end."""
    batch = random_batch()
    policy = Policy.build(plan, topo, offloads=between is not None)
    limit = plan.batching.tokens_per_microbatch
    schedule = plan_microbatches(batch.seqlens, topo.dp_size, limit, plan.row_alignment)
    seen.waits.clear()
    found: list[Any] = [len(schedule)]
    old = passes.scores(policy, batch, schedule).logprobs
    found.append(old)
    ready = replace(batch, old_logprobs=old)
    for _ in range(number):
        if between is not None:
            between(policy)
        metrics = passes.update(policy, ready, schedule, loss or build_loss(plan.objective))
        found += [metrics["loss"], metrics["grad_norm"]]
    waits = dict(without_lines(seen.waits))
    found += [value(t) for t in policy.llm.named_parameters().values()]
    return [waits, *found]


def run_policy(order: str, *overrides: str, **options: Any) -> list[Any]:
    """`trained` on the double."""
    plan = tiny_plan(BF16, *overrides)
    with on_double(plan) as topo, gpu_double.rehearsed(order) as seen:
        return trained(seen, topo, plan, **options)


def equal(one: list[Any], two: list[Any]) -> bool:
    """True if both computed the same, bit for bit."""
    pairs = zip(one[1:], two[1:], strict=True)
    return all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)


SMALL = "batching.tokens_per_microbatch=80"  # four microbatches


def waits_of_a_policy() -> None:
    one = run_policy(AT_ONCE, number=1)
    four = run_policy(AT_ONCE, SMALL, number=1)
    assert (one[1], four[1]) == (1, 4)
    expected = {key: count + ONCE.get(key, 0) for key, count in PER_PASS.items()} | {
        key: count for key, count in ONCE.items() if key not in PER_PASS
    }
    assert one[0] == expected, one[0]
    assert four[0] == expected

    def planted(*args: Any) -> Any:
        found = build_loss(tiny_plan().objective)(*args)
        found[0].item()
        return found

    again = run_policy(AT_ONCE, SMALL, number=1, loss=planted)[0]
    key = "waits_of_a_policy.<locals>.planted aten._local_scalar_dense.default"
    assert again.pop(f"tests/rehearsal/test_gpu_double.py {key}") == 4
    assert again == expected


def test_policy_waits_for_no_microbatch_in_bf16():
    """The list of lines that wait is complete, and one that waits a microbatch is found."""
    alone(waits_of_a_policy)


def policy_in_orders(*overrides: str) -> None:
    plan = tiny_plan(BF16, SMALL, *overrides)
    with topology.start(plan) as topo:
        on_host = trained(Seen(), topo, plan, number=1)
    right = run_policy(AT_ONCE, SMALL, *overrides)
    # attention and the head compute in other steps on a GPU; all is in bf16
    assert torch.allclose(right[2], on_host[2], atol=0.05)
    assert right[3] == pytest.approx(on_host[3], rel=1e-3)
    assert right[4] == pytest.approx(on_host[4], rel=1e-2)
    for order in EXTREMES:
        assert equal(run_policy(order, SMALL, *overrides), right), order


@pytest.mark.parametrize("overrides", [(), ("model.recompute=full",)])
def test_policy_trains_the_same_in_every_order_of_streams(overrides: tuple[str, ...]):
    alone(policy_in_orders, *overrides)


def policy_without_a_wait() -> None:
    right = run_policy(LATE, SMALL, number=1)
    arrive = Upload.arrive

    def planted(self: Upload) -> None:
        self._in_flight.clear()  # and the current stream does not wait

    Upload.arrive = planted
    try:
        wrong = run_policy(LATE, SMALL, number=1)
    except (IndexError, FloatingPointError):  # -1 as a token or a row
        return
    finally:
        Upload.arrive = arrive
    assert not equal(wrong, right)


def test_policy_without_a_wait_for_its_uploads_fails():
    alone(policy_without_a_wait)


def experts_over_ranks(group: Any) -> list[Any]:
    """`run_policy` with experts over two ranks, in every order; and what differs."""
    os.environ["WORLD_SIZE"] = str(group.size())
    gpu_double.install()
    layout = "parallel.dp=2", "parallel.ep=2", SMALL
    found = {order: run_policy(order, *layout, number=1) for order in (AT_ONCE, *EXTREMES)}
    right = found[AT_ONCE]
    return [right[:2], [order for order, each in found.items() if not equal(each, right)]]


def test_policy_with_experts_over_ranks_waits_once_a_layer_in_every_order_of_streams():
    """For the numbers of rows that ranks send to each other's experts, copied on a side stream."""
    for (waits, number), differ in run_ranks(experts_over_ranks, 2):
        assert not differ
        a_layer = "pyrl_ext/megatron/image_features.py FeatureLayer.forward Event.synchronize"
        assert waits.pop(a_layer) == len(LAYERS) * 2 * number  # scores, then an update
        assert waits.keys() == PER_PASS.keys() | ONCE.keys()


# offloading ---------------------------------------------------------------------------------------

PARTS: tuple[Offloadable, ...] = ("optimizer", "gradients", "weights")


def run_offloaded(order: str, between: Callable[[Policy], None]) -> list[Any]:
    """`trained`, with ``between`` before each update."""
    plan = tiny_plan(BF16)
    rollout = plan.rollout.model_copy(update={"offload_trainer": "all"})
    plan = plan.model_copy(update={"rollout": rollout})  # a rule refuses it on a CPU
    with on_double(plan) as topo, gpu_double.rehearsed(order) as seen:
        return trained(seen, topo, plan, between=between)


def away_and_back(owner: Policy | TrainedModule) -> None:
    before = LEDGER.live
    freed = sum(owner.offload(part) for part in PARTS)
    assert LEDGER.live == before - freed
    owner.onload()
    assert LEDGER.live == before


def twice_away_and_back(policy: Policy) -> None:
    """Nothing needs the optimizer's state in between, as after a run's last step."""
    away_and_back(policy)
    away_and_back(policy)


def offloaded_policy() -> None:
    right = run_policy(AT_ONCE)
    said = StringIO()
    with redirect_stdout(said):
        for order in (AT_ONCE, *EXTREMES):
            assert equal(run_offloaded(order, away_and_back), right), order
        assert equal(run_offloaded(LATE, twice_away_and_back), right)
    lines = said.getvalue().splitlines()  # later updates pin no more than was planned
    assert len(lines) == 2 * 4
    assert all(line.endswith("in the background") for line in lines), lines
    module = torch.get_device_module(device())

    def onload_without_a_wait(policy: Policy) -> None:
        for part in PARTS:
            policy.offload(part)
        with module.stream(module.Stream()):
            policy.module.onload()  # the policy's would refuse

    def free_without_a_wait(policy: Policy) -> None:
        wait, module.synchronize = module.synchronize, lambda *_: None
        try:
            with module.stream(module.Stream()):
                away_and_back(policy.module)
        finally:
            module.synchronize = wait

    def step_without_a_wait(policy: Policy) -> None:
        away_and_back(policy)
        policy.module._offloaded["optimizer"]._arriving = None

    def leave_without_a_wait(policy: Policy) -> None:
        away_and_back(policy)
        policy.module._offloaded["optimizer"]._arriving = None
        away_and_back(policy)

    for planted in (
        onload_without_a_wait,
        free_without_a_wait,
        step_without_a_wait,
        leave_without_a_wait,
    ):
        try:
            wrong = run_offloaded(LATE, planted)
        except FloatingPointError:  # what is read was freed, or is not there yet: NaN
            continue
        assert not equal(wrong, right), planted


def test_policy_trains_the_same_offloaded_in_every_order_of_streams():
    """Host memory is pinned in the background, and a missing wait at either end is found."""
    alone(offloaded_policy)


# bytes --------------------------------------------------------------------------------------------


OF_ROUTERS = "Op.__call__", "_route.<locals>.route"
"""Functions that allocate what megatron's token dispatchers keep of the last microbatch."""


def bytes_of_a_step(*overrides: str) -> None:
    """Live bytes after a step are those of the plan's exact items, of the last microbatch's routes,
    and less than 1 % of small buffers."""
    plan = tiny_plan(BF16, *overrides)
    planned = {item.name: item for item in stage_memory(plan)[0].items}
    with on_double(plan) as topo, gpu_double.rehearsed():
        before = LEDGER.live
        batch = random_batch()
        policy = Policy.build(plan, topo)
        schedule = plan_microbatches(batch.seqlens, topo.dp_size, 4096, plan.row_alignment)
        ready = replace(batch, old_logprobs=batch.rollout_logprobs)
        with LEDGER.phase("update"):
            passes.update(policy, ready, schedule, build_loss(plan.objective))
        parts = {
            "weights": [p for chunk in policy.llm.chunks for p in chunk.parameters()],
            "gradients": [b.grad_data for b in buffers(policy.llm.chunks)],
            "optimizer": state_tensors(policy.llm.optimizer),
        }
        sizes = {name: storage_bytes(tensors) for name, tensors in parts.items()}
        for name, size in sizes.items():
            assert planned[name].exact
            assert size == pytest.approx(planned[name].bytes, rel=0.01), name  # padding
        rest = LEDGER.live - before - sum(sizes.values())
        routers = sum(n for at, n in LEDGER.by_place.items() if at.endswith(OF_ROUTERS))
        assert 0 < routers <= rest < routers + 0.01 * sum(sizes.values())
        planned_here = state_bytes(plan, policy.llm.chunks)  # which is pinned for offloading
        assert sizes["optimizer"] <= planned_here < 1.01 * sizes["optimizer"]
        assert LEDGER.most["update"] > LEDGER.live  # activations
        kept = torch.zeros(1000, 1000, device="gpu")  # planted: the ledger sees what stays
        assert LEDGER.live - before - sum(sizes.values()) == rest + kept.nbytes


@pytest.mark.parametrize("overrides", [(), ("optimizer.distributed=true",)])
def test_bytes_after_a_step_are_those_of_the_plan(overrides: tuple[str, ...]):
    alone(bytes_of_a_step, *overrides)


# streams and memory -------------------------------------------------------------------------------


def uploaded(order: str, arrives: bool = True, records: bool = True) -> tuple[Tensor, Tensor]:
    """(what a kernel read of an upload whose tensor was freed at once, what it should have)."""
    host = torch.arange(8.0)
    with gpu_double.rehearsed(order):
        up = Upload(device())
        there = up(host)
        if not records:
            up._in_flight.clear()
        if arrives:
            up.arrive()
        result = there * 2
        up._in_flight.clear()
        del there
        up(torch.zeros(8))  # other work for the stream of copies
        up.arrive()
        return value(result), host * 2


def uploads() -> None:
    for order in (AT_ONCE, *EXTREMES):
        assert torch.equal(*uploaded(order)), order
    found, _ = uploaded(LATE, arrives=False)
    assert found.isnan().all()  # the copy came later
    found, _ = uploaded(EARLY, records=False)
    assert found.isnan().all()  # its memory was free for the stream of copies
    assert torch.equal(*uploaded(LATE, records=False))  # not seen in this order, nor at once
    assert torch.equal(*uploaded(AT_ONCE, records=False))


def test_uploads_are_waited_for_and_their_memory_is_recorded():
    alone(uploads)


def side_streams() -> None:
    """A stream that waits for nothing may run before the default one, as well as after it."""
    module = torch.get_device_module(device())
    for order, waits, right in (
        (EARLY, True, True),
        (EARLY, False, False),
        (LATE, True, True),
        (LATE, False, True),
    ):
        with gpu_double.rehearsed(order):
            side = module.Stream()
            x = torch.zeros(4, device="gpu")
            x += 1
            if waits:
                side.wait_stream(module.current_stream())
            with module.stream(side):
                y = x * 3
            done = side.record_event()
            done.wait()
            assert bool((value(y) == 3).all()) == right, (order, waits)


def test_side_streams_wait_for_what_they_read():
    alone(side_streams)


def overwritten() -> None:
    """A stream reads what the default one overwrites without waiting for it."""
    module = torch.get_device_module(device())
    for waits in (True, False):
        with gpu_double.rehearsed(LATE):
            side = module.Stream()
            x = torch.ones(4, device="gpu")
            side.wait_stream(module.current_stream())
            with module.stream(side):
                y = x * 3
            if waits:
                module.current_stream().wait_stream(side)
            x.zero_()
            module.current_stream().wait_stream(side)
            assert bool((value(y) == 3).all()) == waits


def test_memory_is_not_overwritten_while_another_stream_reads_it():
    alone(overwritten)


def freed() -> None:
    with gpu_double.rehearsed():
        x = put(torch.ones(4))
        view = x[1:]
        host = x.host
        del x
        assert (host == 1).all()  # the view holds it
        del view
        assert host.isnan().all()


def test_freed_memory_is_poisoned():
    alone(freed)


# host memory --------------------------------------------------------------------------------------


def host_memory() -> None:
    def sent(*, pinned: bool, overwrites: bool, waits: bool = False) -> None:
        host = torch.ones(4).pin_memory() if pinned else torch.ones(4)
        side = torch.get_device_module(device()).Stream()
        with torch.get_device_module(device()).stream(side):
            there = host.to("gpu", non_blocking=True)
            done = side.record_event()
        if waits:
            done.synchronize()
        if overwrites:
            host.zero_()
        done.wait()
        del there

    with gpu_double.rehearsed(LATE):
        sent(pinned=True, overwrites=False)
        sent(pinned=True, overwrites=True, waits=True)
        to_device(torch.ones(4), device())  # pins
    with (
        pytest.raises(AssertionError, match="from memory that is not pinned"),
        gpu_double.rehearsed(LATE),
    ):
        sent(pinned=False, overwrites=False)
    with (
        pytest.raises(AssertionError, match="sent: host memory was overwritten before its copy"),
        gpu_double.rehearsed(LATE),
    ):
        sent(pinned=True, overwrites=True)
    with (
        pytest.raises(AssertionError, match="on the host, which is not pinned"),
        gpu_double.rehearsed(LATE),
    ):
        torch.zeros(4).copy_(torch.ones(4, device="gpu"), non_blocking=True)


def test_copies_that_do_not_wait_are_of_pinned_memory_that_stays():
    alone(host_memory)


def early_read() -> None:
    """The host reads a copy from the device without a wait."""
    for waits in (True, False):
        with gpu_double.rehearsed(EARLY):
            here = torch.zeros(4).pin_memory()
            here.copy_(torch.ones(4, device="gpu"), non_blocking=True)
            if waits:
                torch.get_device_module(device()).current_stream().synchronize()
            assert bool(here.all()) == waits


def test_host_waits_for_what_it_reads():
    alone(early_read)
