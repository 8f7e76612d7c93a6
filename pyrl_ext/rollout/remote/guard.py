"""Who may call which path of an engine's server: one table, for vLLM's server and the embedded one.

vLLM's own ``--api-key`` guards some paths only; whoever reaches the others can change the weights.
Here a path is served if it is listed, spelled exactly so, and the caller has a key for it. There
are two keys: `generate` for those who ask for tokens, `control` for the trainer.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrl_ext.rollout.remote import protocol

KEYS_VARIABLE = "PYRL_SERVER_KEYS"  # the folder; empty: none
SHORTEST = 32  # key [characters]

# path -> (method, whose key); `control` opens what `generate` does
TABLE: dict[str, tuple[str, str]] = {
    protocol.HEALTH: ("GET", "nobody"),
    protocol.METRICS: ("GET", "generate"),
    protocol.IS_PAUSED: ("GET", "generate"),
    protocol.WEIGHT_INFO: ("GET", "generate"),
    protocol.GENERATE: ("POST", "generate"),
    protocol.ABORT: ("POST", "control"),
    protocol.PAUSE: ("POST", "control"),
    protocol.RESUME: ("POST", "control"),
    protocol.INIT_TRANSFER: ("POST", "control"),
    protocol.SHUTDOWN_TRANSFER: ("POST", "control"),
    protocol.START: ("POST", "control"),
    protocol.UPDATE: ("POST", "control"),
    protocol.FINISH: ("POST", "control"),
    protocol.RESET: ("POST", "control"),
    protocol.WEIGHT_CHECKER: ("POST", "control"),
    protocol.RPC: ("POST", "control"),
}
RPC_METHODS = ("weight_digests", "identity")
# path -> the field of its body that chooses what is done, and its values that are let through
CHECKED: dict[str, tuple[str, tuple[str, ...]]] = {
    protocol.RPC: ("method", RPC_METHODS),
    protocol.WEIGHT_CHECKER: ("action", ("checksum", "compare")),  # "reset" overwrites weights
}

App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Keys:
    """SHA-256 of both keys."""

    generate: bytes
    control: bytes

    @classmethod
    def of(cls, folder: str | Path | None, host: str) -> Keys | None:
        """The keys in a folder; None: there is none, and the server listens on loopback alone.

        Raises: ValueError for keys that are missing, short or equal, or an open address without.
        """
        if folder is None:
            if not loopback(host):
                raise ValueError(
                    f"serve: address {host} without keys, expected a loopback address; whoever "
                    "reaches it could change the weights. Set rollout.keys"
                )
            return None
        texts = [read_key(folder, name) for name in ("generate", "control")]
        if texts[0] == texts[1]:
            raise ValueError(f"rollout.keys: {folder}/generate and control are equal, expected two")
        return cls(*(hashlib.sha256(text.encode()).digest() for text in texts))

    def role(self, authorization: str | None) -> str:
        """Whose key a request has: nobody, generate or control."""
        kind, _, given = (authorization or "").partition(" ")
        found = hashlib.sha256(given.strip().encode()).digest()
        is_generate = hmac.compare_digest(found, self.generate)
        is_control = hmac.compare_digest(found, self.control)
        if kind.lower() != "bearer":
            return "nobody"
        return "control" if is_control else "generate" if is_generate else "nobody"


def read_key(folder: str | Path, name: str) -> str:
    """A key from its file. Raises: ValueError for one that is missing, short or not plain text."""
    path = Path(folder) / name
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"rollout.keys: {path}, {error}, expected a file with a key") from None
    if len(text) < SHORTEST or not text.isprintable() or " " in text:
        raise ValueError(
            f"rollout.keys: {path} has {len(text)} characters, expected at least {SHORTEST} "
            "printable ones without spaces. Make one with: openssl rand -hex 32"
        )
    return text


def loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def decide(
    keys: Keys | None, method: str, path: str, headers: Mapping[str, list[str]]
) -> tuple[int, str] | None:
    """Why a request is refused, with its status; None: it is served.

    Args:
        keys: None: a server on a loopback address, which asks for none
        path: as the client wrote it, without the query
        headers: of lower-case names
    """
    wanted, whose = TABLE.get(path, ("", "nobody"))
    given = headers.get("authorization", [])
    role = "control" if keys is None else keys.role(given[0] if len(given) == 1 else None)
    if role == "nobody" and whose != "nobody":
        return 401, "a key is needed"
    if not wanted:
        return (401, "a key is needed") if role == "nobody" else (403, "this path is not served")
    if whose == "control" and role == "generate":
        return 403, "the key for generating does not open this path"
    if method != wanted:
        return 405, f"{method}, expected {wanted}"
    if "origin" in headers:
        return 403, "a page in a browser asks, expected a trainer"
    if method == "POST":
        lengths = headers.get("content-length", [])
        if len(lengths) != 1 or not lengths[0].isdecimal() or "transfer-encoding" in headers:
            return 411, "a body without its length"
        if int(lengths[0]) > protocol.MAX_BODY:
            return 413, f"a body of {lengths[0]} bytes, expected at most {protocol.MAX_BODY}"
    return None


def decide_body(path: str, body: bytes) -> tuple[int, str] | None:
    """Why a call with this body is refused; None: it is served."""
    if path not in CHECKED:
        return None
    name, allowed = CHECKED[path]
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return 400, "a body that is no JSON"
    if not isinstance(fields, dict) or fields.get(name) not in allowed:
        return 403, f"{path}: expected {name} to be one of {', '.join(allowed)}"
    return None


def refusal(status: int, why: str) -> bytes:
    """The body of a refusal."""
    return json.dumps({"error": {"message": why, "code": status}}).encode()


def for_aiohttp(keys: Keys | None) -> Any:
    """The guard of the embedded engine's server."""
    from aiohttp import web

    @web.middleware
    async def guard(http: web.Request, handler: Any) -> web.StreamResponse:
        headers: dict[str, list[str]] = {}
        for name, value in http.headers.items():
            headers.setdefault(name.lower(), []).append(value)
        path = http.raw_path.partition("?")[0]
        refused = decide(keys, http.method, path, headers)
        if refused is None and http.method == "POST":
            refused = decide_body(path, await http.read())
        if refused is None:
            return await handler(http)
        status, why = refused
        return web.Response(status=status, body=refusal(status, why))

    return guard


