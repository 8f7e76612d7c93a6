"""Connections that the network refuses, not the other end: a cut may be over soon.

Nothing was sent then, so that trying again changes nothing. Connections that are made already wait
by themselves: TCP sends again what gets no answer. A host that is dead looks like one behind a cut,
so that there is a limit.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable

import aiohttp

AGAIN_S = 0.5  # until the next try
CUT_S = 60.0  # longest cut; as long as the keepalive of weights allows (`weight_receiver`)
NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)


def is_cut(error: Exception) -> bool:
    """True if a connection was not made, since the other host could not be reached."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    elif isinstance(error, aiohttp.ClientError):  # also of a connection that was there
        return isinstance(error, aiohttp.ConnectionTimeoutError)
    if isinstance(error, socket.gaierror):  # no server answered that knows names
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, TimeoutError) or getattr(error, "errno", None) in NO_WAY


def reached[T](
    connect: Callable[[], T], patience: float, given_up: Callable[[], bool] = lambda: False
) -> T:
    """The result of ``connect``, which is called again while the network is cut.

    Args:
        patience: time after which it is not called again [seconds]
        given_up: True if nobody needs the result any more

    Raises: what ``connect`` does.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return connect()
        except OSError as error:
            if not is_cut(error) or time.monotonic() > end or given_up():
                raise
        time.sleep(AGAIN_S)


async def reached_soon[T](connect: Callable[[], Awaitable[T]], patience: float) -> T:
    """`reached`, in a loop of events."""
    end = time.monotonic() + patience
    while True:
        try:
            return await connect()
        except (OSError, aiohttp.ClientError) as error:
            if not is_cut(error) or time.monotonic() > end:
                raise
        await asyncio.sleep(AGAIN_S)
