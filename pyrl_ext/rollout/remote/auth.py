"""Access to the paths of an engine's server: one table, for vLLM's server and the embedded one.

vLLM's own ``--api-key`` protects some paths only; anyone who reaches the others can change the
weights. Here a path is served if it is in the table, spelled exactly so, and the caller has a key
for it. There are two keys: `generate` for those who ask for tokens, `control` for the trainer.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyrl_ext.parallel.ports import is_own
from pyrl_ext.rollout.remote import protocol

KEYS_VARIABLE = "PYRL_SERVER_KEYS"  # the folder; empty: none
MIN_KEY_LENGTH = 32  # [characters]
Role = Literal["nobody", "generate", "control"]

# path -> (method, role that it needs); `control` opens what `generate` does
TABLE: dict[str, tuple[str, Role]] = {
    protocol.HEALTH: ("GET", "nobody"),
    protocol.METRICS: ("GET", "generate"),
    protocol.WEIGHT_INFO: ("GET", "generate"),
    protocol.GENERATE: ("POST", "generate"),
    protocol.PAUSE: ("POST", "control"),
    protocol.RESUME: ("POST", "control"),
    protocol.START: ("POST", "control"),
    protocol.UPDATE: ("POST", "control"),
    protocol.FINISH: ("POST", "control"),
    protocol.RESET: ("POST", "control"),
    protocol.RPC: ("POST", "control"),
}

App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Keys:
    """The secrets of servers.

    Args:
        generate: for requests
        control: for everything else; None: servers ask for no key
    """

    generate: str | None = None
    control: str | None = None

    @classmethod
    def read(cls, folder: str | Path | None) -> Keys:
        """The files generate and control of ``folder``; None: servers ask for none.

        Raises: ValueError for keys that are missing, short or equal.
        """
        if folder is None:
            return cls()
        files = [Path(folder) / name for name in ("generate", "control")]
        generate, control = (read_key(file, "rollout.keys", MIN_KEY_LENGTH) for file in files)
        if generate == control:
            raise ValueError(f"rollout.keys: {folder}/generate and control are equal, expected two")
        return cls(generate, control)

    def role(self, authorization: str) -> Role:
        """The role of a request with this header."""
        if self.generate is None or self.control is None:
            return "control"
        header = authorization.encode()
        is_control = hmac.compare_digest(header, f"Bearer {self.control}".encode())
        is_generate = hmac.compare_digest(header, f"Bearer {self.generate}".encode())
        return "control" if is_control else "generate" if is_generate else "nobody"


def read_key(path: Path, where: str, least: int = 1) -> str:
    """The secret in a file.

    Args:
        where: key of the plan, for messages
        least: number of characters that it has

    Raises: ValueError for a file that cannot be read, or that others can read, as ssh does, or that
        is no such secret.
    """
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {path}, {error}, expected a file with a key") from None
    if mode & 0o077:
        raise ValueError(
            f"{where}: {path} has mode {mode:04o}, which other users can read or change, expected "
            f"0600. chmod 600 {path}, and make a new key if others may have seen it"
        )
    if len(text) < least or not text.isprintable() or " " in text:
        raise ValueError(
            f"{where}: {path} has {len(text)} characters, expected at least {least} "
            "printable ones without spaces. Make one with: openssl rand -hex 32"
        )
    return text


def server_keys(folder: str | Path | None, host: str) -> Keys:
    """The keys of a server that listens on ``host``.

    Raises: ValueError as `Keys.read`; for an address without keys that other machines reach.
    """
    if folder is None and not is_loopback(host):
        raise ValueError(
            f"serve: address {host} without keys, expected a loopback address; anyone who reaches "
            "it could change the weights. Set rollout.keys"
        )
    return Keys.read(folder)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal(
    keys: Keys, method: str, path: str, headers: Mapping[str, str]
) -> tuple[int, str] | None:
    """Status and reason of a refused request; None: it is served.

    Args:
        path: as the client wrote it, without the query
        headers: by their names in lower case
    """
    expected_method, needed = TABLE.get(path, ("", "control"))
    role = keys.role(headers.get("authorization", ""))
    host = headers.get("host", "localhost")
    if keys.control is None and not is_own(host, "localhost"):  # its GETs carry no Origin
        return 403, f"the request is for host {host} without keys, expected localhost or an address"
    if role == "nobody" and needed != "nobody":
        return 401, "no valid key, expected one in the Authorization header"
    if not expected_method:
        return 403, "this path is not served"
    if needed == "control" and role == "generate":
        return 403, "the key for generating does not open this path"
    if method != expected_method:
        return 405, f"{method}, expected {expected_method}"
    if "origin" in headers:
        return 403, "the request comes from a web page, expected a trainer"
    return None


def refusal_body(status: int, reason: str) -> bytes:
    """The body of a refusal."""
    return json.dumps({"error": {"message": reason, "code": status}}).encode()


class Auth:
    """ASGI middleware, `--middleware pyrl_ext.rollout.remote.auth.Auth` of vLLM. The folder of keys
    is in the environment: arguments can be seen by others.

    Raises: ValueError as `Keys.read`.
    """

    def __init__(self, app: App):
        self.app = app
        self.keys = Keys.read(os.environ.get(KEYS_VARIABLE) or None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refused is None:
            return await self.app(scope, receive, send)
        status, reason = refused
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal_body(status, reason)})

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        if scope["type"] != "http":
            return 403, "http only"
        host, _ = scope.get("server") or ("", 0)
        if self.keys.control is None and not is_loopback(host):
            return 403, f"reached over {host} without keys, expected a loopback address"
        raw = scope.get("raw_path", b"").decode("latin-1").partition("?")[0]
        path = raw if raw == scope["path"] and not scope.get("root_path") else ""
        decoded = ((name.decode("latin-1"), value) for name, value in scope["headers"])
        headers = {name.lower(): value.decode("latin-1") for name, value in decoded}
        return refusal(self.keys, scope["method"], path, headers)
