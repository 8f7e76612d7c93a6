"""Who may call what: paths x callers, on a server that serves, and as ASGI around any other."""

from __future__ import annotations

import asyncio
import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import auth, protocol
from pyrl_ext.rollout.remote.auth import TABLE, Auth, Guard, Keys, server_keys
from pyrl_ext.rollout.remote.protocol import GENERATE, HEALTH
from tests.helpers.engines import GLM, checkpoint, random_model
from tests.helpers.guarded import CALLERS, ODD, SECRETS, expected, key_folder, raw_call
from tests.helpers.servers import served

pytestmark = pytest.mark.multiprocess


async def test_server_answers_every_path_and_caller_as_the_table_says(tmp_path: Path):
    keys = server_keys(key_folder(tmp_path), "10.0.0.1")
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
    assert wrong == []


def asgi(path: str, caller: str, **scope: Any) -> int:
    """The status of one call through the ASGI middleware; the application behind it answers 200."""
    return asgi_answer(path, caller, **scope)["status"]


def asgi_answer(path: str, caller: str, guard: Auth | None = None, **scope: Any) -> dict[str, Any]:
    """The head of an answer, as for `asgi`."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({"method": "weight_digests"}).encode()
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
    guard = guard or Auth(application)
    guard.app = application
    asyncio.run(guard(scope, receive, send))
    return sent[0]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth.KEYS_VARIABLE, str(key_folder(tmp_path)))


def test_asgi_auth_has_the_same_table(keys: None):
    for path in [*TABLE, *ODD]:
        for caller in CALLERS:
            status = asgi(path, caller)
            assert (status == 200) == expected(path, caller), (path, caller, status)
            assert status in (200, 401, 403), (path, caller, status)


def test_asgi_auth_refuses_spellings_methods_and_browsers(keys: None):
    assert asgi(GENERATE, "generate") == 200
    assert asgi(GENERATE, "generate", raw_path=b"/inference/v1/%67enerate") == 403
    assert asgi(GENERATE, "generate", root_path="/inference") == 403
    assert asgi(GENERATE, "generate", method="GET") == 405
    assert asgi(GENERATE, "generate", type="websocket") == 403
    key = (b"authorization", f"Bearer {SECRETS['generate']}".encode())
    assert asgi(GENERATE, "generate", headers=[key, (b"origin", b"http://x")]) == 403


CHALLENGED = "0123456789abcdef" * 4
# Host header of a call, to a server with and without an address -> status
CALLED = {
    "gpu-17:8000": (200, 200),
    "GPU-17:8000": (200, 200),
    "gpu-18:8000": (421, 200),
    "gpu-17:8001": (421, 421),
    "gpu-17": (421, 421),
    "": (421, 421),
}


@pytest.mark.parametrize("address", ["http://gpu-17:8000", None])
def test_asgi_auth_proves_that_it_knows_the_key(
    keys: None, monkeypatch: pytest.MonkeyPatch, address: str | None
):
    """Compared with an HMAC that is written out here."""
    if address is not None:
        monkeypatch.setenv(auth.ADDRESS_VARIABLE, address)
    guard = Auth(None)  # type: ignore[arg-type]
    control = SECRETS["control"].encode()
    numbers = set[str]()
    for host, statuses in CALLED.items():
        headers = [(b"host", host.encode()), (b"pyrl-challenge", CHALLENGED.encode())]
        answer = asgi_answer(HEALTH, "nobody", guard, headers=headers)
        status = statuses[address is None]
        assert answer["status"] == status, host
        proof = dict(answer["headers"]).get(b"pyrl-proof", b"").decode()
        if status != 200:
            assert proof == "", host
            continue
        number, _, given = proof.partition(" ")
        numbers.add(number)
        text = f"pyrl_ext\nproof\n{host.lower()}\n{CHALLENGED}\n{number}"
        assert given == hmac.new(control, text.encode(), "sha256").hexdigest()
        text = f"pyrl_ext\ntoken\n{host.lower()}\n{number}"
        token = hmac.new(control, text.encode(), "sha256").hexdigest()
        for value, expected_status in ((token, 200), (given, 401), (number, 401)):
            header = (b"authorization", f"Bearer {value}".encode())
            headers = [(b"host", host.encode()), header]
            answer = asgi_answer(protocol.PAUSE, "nobody", guard, headers=headers)
            assert answer["status"] == expected_status
        headers = [(b"host", b"gpu-19:8000"), (b"authorization", f"Bearer {token}".encode())]
        assert asgi_answer(protocol.PAUSE, "nobody", guard, headers=headers)["status"] >= 400
    assert len(numbers) == 1 and len(numbers.pop()) == 64


def test_asgi_auth_proves_itself_in_each_answer(keys: None):
    host = (b"host", b"gpu-17:8000")
    for path, challenge, status in (
        (GENERATE, CHALLENGED, 401),
        ("/invocations", CHALLENGED, 401),
        (HEALTH, CHALLENGED[1:], 400),
        (HEALTH, CHALLENGED.upper(), 400),
    ):
        headers = [host, (b"pyrl-challenge", challenge.encode())]
        answer = asgi_answer(path, "nobody", headers=headers)
        assert answer["status"] == status
        assert (b"pyrl-proof" in dict(answer["headers"])) == (status == 401)


def test_asgi_auth_proves_itself_where_the_application_fails(keys: None):
    """Starlette would answer outside of all middleware."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def application(*_: Any) -> None:
        raise RuntimeError("no weights came")

    headers = [(b"host", b"gpu-17:8000"), (b"pyrl-challenge", CHALLENGED.encode())]
    scope = {"type": "http", "method": "GET", "path": HEALTH, "raw_path": HEALTH.encode()}
    scope |= {"headers": headers, "server": ("127.0.0.1", 8000)}
    with pytest.raises(RuntimeError, match="no weights came"):  # for the log
        asyncio.run(Auth(application)(scope, None, send))
    head, body = sent
    assert head["status"] == 500 and b"pyrl-proof" in dict(head["headers"])
    assert json.loads(body["body"])["error"]["message"] == "RuntimeError: no weights came"


