"""Publishing where processes die and connections stall, over two servers' processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.protocol import RESUME, RPC, START, WEIGHT_INFO
from pyrl_ext.rollout.remote.weight_protocol import UpdateInfo
from tests.helpers.engines import GLM, checkpoint, random_model
from tests.helpers.publishing import REQUEST, Trainer
from tests.helpers.ranks import fork_ranks
from tests.helpers.server_processes import ServerProcess, server_processes

pytestmark = [pytest.mark.slow, pytest.mark.alone]

FIRST, SECOND = (checkpoint(random_model(GLM, seed)) for seed in (0, 1))
Named = Iterator[tuple[str, Tensor]]


def until(weights: dict[str, Tensor], number: int, happens: Callable[[], object]) -> Named:
    """The weights; something happens before tensor ``number``."""
    for place, each in enumerate(weights.items()):
        if place == number:
            happens()
        yield each


def dies_half_way(rank: int, ranks: int, port: int, addresses: list[str]) -> None:
    """A trainer."""
    with ExitStack() as stack:
        trainer = Trainer(stack, addresses)
        trainer.publish(until(SECOND, 60, lambda: os.kill(os.getpid(), signal.SIGKILL)), 2)


def one_of_two_dies(rank: int, ranks: int, port: int, addresses: list[str], said: Path) -> None:
    """Two ranks of a trainer, each with every second tensor; the second one dies half way."""
    store = dist.TCPStore("127.0.0.1", port)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    part = dict(list(SECOND.items())[rank::ranks])
    shapes = {name: weight.shape for name, weight in part.items()}
    with ExitStack() as stack:
        trainer = Trainer(stack, addresses[: None if rank == 0 else 0])
        named = until(part, 30 if rank else -1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            trainer.publish(named, 2, shapes=shapes, group=dist.group.WORLD)
        except RuntimeError as error:
            said.write_text(str(error))


class Two(Trainer):
    """Two servers' processes, with the first weights as version 1."""

    def __init__(self, stack: ExitStack, folder: Path):
        self.folder = folder
        self.processes = stack.enter_context(server_processes(folder, 2))
        super().__init__(stack, [each.address for each in self.processes])
        assert self.publish(FIRST, 1).failed == {}

    def digests(self, server: Server) -> dict[str, int]:
        (found,) = self.run(server.control(RPC, {"method": "weight_digests"}))["results"]
        return found

    def version(self, server: Server) -> str:
        return self.run(server.control(WEIGHT_INFO, method="GET"))["weight_version"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(stack, tmp_path_factory.mktemp("servers"))


def still_first(two: Two) -> None:
    """Both servers have the first weights, whole, and generate with them."""
    for server in two.servers:
        assert two.version(server) == "1"
        two.run(server.control(RESUME))
        answer = two.generate(server)
        assert answer.versions == ((0, 4, 1),)
    first, second = map(two.digests, two.servers)
    assert first == second


def test_publish_by_a_trainer_that_is_killed_leaves_the_old_weights(two: Two):
    before = two.digests(two.servers[0])
    addresses = [server.address for server in two.servers]
    with fork_ranks(dies_half_way, 1, addresses) as [trainer]:
        trainer.join()
        assert trainer.exitcode == -signal.SIGKILL
    still_first(two)
    assert two.digests(two.servers[0]) == before


def test_publish_by_two_ranks_of_which_one_is_killed_leaves_the_old_weights(
    two: Two, tmp_path: Path
):
    before = two.digests(two.servers[0])
    said = tmp_path / "said"
    addresses = [server.address for server in two.servers]
    with fork_ranks(one_of_two_dies, 2, addresses, said) as trainers:
        for trainer in trainers:
            trainer.join()
        assert [trainer.exitcode for trainer in trainers] == [0, -signal.SIGKILL]
    text = said.read_text()
    mine = list(SECOND)[1::2]
    for address in addresses:
        (why,) = (line for line in text.splitlines() if address in line)
        assert "from rank 1 of the trainer at 127.0.0.1:" in why
        assert why.rpartition(", at ")[2].partition('"')[0] in mine[:30]
    still_first(two)
    assert two.digests(two.servers[0]) == before


def test_publish_by_a_trainer_that_stalls_ends(two: Two):
    """Servers wait for the next bytes as long as its info says, then take no more."""
    told = UpdateInfo.model_dump
    ended = list[Server]()

    def short(self: UpdateInfo) -> dict[str, Any]:
        return told(self) | {"silence": 0.2}

    def wait() -> None:
        for server in two.servers:  # it takes a start once its update has ended
            two.run(server.control(START))
            ended.append(server)

    with patch.object(UpdateInfo, "model_dump", short):
        done = two.publish(until(SECOND, 60, wait), 2)
    assert ended == two.servers and done.failed.keys() == {s.address for s in two.servers}
    assert all("sent nothing for 0.2 s" in why for why in done.failed.values())
    still_first(two)


def test_publish_with_another_key_reaches_nobody(two: Two):
    told = UpdateInfo.model_dump

    def other(self: UpdateInfo) -> dict[str, Any]:
        fields = told(self)
        for sender in fields["senders"] if self.engine else ():
            sender["key"] = "0" * 64
        return fields

    with patch.object(UpdateInfo, "model_dump", other):
        done = two.publish(SECOND, 2)
    good, bad = two.servers
    assert done.failed.keys() == {bad.address} and two.version(good) == "2"
    assert "an end after 0 of 12 bytes" in done.failed[bad.address]
    assert two.version(bad) == "1"
    assert two.publish(FIRST, 3).failed == {}


@dataclass
class Again:
    """Weights that can be given again; something happens before tensor 60 of the first time."""

    happens: Callable[[], object]
    given: bool = False

    def __iter__(self) -> Named:
        yield from SECOND.items() if self.given else until(SECOND, 60, self.happens)
        self.given = True


@pytest.mark.parametrize(("broadcast", "times"), [(False, 0), (True, 1)])
def test_publish_goes_on_without_a_server_that_is_killed_and_takes_it_back(
    two: Two, broadcast: bool, times: int
):
    good, bad = two.servers
    killed = two.processes[1]
    done = two.publish(Again(killed.end), 4, broadcast=broadcast)
    assert done.failed.keys() == {bad.address} and done.seen.keys() == {good.address}
    assert two.version(good) == "4" and times <= done.again <= 2 * times
    done = two.publish(SECOND, 5, broadcast=broadcast)  # while it is gone
    assert done.failed.keys() == {bad.address}
    log = two.folder / "again.log"
    two.processes[1] = ServerProcess(log, port=int(bad.address.rpartition(":")[2]))
    assert two.processes[1].address == bad.address
    bad.failure = None
    with pytest.raises(ServerFailed, match="no complete weights"):
        two.generate(bad)
    assert two.publish(FIRST, 6, broadcast=broadcast).failed == {}
    assert two.digests(good) == two.digests(bad)
    assert two.generate(bad, replace(REQUEST, salt="6")).versions == ((0, 4, 6),)


def test_broadcast_that_a_server_stalls_reaches_the_others_by_tcp(two: Two):
    """Which one stalled shows there, by its own time."""
    good, bad = two.servers
    number = two.processes[1].process.pid
    assert number is not None
    stall = Again(partial(os.kill, number, signal.SIGSTOP))
    done = two.publish(stall, 7, broadcast=True, timeout=8.0)
    os.kill(number, signal.SIGCONT)
    assert done.failed.keys() == {bad.address} and done.seen.keys() == {good.address}
    assert two.version(good) == "7" and done.again == 2
    assert two.publish(FIRST, 8, broadcast=True).failed == {}


def test_publish_names_the_server_that_it_waits_for(
    two: Two, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("pyrl_ext.parallel.waiting.QUIET_S", 0.5)
    good, bad = two.servers
    two.processes[1].signal(signal.SIGSTOP)
    done = two.publish(SECOND, 9, timeout=8.0)
    two.processes[1].signal(signal.SIGCONT)
    assert done.failed == {
        bad.address: f"{bad.address}/pause?mode=abort&clear_cache=true: no answer within 8 s"
    }
    assert done.seen.keys() == {good.address}
    *_, line = capsys.readouterr().err.splitlines()
    said = re.fullmatch(
        "waiting for remote engines that get new weights: no answer from (.*); [0-9]+ s so far, at "
        r"most 8 s, until [0-9:]+\. An engine that takes longer is removed "
        r"\(rollout.publish_timeout\)",
        line,
    )
    assert said is not None and f"{bad.address}/pause" in said[1]
    assert two.publish(FIRST, 10).failed == {}
