"""Who may call what: paths x callers, on a server that serves, and as ASGI around any other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import guard
from pyrl_ext.rollout.remote.guard import TABLE, Guard, Keys
from pyrl_ext.rollout.remote.protocol import GENERATE, HEALTH, RPC
from tests.helpers.engines import GLM, checkpoint, random_model
from tests.helpers.guarded import CALLERS, ODD, SECRETS, expected, key_folder, raw_call
from tests.helpers.servers import served

pytestmark = pytest.mark.multiprocess


def test_server_answers_every_path_and_caller_as_the_table_says(tmp_path: Path):
    keys = Keys.of(key_folder(tmp_path), "10.0.0.1")

    async def check() -> list[str]:
        engine = HFEngine(GLM)
        engine.load_weights(checkpoint(random_model(GLM)).items(), 1)
        async with served(engine, keys=keys) as client:
            host, port = client.url.removeprefix("http://").split(":")
            wrong = []
            for path in [*TABLE, *ODD]:
                for caller, key in CALLERS.items():
                    status = await asyncio.to_thread(raw_call, host, int(port), path, key)
                    if (status < 400 or status in (400, 404, 409, 500)) != expected(path, caller):
                        wrong.append(f"{path} by {caller}: {status}")
            assert engine.version == 1
            return wrong

    assert asyncio.run(check()) == []


def asgi(path: str, caller: str, **scope: Any) -> int:
    """The status of one call through the ASGI guard; the application behind it answers 200."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({"method": "weight_digests", "action": "checksum"}).encode()
    messages = [{"type": "http.request", "body": body[:9], "more_body": True}]
    messages += [{"type": "http.request", "body": body[9:], "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while (message := await receive()).get("more_body"):
            data += message["body"]
        assert data + message["body"] == body
        await send({"type": "http.response.start", "status": 200, "headers": []})

    method = TABLE[path][0] if path in TABLE else "POST"
    headers = [(b"content-length", str(len(body)).encode())]
    if key := CALLERS[caller]:
        headers.append((b"Authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
        "server": ("127.0.0.1", 8000),
    } | scope
    asyncio.run(Guard(application)(scope, receive, send))
    return sent[0]["status"]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(guard.KEYS_VARIABLE, str(key_folder(tmp_path)))


def test_asgi_guard_has_the_same_table(keys: None):
    for path in [*TABLE, *ODD]:
        for caller in CALLERS:
            status = asgi(path, caller)
            assert (status == 200) == expected(path, caller), (path, caller, status)
            assert status in (200, 401, 403), (path, caller, status)


def test_asgi_guard_refuses_spellings_methods_and_bodies(keys: None):
    assert asgi(GENERATE, "generate") == 200
    assert asgi(GENERATE, "generate", raw_path=b"/inference/v1/%67enerate") == 403
    assert asgi(GENERATE, "generate", root_path="/inference") == 403
    assert asgi(GENERATE, "generate", method="GET") == 405
    assert asgi(GENERATE, "generate", type="websocket") == 403
    key = (b"authorization", f"Bearer {SECRETS['generate']}".encode())
    assert asgi(GENERATE, "generate", headers=[key]) == 411
    assert asgi(GENERATE, "generate", headers=[key, (b"content-length", b"9" * 12)]) == 413
    length = (b"content-length", b"9")
    assert asgi(GENERATE, "generate", headers=[key, length, (b"origin", b"http://x")]) == 403
    assert asgi(GENERATE, "generate", headers=[key, key, length]) == 401
    chunked = (b"transfer-encoding", b"chunked")
    assert asgi(GENERATE, "generate", headers=[key, length, chunked]) == 411


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (RPC, {"method": "weight_digests"}, None),
        (RPC, {"method": "reload_weights"}, 403),
        (RPC, {"method": ["weight_digests"]}, 403),
        (RPC, [], 403),
        ("/weight_checker", {"action": "checksum"}, None),
        ("/weight_checker", {"action": "reset"}, 403),
        (GENERATE, {"method": "reload_weights"}, None),
    ],
)
def test_decide_body_opens_what_is_used(path: str, body: Any, status: int | None):
    found = guard.decide_body(path, json.dumps(body).encode())
    assert (found[0] if found else None) == status
    if path != GENERATE:
        assert guard.decide_body(path, b"{")[0] == 400  # type: ignore[index]
        assert guard.decide_body(path, b"[" * 100_000)[0] == 400  # type: ignore[index]


def test_asgi_guard_without_keys_serves_loopback_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(guard.KEYS_VARIABLE, raising=False)
    assert asgi(GENERATE, "nobody") == 200
    assert asgi("/invocations", "nobody") == 403
    assert asgi(GENERATE, "nobody", server=("10.0.0.1", 8000)) == 403
    assert asgi(HEALTH, "nobody", server=None) == 403


def test_keys_are_needed_beyond_loopback(tmp_path: Path):
    assert Keys.of(None, "127.0.0.1") is Keys.of(None, "localhost") is Keys.of(None, "::1") is None
    for host in ("0.0.0.0", "10.0.0.1", "::", "node7"):
        with pytest.raises(ValueError, match="without keys"):
            Keys.of(None, host)
    assert Keys.of(key_folder(tmp_path), "0.0.0.0") is not None


@pytest.mark.parametrize("text", ["short", "a b " * 20, "ü" * 40, ""])
def test_keys_refuse_a_weak_one(tmp_path: Path, text: str):
    folder = key_folder(tmp_path)
    (folder / "control").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="control"):
        Keys.of(folder, "127.0.0.1")


def test_keys_are_two_files(tmp_path: Path):
    folder = key_folder(tmp_path)
    (folder / "control").write_text(SECRETS["generate"])
    with pytest.raises(ValueError, match="are equal"):
        Keys.of(folder, "127.0.0.1")
    (folder / "control").unlink()
    with pytest.raises(ValueError, match="expected a file"):
        Keys.of(folder, "127.0.0.1")