class Guard:
    """ASGI middleware, `--middleware pyrl_ext.rollout.remote.guard.Guard` of vLLM. The folder of
    keys is in the environment: arguments can be seen by others.

    Raises: ValueError as `Keys.of`.
    """

    def __init__(self, app: App):
        self.app = app
        self.keys = Keys.of(os.environ.get(KEYS_VARIABLE) or None, "127.0.0.1")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        refused = self._decide(scope)
        if refused is None and scope["path"] in CHECKED:
            body = await _whole_body(receive)
            refused = decide_body(scope["path"], body)
            receive = _again(body, receive)
        if refused is None:
            return await self.app(scope, receive, send)
        status, why = refused
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": refusal(status, why)})

    def _decide(self, scope: Any) -> tuple[int, str] | None:
        if scope["type"] != "http":
            return 403, "http only"
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        server = scope.get("server") or ("", 0)
        if self.keys is None and not loopback(server[0]):
            return 403, f"reached over {server[0]} without keys, expected a loopback address"
        raw = scope.get("raw_path", b"").decode("latin-1").partition("?")[0]
        path = raw if raw == scope["path"] and not scope.get("root_path") else ""
        return decide(self.keys, scope["method"], path, headers)


async def _whole_body(receive: Any) -> bytes:
    """The body of a request, whose length `decide` has bounded."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body once more."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Any:
        return messages.pop() if messages else await receive()

    return give
