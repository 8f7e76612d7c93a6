"""Access to the paths of an engine's server: one table, for vLLM's server and the embedded one.

vLLM's own ``--api-key`` protects some paths only; anyone who reaches the others can change the
weights. Here a path is served if it is in the table, spelled exactly so, and the caller has a key
for it. There are two keys: `generate` for those who ask for tokens, `control` for the trainer.

The trainer never sends its key. Each of its calls has a challenge, and each answer the server's
number and an HMAC with the key over both: the proof that the server knows it. With the number of a
proven server the trainer makes a token, which this process alone takes, under this address alone.
So who answers in place of a server, at its port or another address, gets nothing that a server
takes, and the trainer finds out by the first answer.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pyrl_ext.parallel.ports import is_own
from pyrl_ext.rollout.remote import protocol

KEYS_VARIABLE = "PYRL_SERVER_KEYS"  # the folder; empty: none
ADDRESS_VARIABLE = "PYRL_SERVER_ADDRESS"  # of the plan
MIN_KEY_LENGTH = 32  # [characters]
CHALLENGE = "Pyrl-Challenge"  # header of a call
PROOF = "Pyrl-Proof"  # header of its answer
CHALLENGE_FORM = re.compile("[0-9a-f]{64}")
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
        is_control = _same(authorization, f"Bearer {self.control}")
        is_generate = _same(authorization, f"Bearer {self.generate}")
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
        require_private(path, where)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {path}, {error}, expected a file with a key") from None
    if len(text) < least or not text.isprintable() or " " in text:
        raise ValueError(
            f"{where}: {path} has {len(text)} characters, expected at least {least} "
            "printable ones without spaces. Make one with: openssl rand -hex 32"
        )
    return text


def require_private(path: Path, where: str) -> None:
    """Raises: ValueError for a file that others can read, as ssh does; OSError."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(
            f"{where}: {path} has mode {mode:04o}, which other users can read or change, expected "
            f"0600. chmod 600 {path}, and make a new key if others may have seen it"
        )


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


# proofs ------------------------------------------------------------------------------------------


def token_of(key: str, host: str, number: str) -> str:
    """The value of an Authorization header, of a caller that knows the control key.

    Args:
        host: ``name:port`` that the server is called by
        number: of the server's process
    """
    return f"Bearer {_hmac(key, 'token', host, number)}"


def proof_of(key: str, host: str, challenge: str, number: str) -> str:
    """The value of a `PROOF` header: the number of the server's process, and that it knows the key.

    Args:
        host, number: as for `token_of`
        challenge: of the call
    """
    return f"{number} {_hmac(key, 'proof', host, challenge, number)}"


def proven_number(key: str, host: str, challenge: str, header: str) -> str | None:
    """The number in a `PROOF` header; None if it does not prove that the server knows the key."""
    number = header.partition(" ")[0]
    return number if _same(header, proof_of(key, host, challenge, number)) else None


def _hmac(key: str, *parts: str) -> str:
    """HMAC-SHA256 over the parts, none of which has a line break; the first one is its purpose."""
    text = "\n".join(("pyrl_ext", *parts)).encode(errors="replace")
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


def _same(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode(errors="replace"), expected.encode(errors="replace"))


# the server's end --------------------------------------------------------------------------------