def test_asgi_auth_serves_no_other_name_to_who_has_no_key(
    keys: None, monkeypatch: pytest.MonkeyPatch
):
    """If the guard knows the server's address."""
    monkeypatch.setenv(auth.ADDRESS_VARIABLE, "http://gpu-17:8000")
    for host, status in (("gpu-17:80", 200), ("10.0.0.1", 200), ("evil.example:8000", 403)):
        assert asgi(HEALTH, "nobody", headers=[(b"host", host.encode())]) == status
        key = (b"authorization", f"Bearer {SECRETS['generate']}".encode())
        assert asgi(protocol.METRICS, "nobody", headers=[(b"host", host.encode()), key]) == 200


def test_asgi_auth_without_keys_serves_loopback_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(auth.KEYS_VARIABLE, raising=False)
    assert asgi(GENERATE, "nobody") == 200
    assert asgi("/invocations", "nobody") == 403
    assert asgi(GENERATE, "nobody", server=("10.0.0.1", 8000)) == 403
    assert asgi(HEALTH, "nobody", server=None) == 403


HOSTS = {
    **dict.fromkeys(("localhost:8000", "LOCALHOST", "127.0.0.1", "127.1.2.3:80", "[::1]:80"), True),
    **dict.fromkeys(("evil.example:8000", "127.0.0.1.evil.example", ""), False),
    **dict.fromkeys(("[::1", "localhost.evil.example"), False),
}


@pytest.mark.parametrize("path", [HEALTH, protocol.METRICS, GENERATE])
def test_without_keys_no_other_name_of_a_host_is_served(path: str, monkeypatch: pytest.MonkeyPatch):
    """A name whose owner has it point to this machine, asked for by a page of that name."""
    monkeypatch.delenv(auth.KEYS_VARIABLE, raising=False)
    for host, serves in HOSTS.items():
        status = asgi(path, "nobody", headers=[(b"Host", host.encode())])
        assert status == (200 if serves else 403), host
    keys = Keys("g" * 32, "c" * 32)
    headers = {"host": "gpu-17:8000", "authorization": f"Bearer {keys.control}"}
    assert Guard(keys).refusal(TABLE[path][0], path, headers, 8000) is None


async def test_a_server_without_keys_refuses_a_foreign_host():
    async with served(HFEngine(GLM)) as client:
        for host, status in (("localhost", 200), ("evil.example", 403)):
            headers = {"Host": host}
            async with client.http.get(client.url + HEALTH, headers=headers) as reply:
                assert reply.status == status


def test_keys_are_needed_beyond_loopback(tmp_path: Path):
    for host in ("127.0.0.1", "localhost", "::1"):
        assert server_keys(None, host) == Keys()
    for host in ("0.0.0.0", "10.0.0.1", "::", "node7"):
        with pytest.raises(ValueError, match="without keys"):
            server_keys(None, host)
    assert server_keys(key_folder(tmp_path), "0.0.0.0") != Keys()


@pytest.mark.parametrize("text", ["short", "a b " * 20, "ü" * 40, ""])
def test_keys_refuse_a_weak_one(tmp_path: Path, text: str):
    folder = key_folder(tmp_path)
    (folder / "control").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="control"):
        Keys.read(folder)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_keys_refuse_files_of_others(tmp_path: Path, mode: int):
    folder = key_folder(tmp_path)
    assert Keys.read(folder) != Keys()
    (folder / "control").chmod(mode)
    with pytest.raises(ValueError, match=f"control has mode 0{mode:o}, .* chmod 600"):
        Keys.read(folder)


def test_keys_are_two_files(tmp_path: Path):
    folder = key_folder(tmp_path)
    (folder / "control").write_text(SECRETS["generate"])
    with pytest.raises(ValueError, match="are equal"):
        Keys.read(folder)
    (folder / "control").unlink()
    with pytest.raises(ValueError, match="expected a file"):
        Keys.read(folder)
