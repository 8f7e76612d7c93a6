"""Faults that gloo forgives and NCCL does not, each planted on purpose, and found by its rule."""

import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from pyrl_ext.parallel.groups import connect
from pyrl_ext.trainer.module_pipe import Edge
from tests.helpers import nccl_rules
from tests.helpers.nccl_rules import watch
from tests.helpers.nccl_rules.program import Call, Communicator, Program, Wait
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

RANK = dist.get_rank
ON_HOST: list[torch.Tensor] = []  # tensors that would be on the host
KEPT: list[Any] = []  # handles of messages that are not waited for


def on_device(tensor: torch.Tensor, _site: str, _group: Any) -> bool:
    return all(tensor is not other for other in ON_HOST)


def group_of(*ranks: int) -> Any:
    """A new group; all ranks of the world make it."""
    return dist.new_group([*ranks], group_desc="planted")


# what each rank does: the right thing first, then a fault for each rule ---------------------------


def nothing_wrong() -> None:
    """Every kind of call, as NCCL wants it."""
    me = RANK()
    group = group_of(0, 1, 2)
    pair = group_of(0, 1)
    x = torch.ones(6)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    handle = dist.all_reduce(x, group=group, async_op=True)
    assert handle is not None
    handle.wait()
    dist.all_gather_into_tensor(x, x[2 * me : 2 * me + 2], group=group)
    dist.reduce_scatter_tensor(x[2 * me : 2 * me + 2], x, group=group)
    dist.all_gather([torch.empty(6) for _ in range(3)], x)
    sizes = [[me + 1] * 3, [1, 2, 3]]
    dist.all_to_all_single(torch.empty(6), torch.ones(3 * me + 3), sizes[1], sizes[0], group=group)
    with _coalescing_manager(group, async_ops=True) as work:
        dist.all_reduce(x, group=group, async_op=True)
        dist.all_reduce(x.clone(), group=group, async_op=True)
    work.wait()
    ring = [
        dist.P2POp(dist.isend, torch.ones(4), (me + 1) % 3, group),
        dist.P2POp(dist.irecv, torch.empty(4), (me + 2) % 3, group),
    ]
    for handle in dist.batch_isend_irecv(ring):
        handle.wait()
    if me == 0:
        dist.send(torch.ones(2, dtype=torch.bool), 1, group=pair)
    if me == 1:
        dist.recv(torch.ones(2, dtype=torch.bool), 0, group=pair)
    dist.all_gather_object([None] * 3, me)
    dist.barrier()


def swapped_messages() -> None:
    """Tags tell them from each other over gloo; NCCL has none."""
    large = torch.ones(4)
    small = torch.ones(2)
    if RANK() == 0:
        handles = [dist.isend(large, 1, tag=1), dist.isend(small, 1, tag=2)]
    else:
        handles = [dist.irecv(small, 0, tag=2), dist.irecv(large, 0, tag=1)] if RANK() == 1 else []
    for handle in handles:
        assert handle is not None
        handle.wait()


def batch_of_some_ranks() -> None:
    """The first use of a group needs all its ranks."""
    group = group_of(0, 1, 2)
    me = RANK()
    if me < 2:
        kind = dist.irecv if me else dist.isend
        for handle in dist.batch_isend_irecv([dist.P2POp(kind, torch.ones(2), 1 - me, group)]):
            handle.wait()


def pair_of_one_rank() -> None:
    """The first message of a pair waits for the other rank, which waits for something else."""
    if RANK() == 0:
        handle = dist.isend(torch.ones(2), 1)
        dist.all_reduce(torch.ones(1), group=group_of(0, 1))
    else:
        handle = None
        group = group_of(0, 1)
        if RANK() == 1:
            dist.all_reduce(torch.ones(1), group=group)
            handle = dist.irecv(torch.ones(2), 0)
    if handle is not None:
        handle.wait()


def both_send_first() -> None:
    if (me := RANK()) < 2:
        sending = dist.isend(torch.ones(2), 1 - me)
        receiving = dist.irecv(torch.ones(2), 1 - me)
        assert sending is not None and receiving is not None
        receiving.wait()
        sending.wait()


def never_received() -> None:
    """All that is behind it in the queue is never sent."""
    group = group_of(0, 1)
    if RANK() == 0:
        for _ in range(2):
            KEPT.append(dist.isend(torch.ones(2), 1, group=group))
    if RANK() == 1:
        dist.recv(torch.ones(2), 0, group=group)


def other_types() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if RANK() == 1 else torch.float32))


