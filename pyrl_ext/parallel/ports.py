"""Who answers at an address, and which process holds a port of this machine."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, RemoteDisconnected
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

HEALTH = "/health"  # needs no key
ANSWER_S = 5.0  # limit of an answer
EVERY_ADDRESS = ("0.0.0.0", "::")


def is_own(header: str, host: str) -> bool:
    """True if a ``Host`` header names a server on ``host``, and not a name of another site that
    was made to lead here, whose scripts could then read what it answers."""
    if host in EVERY_ADDRESS:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
        if name in ("localhost", host.lower()):
            return True
        ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Absence:
    """Why no engine answers at an address.

    Args:
        reason: with the holder of the port, if that is a process of this machine
        is_taken: another program answers there
        is_distrusted: its certificate is not taken; the engine itself may work
    """

    reason: str
    is_taken: bool = False
    is_distrusted: bool = False


def absence_at(
    address: str, timeout: float = ANSWER_S, tls: ssl.SSLContext | None = None
) -> Absence | None:
    """Why no engine answers at an address; None: one does. Proxies are not used.

    Args:
        address: http://host:port, or https:// with ``tls``
    """
    url = urlsplit(address)
    place = url.hostname or "", url.port or 80
    if tls is None:
        connection = HTTPConnection(*place, timeout=timeout)
    else:
        connection = HTTPSConnection(*place, timeout=timeout, context=tls)
    try:
        connection.request("GET", HEALTH)
        reply = connection.getresponse()
        body = reply.read(1)
    except RemoteDisconnected:
        hint = "; an engine with rollout.tls does so where the plan has none" if tls is None else ""
        return Absence(f"the connection ended without an answer{hint}")
    except HTTPException:
        return _taken(address, "has no HTTP answer")
    except OSError as error:
        distrusted = isinstance(error, ssl.SSLCertVerificationError)
        return Absence(_reason_of(error), is_distrusted=distrusted)
    finally:
        connection.close()
    # engines answer 200 and no body, or 503 if they fail
    if reply.status == 200 and not body:
        return None
    if reply.status >= 500:
        return Absence(f"{HEALTH} answers {reply.status}")
    text = " with a text" if reply.status == 200 else ""
    return _taken(address, f"answers {reply.status}{text}")


def _reason_of(error: OSError) -> str:
    """Why there is no connection, in a few words."""
    if isinstance(error, ssl.SSLError):
        return tls_fault(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}".lower()
    return os.strerror(error.errno).lower() if error.errno else str(error)


def tls_fault(error: ssl.SSLError) -> str:
    """Why a connection to an engine by TLS failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        fault = error.verify_message.rstrip(".")
        return f"{fault}, expected one that rollout.tls.ca signed for the name that is called"
    return f"TLS: {error.reason or error}, expected an engine that was started with rollout.tls"


def _taken(address: str, found: str) -> Absence:
    reason = f"{HEALTH} {found}: another program, no engine"
    url = urlsplit(address)
    holder = process_on(url.hostname or "", url.port or 80)
    held = f"; port {url.port} is held by {holder}" if holder else ""
    return Absence(reason + held, is_taken=True)


def family_of(host: str) -> socket.AddressFamily:
    """The address family of a host's name or address: IPv6 if it has a colon."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def process_on(host: str, port: int) -> str | None:
    """``name (pid P)`` of the process that holds a port; None: it is free, or not this machine's.

    A port that is free is taken for a moment: do not call this while a server starts there.
    """
    try:
        with socket.create_server((host, port), family=family_of(host)):
            return None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return None
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:  # it ended meanwhile, or belongs to another user
        pass
    return "a process that does not listen, or that this user cannot see"
