"""Who answers at an address, and who holds a port."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from pyrl_ext.parallel.ports import Absence, absence_at, process_on
from tests.helpers.http_engine import HttpEngine

pytestmark = pytest.mark.multiprocess


def me() -> str:
    return f"{psutil.Process().name()} (pid {os.getpid()})"


class Other(BaseHTTPRequestHandler):
    """A program that answers every path with ``status`` and a text."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"fine")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_absence_asks_the_engine_itself_and_no_proxy(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy, HttpEngine() as engine:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert absence_at(engine.address) is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (200, "/health answers 200 with a text: another program, no engine"),
        (404, "/health answers 404: another program, no engine"),
    ],
)
def test_absence_names_another_program(status: int, reason: str):
    kind = type("Other", (Other,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), kind) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_port
        found = absence_at(f"http://127.0.0.1:{port}")
        other.shutdown()
    assert found == Absence(f"{reason}; port {port} is held by {me()}", is_taken=True)


def test_absence_names_a_program_that_speaks_no_http():
    def shout() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(10)
            connection.sendall(b"220 mail ready\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=shout, daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        found = absence_at(f"http://127.0.0.1:{port}")
        thread.join()
    text = "/health has no HTTP answer: another program, no engine"
    assert found == Absence(f"{text}; port {port} is held by {me()}", is_taken=True)


def test_absence_says_why_there_is_no_connection():
    with socket.socket() as bound:  # keeps the port, and does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert absence_at(f"http://127.0.0.1:{port}") == Absence("connection refused")
    assert absence_at("http://no-such-host.invalid:80") is not None


def test_process_on_names_the_holder():
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert process_on("127.0.0.1", door.getsockname()[1]) == me()