def other_shapes() -> None:
    dist.broadcast(torch.ones(3, 2) if RANK() == 1 else torch.ones(2, 3), 0)


def other_reduction() -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if RANK() == 2 else dist.ReduceOp.SUM)


def opposite_first_use() -> None:
    groups = [group_of(0, 1), group_of(0, 1)]
    if RANK() < 2:
        in_order = groups if RANK() == 0 else groups[::-1]
        for handle in [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in in_order]:
            assert handle is not None
            handle.wait()


def not_contiguous() -> None:
    dist.broadcast(torch.ones(4, 3).t(), 0)


def type_without_nccl() -> None:
    if RANK() == 0:
        dist.send(torch.ones(4, dtype=torch.int16), 1)
    if RANK() == 1:
        dist.recv(torch.ones(4, dtype=torch.int16), 0)


def bitwise_reduction() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.BOR)


def gathered_at_another_place() -> None:
    whole = torch.ones(6)
    dist.all_gather_into_tensor(whole, whole[:2])


def exchanged_in_place() -> None:
    whole = torch.ones(6)
    dist.all_to_all_single(whole, whole)


def host_among_device() -> None:
    ON_HOST.append(torch.ones(2))
    dist.all_gather([torch.empty(2) for _ in range(3)], ON_HOST[0])


def second_thread() -> None:
    thread = Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    thread.join()


# fault -> patterns of all problems that are reported for it
SAID = {
    nothing_wrong: [],
    swapped_messages: [r"message 0 from rank 0 to rank 1 is 4 float32 .* expects 2 float32"],
    batch_of_some_ranks: [
        r"rank 0 first uses communicator 'planted' \[0, 1, 2\] .* waits for ranks \[2\]",
        r"rank 1 first uses communicator 'planted' \[0, 1, 2\] .* waits for ranks \[2\]",
    ],
    pair_of_one_rank: [
        r"ranks 0 and 1 first use communicators .* in opposite orders",
        r"rank 0 first uses communicator 'default_pg, a pair' .* for send .* waits for ranks \[1\]",
        r"rank 1 first uses communicator 'planted' \[0, 1\] for all_reduce .* for ranks \[0\]",
    ],
    both_send_first: [
        r"rank 0 waits at .* recv from rank 1 .* behind send to rank 1 .* no other end of send",
        r"rank 1 waits at .* recv from rank 0 .* behind send to rank 0 .* no other end of send",
    ],
    never_received: [r"rank 0: send to rank 1 at .* never ended: no other end of send to rank 1"],
    other_types: [r"rank 0 calls all_reduce float32 .* where rank 1 calls all_reduce int32"],
    other_shapes: [r"rank 0 calls broadcast float32 \[2, 3\] .* rank 1 calls .* \[3, 2\]"],
    other_reduction: [r"rank 0 calls all_reduce .* SUM .* where rank 2 calls all_reduce .* MAX"],
    opposite_first_use: [
        r"ranks 0 and 1 first use communicators 'planted' .* and 'planted' .* in opposite orders",
        r"rank 0 first uses .* waits for ranks \[1\]",
        r"rank 1 first uses .* waits for ranks \[0\]",
    ],
    not_contiguous: [r"shape \[3, 4\] of strides \[1, 3\] is not contiguous; 3 times"],
    type_without_nccl: [
        r"send at .*: torch.int16, which NCCL has not; 1 times, on ranks \[0\]",
        r"recv at .*: torch.int16, which NCCL has not; 1 times, on ranks \[1\]",
    ],
    bitwise_reduction: [r"reduce operation BOR, which NCCL has not"],
    gathered_at_another_place: [
        r"in place at byte 0 of the whole, expected 8; 1 times, on ranks \[1\]",
        r"in place at byte 0 of the whole, expected 16; 1 times, on ranks \[2\]",
    ],
    exchanged_in_place: [r"all_to_all_single at .*: input and output overlap"],
    host_among_device: [r"all_gather at .*: tensors of host and device in one call"],
    second_thread: [r"all_reduce at .*: from a second thread"],
}


def on_ranks(_group: Any, folder: Path) -> dict[str, int]:
    """Every case, to a folder of its name; returns the communicators of `nothing_wrong`."""
    counts = dict[str, int]()
    for case in SAID:
        ON_HOST.clear()
        nccl_rules.install(folder / case.__name__, on_device)
        case()
        counts = counts or dict(nccl_rules.communicators())
        nccl_rules.install(folder / "between", lambda *_: False)
        dist.barrier()
    return counts


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp("rules")
    for name in ["between", *(case.__name__ for case in SAID)]:
        (folder / name).mkdir()
    return folder, run_ranks(on_ranks, 3, folder, preload=())