class Guard:
    """Refuses calls, and proves that the server knows its keys.

    Args:
        keys: of the server
        address: by which it is called, http://name:port; None: by any name, with the port of the
            connection
    """

    def __init__(self, keys: Keys, address: str | None = None):
        self.keys = keys
        self._host = urlsplit(address).netloc.lower() if address else None
        self._number = secrets.token_hex(32)  # another one when the server is started again

    def role(self, headers: Mapping[str, str], port: int) -> Role:
        """The role of a call.

        Args:
            headers: by their names in lower case
            port: of the connection, at this end
        """
        authorization = headers.get("authorization", "")
        host = headers.get("host", "").lower()
        control = self.keys.control
        if control is None or not self._is_called(host, port):
            return self.keys.role(authorization)
        has_token = _same(authorization, token_of(control, host, self._number))
        return "control" if has_token else self.keys.role(authorization)

    def proof(self, headers: Mapping[str, str], port: int) -> dict[str, str]:
        """The headers of the answer to a call with a challenge; arguments as for `role`."""
        host = headers.get("host", "").lower()
        challenge = headers.get(CHALLENGE.lower(), "")
        if self.keys.control is None or not CHALLENGE_FORM.fullmatch(challenge):
            return {}
        if not self._is_called(host, port):  # the caller asks for another server
            return {}
        return {PROOF: proof_of(self.keys.control, host, challenge, self._number)}

    def refusal(
        self, method: str, path: str, headers: Mapping[str, str], port: int
    ) -> tuple[int, str] | None:
        """Status and reason of a refused call; None: it is served.

        Args:
            path: as the client wrote it, without the query
            headers, port: as for `role`
        """
        expected_method, needed = TABLE.get(path, ("", "control"))
        role = self.role(headers, port)
        host = headers.get("host", "localhost").lower()
        challenge = headers.get(CHALLENGE.lower())
        if challenge is not None and not CHALLENGE_FORM.fullmatch(challenge):
            return 400, f"{CHALLENGE} has {len(challenge)} characters, expected 64 hex digits"
        if challenge is not None and not self._is_called(host, port):
            own = self._host or f"a name with port {port}"
            return 421, f"{host} is called, expected {own}, the address of this server"
        if reason := self._foreign(host, role):
            return 403, reason
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

    def _is_called(self, host: str, port: int) -> bool:
        """True if a caller of this ``name:port`` means this server, not one that passes it on."""
        if self._host is not None:
            return host == self._host
        return host.rpartition(":")[2] == str(port)

    def _foreign(self, host: str, role: Role) -> str | None:
        """Why the name of a host is refused: a page of that name carries no key, nor do its GETs
        carry an Origin."""
        if self.keys.control is None:
            own = "localhost"
        elif role == "nobody" and self._host is not None:
            own = self._host.rpartition(":")[0]
        else:
            return None
        if is_own(host, own):
            return None
        return f"the request is for host {host} without keys, expected {own} or an address"


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
        keys = Keys.read(os.environ.get(KEYS_VARIABLE) or None)
        self.guard = Guard(keys, os.environ.get(ADDRESS_VARIABLE))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        decoded = ((name.decode("latin-1"), value) for name, value in scope.get("headers", ()))
        headers = {name.lower(): value.decode("latin-1") for name, value in decoded}
        _, port = scope.get("server") or ("", None)
        refused = self._refusal(scope, headers, port or 0)
        proof = self.guard.proof(headers, port or 0)
        added = [(name.lower().encode(), value.encode()) for name, value in proof.items()]

        begun = False

        async def proven(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        async def refuse(status: int, reason: str) -> None:
            kind = [(b"content-type", b"application/json")]
            await proven({"type": "http.response.start", "status": status, "headers": kind})
            await send({"type": "http.response.body", "body": refusal_body(status, reason)})

        if refused is not None:
            return await refuse(*refused)
        try:
            await self.app(scope, receive, proven)
        except Exception as error:
            # starlette answers it outside of all middleware, where no proof is added
            if not begun:
                await refuse(500, f"{type(error).__name__}: {error}")
            raise

    def _refusal(self, scope: Any, headers: Mapping[str, str], port: int) -> tuple[int, str] | None:
        if scope["type"] != "http":
            return 403, "http only"
        host, _ = scope.get("server") or ("", 0)
        if self.guard.keys.control is None and not is_loopback(host):
            return 403, f"reached over {host} without keys, expected a loopback address"
        raw = scope.get("raw_path", b"").decode("latin-1").partition("?")[0]
        path = raw if raw == scope["path"] and not scope.get("root_path") else ""
        return self.guard.refusal(scope["method"], path, headers, port)
