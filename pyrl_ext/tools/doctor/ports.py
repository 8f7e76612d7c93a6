"""Ports that a plan wants on this host: free, answering, or held by another process."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import psutil

from pyrl_ext.plan import Plan

ANSWER = 3.0  # a server that runs takes a connection within this time [s]
RENDEZVOUS = 29500  # torchrun's, unless it is told another or --standalone


def ports(plan: Plan) -> Iterator[tuple[str, str, str | None]]:
    """(name, what was found, problem) of each port. The weights' own ports are left out: the system
    chooses them when they are sent."""
    if plan.world_size > 1 and "RANK" not in os.environ:  # else the ranks have met already
        yield _rendezvous()
    for address in plan.addresses:
        place = urlsplit(address)
        yield f"engine {address}", *_engine(place.hostname or "", place.port or 0, plan.source)


def _rendezvous() -> tuple[str, str, str | None]:
    name, told = "rendezvous port", os.environ.get("MASTER_PORT")
    if told and not (told.isascii() and told.isdigit() and 0 < int(told) < 2**16):
        return name, told, f"MASTER_PORT is {told!r}, expected a port, 1 to 65535. Unset it"
    port = int(told or RENDEZVOUS)
    held = holder("", port)
    found = f"{port} is {f'held by {held}' if held else 'free'}"
    if held and not told:
        return name, f"{found}; torchrun needs --standalone, or another port", None
    return name, found, f"{found}, expected a free one. Change MASTER_PORT" if held else None


def _engine(host: str, port: int, source: str) -> tuple[str, str | None]:
    """(found, problem) of an engine's address."""
    start = f"expected an engine. Start it with: pyrl serve {source}"
    try:
        status = _health(host, port)
        if status == 200:
            return "answers", None
        reason = f"/health answers {status}"
    except HTTPException as error:
        reason = f"/health has no HTTP answer ({error!r})"
    except OSError as error:
        reason = f"{error}"
    if (held := holder(host, port)) is None:
        return "no answer", f"{reason}, {start}"
    problem = f"{reason}; port {port} is held by {held}, {start}, with another port or without it"
    return f"held by {held}", problem


def _health(host: str, port: int) -> int:
    """The status of /health, which needs no key."""
    connection = HTTPConnection(host, port, timeout=ANSWER)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def holder(host: str, port: int) -> str | None:
    """The process that holds a port; None: it is free, or of another host."""
    try:
        with socket.create_server((host, port)):
            return None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return None
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"pid {each.pid} ({psutil.Process(each.pid).name()})"
    except psutil.Error:  # ended meanwhile, or not this user's
        pass
    return "a process that does not listen, or that this user cannot see"
