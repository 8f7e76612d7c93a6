"""Serves the page to this machine and renews it as the runs grow."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.state import Folder, age, folders, holder

HOST = "127.0.0.1"
READ = ("metrics.jsonl", "plan.json", "lock", "error.txt", "checkpoints")
"""The page follows these in a run folder."""


class Server(ThreadingHTTPServer):
    """The page of some runs on a free port of the loopback address.

    Raises: OSError, ValueError when a run cannot be read.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[str]):
        self.runs, self.lock = list(runs), threading.Lock()
        self.read, self.folders = "", list[Folder]()
        self.seen, self.page = "", ""
        self.newest()
        super().__init__((HOST, 0), Handler)

    @property
    def address(self) -> str:
        """The address for a browser."""
        return f"http://{HOST}:{self.server_port}"

    def stamp(self, files: str = "") -> str:
        """Text that changes when a run folder does, or what the clock says of a run: a hang or a
        kill changes no file. ``files`` is what `files` said just now, if it was asked."""
        parts = [files or self.files()]
        for run in map(Path, self.runs):
            with suppress(OSError):  # what is gone is part of `files`
                parts.append(f"{holder(run)[1]} {age(run) // 60:.2g}")
        return " ".join(parts)

    def files(self) -> str:
        """Text that changes when a file does that the page follows."""
        parts = []
        for run in self.runs:
            for path in (Path(run) / name for name in READ):
                try:
                    found = path.stat()
                    parts.append(f"{found.st_mtime_ns}:{found.st_size}")
                except OSError:
                    parts.append("-")
        return " ".join(parts)

    def newest(self) -> str:
        """The page, rendered again if `stamp` changed. Raises: OSError, ValueError."""
        with self.lock:
            stamp = self.stamp(files := self.files())
            if files != self.read:  # most of the time goes here, so the clock alone reads nothing
                self.folders, self.read = folders(self.runs), files
            if stamp != self.seen:
                self.page, self.seen = report_page(self.folders, live=True), stamp
            return self.page

    def handle_error(self, request: Any, client_address: object) -> None:
        """Print what went wrong, but not that a browser hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers ``/`` with the page and ``/stamp`` with what changes when the page does."""

    @property
    def pages(self) -> Server:
        """The server that took the request."""
        return cast(Server, self.server)

    def do_GET(self) -> None:
        """Answer a request of this machine's browser; a page of another site gets nothing."""
        hosts = {f"{name}:{self.pages.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in hosts:
            self._answer(403, "expected a request to this machine's loopback address", "plain")
        elif self.path == "/stamp":
            self._answer(200, self.pages.stamp(), "plain")
        elif self.path == "/":
            try:
                answer = 200, self.pages.newest(), "html"
            except (OSError, ValueError) as error:  # a folder that changed while the server runs
                answer = 500, str(error), "plain"
            self._answer(*answer)
        else:
            self._answer(404, "expected / or /stamp", "plain")

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address."""


def watch(runs: Sequence[str]) -> None:
    """Serve the page until Ctrl-C. Raises: OSError, ValueError when a run cannot be read."""
    with Server(runs) as server:
        try:
            print(f"Watching on {server.address} (this machine only). Ctrl-C ends.", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended", flush=True)
