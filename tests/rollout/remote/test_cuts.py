"""A network that is cut for a while ends nothing; a host that does not come back does, by name."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from threading import Lock, Timer
from typing import Any

import aiohttp
import pytest

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import server_update, weight_sender
from pyrl_ext.rollout.remote.client import Server
from pyrl_ext.rollout.remote.cuts import AGAIN_S, NO_WAY, is_cut, reached
from pyrl_ext.rollout.remote.holder import Run
from pyrl_ext.rollout.remote.protocol import FINISH, PAUSE, RESET, RESUME, RPC, START, UPDATE
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from tests.helpers.deadline import DEADLINE
from tests.helpers.engines import GLM, checkpoint, random_model
from tests.helpers.hosts import ROOT
from tests.helpers.publishing import Trainer
from tests.helpers.python_path import python_path
from tests.helpers.servers import running

pytestmark = pytest.mark.multiprocess

NAMESPACE = ("unshare", "--net", "--map-root-user")
CUT_S = 0.5
# packets get no answer, or nobody knows a way
WAYS = {
    "link set lo down": "link set lo up",
    "addr del 127.0.0.1/8 dev lo": "addr add 127.0.0.1/8 dev lo",
}
# where a network may be cut: each with the name of a call, or any call
MOMENTS = (
    *((Server, "control", path) for path in (PAUSE, RPC, START, UPDATE, FINISH, RESET, RESUME)),
    (Server, "generate", ""),
    (StagedUpdate, "update", ""),
    (weight_sender, "address_towards", ""),
    (server_update, "way_to", ""),
)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@contextmanager
def cut_before(owner: Any, name: str, path: str, way: str) -> Iterator[list[Timer]]:
    """Cuts the network of this namespace for a while before the first call of a function; gives
    what ends the cut."""
    call = getattr(owner, name)
    ends: list[Timer] = []
    lock = Lock()

    def cut(*arguments: Any, **more: Any) -> Any:
        with lock:
            if not ends and (not path or arguments[1].startswith(path)):
                ip(way)
                ends.append(Timer(CUT_S, ip, (WAYS[way],)))
                ends[0].start()
        return call(*arguments, **more)

    setattr(owner, name, cut)
    try:
        yield ends
    finally:
        setattr(owner, name, call)
        for end in ends:
            end.join()


def in_namespace() -> None:
    """Publishes while the network is cut; then cuts that outlast the limit of a step."""
    ip("link set lo up")
    weights = checkpoint(random_model(GLM))
    with ExitStack() as stack:
        urls: list[str] = []
        for _ in range(2):
            engine = HFEngine(GLM, max_num_seqs=16)
            urls.append(stack.enter_context(running(engine, 500)).url)
        trainer = Trainer(stack, urls)
        run = Run("1", "run")
        for version, (moment, way) in enumerate(product(MOMENTS, WAYS), 1):
            with cut_before(*moment, way) as ends:
                done = trainer.publish(weights, version, run=run)
            assert len(ends) == 1 and done.failed == {} and len(done.seen) == 2, (moment, done)
            print(f"version {version} came in spite of {way} before {moment[1:]}")
        for (down, up), cause in zip(WAYS.items(), ("no answer within 1 s", "no way there")):
            ip(down)
            done = trainer.publish(weights, 99, timeout=1.0, canary=None)
            ip(up)
            assert len(done.failed) == 2
            assert all(cause in reason for reason in done.failed.values()), done.failed
    print("all versions came")


def test_publish_waits_for_a_network_that_comes_back():
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs the commands unshare (util-linux) and ip (iproute2)")
    tried = subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"needs network namespaces: {tried.stderr.decode().strip()}")
    run = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.rollout.remote.test_cuts"],
        cwd=ROOT,
        env={
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(ROOT),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert run.returncode == 0 and "all versions came" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("code", NO_WAY)
def test_reached_tries_again_while_the_network_is_cut(code: int):
    fails = [OSError(code, "no way")] * 2

    def connect() -> str:
        if fails:
            raise fails.pop()
        return "there"

    assert reached(connect, DEADLINE) == "there"
    fails += [OSError(code, "no way")] * 99
    with pytest.raises(OSError, match="no way"):
        reached(connect, AGAIN_S)
    fails[:] = [ConnectionRefusedError(111, "nobody listens")]
    with pytest.raises(ConnectionRefusedError):
        reached(connect, DEADLINE)
    assert not fails
    fails += [OSError(code, "no way")] * 2
    with pytest.raises(OSError, match="no way"):
        reached(connect, DEADLINE, lambda: len(fails) < 2)
    assert len(fails) == 1


def test_is_cut_knows_what_the_other_end_refused():
    cut = [socket.gaierror(socket.EAI_AGAIN, ""), TimeoutError(), aiohttp.ConnectionTimeoutError()]
    not_cut = [
        socket.gaierror(socket.EAI_NONAME, ""),
        ConnectionRefusedError(111, ""),
        ConnectionResetError(104, ""),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        ValueError(),
    ]
    assert all(map(is_cut, cut)) and not any(map(is_cut, not_cut))


if __name__ == "__main__":
    in_namespace()
