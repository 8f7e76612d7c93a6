"""A server that answers chat completions in OpenAI's shape."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/chat/completions"
        assert isinstance(self.server, ChatServer)
        self.server.asked.append((self.headers["authorization"], asked["model"]))
        message = {"role": "assistant", "content": asked["messages"][-1]["content"].upper()}
        answer: dict[str, Any] = {
            "id": "chat-1",
            "object": "chat.completion",
            "created": 0,
            "model": asked["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class ChatServer(ThreadingHTTPServer):
    """Answers with the last message in capital letters.

    Attributes:
        asked: header with the key, and model, of each request
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """A server that runs."""
    with ChatServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