@pytest.mark.parametrize("case", SAID, ids=lambda case: case.__name__)
def test_a_planted_fault_is_found_by_its_rule(results, case):
    found = nccl_rules.problems(nccl_rules.read(results[0] / case.__name__, 3))
    for said in SAID[case]:
        assert any(re.search(said, problem) for problem in found), found
    assert all(any(re.search(said, problem) for said in SAID[case]) for problem in found), found
    assert all("test_nccl_rules.py:" in problem for problem in found)


def test_communicators_are_counted_as_nccl_makes_them(results):
    of_all = ["'default_pg' [0, 1, 2]", "'planted' [0, 1, 2]"]
    of_two = [*of_all, "'planted, a pair' [0, 1]"]
    assert [list(counts) for counts in results[1]] == [of_two, of_two, of_all]


# faults that gloo does not survive ---------------------------------------------------------------


def call(number: int, op: str, *same: str, splits: Any = ()) -> list[Any]:
    """A collective of ranks 0 and 1, and the wait for it."""
    world = Communicator("0", "world", (0, 1), on_device=True)
    line = f"line {number}"
    return [Call(number, op, world, line, same=[*same], splits=[*splits]), Wait(number, line)]


def said_of(first: list[Any], second: list[Any]) -> list[str]:
    return nccl_rules.problems([Program(0, first), Program(1, second)])


def test_other_roots_other_calls_and_calls_too_few():
    root = [call(0, "broadcast", "float32 [2]", f"root {rank}") for rank in range(2)]
    assert said_of(root[0], root[0]) == []
    (said,) = said_of(*root)
    assert "rank 0 calls broadcast float32 [2] root 0 at line 0, where rank 1 calls" in said
    said = said_of(call(0, "all_reduce"), call(0, "barrier"))
    assert [line.partition(" in ")[0] for line in said[1:]] == [
        "rank 0 waits at line 0 for all_reduce at line 0",
        "rank 1 waits at line 0 for barrier at line 0",
    ]
    said = said_of([*root[0], *call(1, "all_reduce", "float32 [2]")], root[0])
    assert "rank 0 calls all_reduce float32 [2] at line 1, where rank 1 makes no" in said[0]
    assert said[1].endswith("ranks [1] are not in it")


def test_splits_of_an_all_to_all_that_do_not_fit():
    right = [call(0, "all_to_all_single", splits=[[1, 2], [1, 3]])]
    right.append(call(0, "all_to_all_single", splits=[[3, 4], [2, 4]]))
    assert said_of(*right) == []
    wrong = call(0, "all_to_all_single", splits=[[5, 4], [2, 4]])
    assert said_of(right[0], wrong) == [
        "communicator 'world' [0, 1]: rank 1 sends 5 elements to rank 0 in all_to_all_single at "
        "line 0, which expects 3"
    ]


# `run_ranks` with the rules -----------------------------------------------------------------------


def barriers_of_two_groups(group: Any) -> None:
    """A hang over gloo, too."""
    groups = [group_of(0, 1), group_of(0, 1)]
    dist.barrier(groups[group.rank()])


def test_ranks_that_hang_say_who_waits_for_whom(monkeypatch):
    monkeypatch.setattr(watch, "QUIET", 1.0)
    with pytest.raises(AssertionError) as failed:
        run_ranks(barriers_of_two_groups, 2, preload=(), rules=True)
    said = str(failed.value)
    assert "all ranks wait for each other" in said
    for rank in range(2):
        assert re.search(
            rf"rank {rank} waits at tests/rehearsal/test_nccl_rules.py:\d+ for barrier .* "
            rf"'planted' \[0, 1\] over gloo, ranks \[{1 - rank}\] are not in it",
            said,
        )


def sends_before_it_receives(group: Any) -> None:
    readers = {0: None, 1: None}
    edge = Edge([0, 1], readers, group, group, 2, torch.float32, torch.device("cpu"))
    connect(group, edge.device)
    other = 1 - group.rank()
    edge.exchange("there", [(other, torch.ones(1, 2))], [])
    edge.exchange("there", [], [(other, torch.ones(1, 2))])
    edge.finish()


def test_run_ranks_fails_where_only_nccl_would_hang():
    with pytest.raises(AssertionError, match=r"(?s)2 problems.*recv from rank 1 .*behind send to"):
        run_ranks(sends_before_it_receives, 2, rules=True)
    assert run_ranks(sends_before_it_receives, 2, rules=False) == [None, None]
