"""The page of active runs on a port of this machine, built again when their files change."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pyrl_ext.parallel.ports import process_on
from pyrl_ext.tools.report.evaluations import RESULTS
from pyrl_ext.tools.report.page import report_page
from pyrl_ext.tools.report.state import folders

FILES = ("metrics.jsonl", "plan.json", "plan_changes.jsonl", "error.txt", "lock", RESULTS)
RETRY_S = 2  # until a browser asks again for the page of a run without a step


class WatchedPage:
    """The page of runs as their files are when it is asked for.

    Args:
        runs: folders, in which no step need be finished yet
        most: number of recorded samples that the page shows of each run
    """

    def __init__(self, runs: Sequence[str], most: int):
        self.runs = runs
        self.most = most
        self._lock = threading.Lock()
        self._built = ("", "")  # version and text

    @property
    def version(self) -> str:
        """Changes with the files."""
        files = [Path(run) / name for run in self.runs for name in FILES]
        return "-".join(str(file.stat().st_mtime_ns) if file.exists() else "" for file in files)

    def text(self) -> str:
        """The page in HTML. Raises: OSError, ValueError as `folders`."""
        with self._lock:
            version = self.version
            if version != self._built[0]:
                text = report_page(folders(self.runs), self.most, version)
                self._built = (version, text)
            return self._built[1]


def watch(runs: Sequence[str], host: str, port: int, most: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        OSError: the address cannot be used, naming the process that holds the port
        ValueError: a run folder does not exist
    """
    for run in runs:
        if not Path(run).is_dir():
            raise ValueError(f"{run}: no such folder, expected the folder of a run")
    page = WatchedPage(runs, most)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/version":
                self._answer(200, "text/plain", page.version)
            elif self.path != "/":
                self._answer(404, "text/plain", f"{self.path}: not here, expected /")
            else:
                try:
                    self._answer(200, "text/html", page.text())
                except (OSError, ValueError) as error:
                    self._answer(503, "text/plain", f"{error}\nasked again every {RETRY_S} s")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if status == 503:
                self.send_header("Refresh", str(RETRY_S))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is held by {process_on(host, port)}"
        raise OSError(
            f"--host {host} --port {port}: {reason}, expected an address of this machine and a "
            "free port. Name another with --port, or 0 for any"
        ) from error
    with server:
        print(f"http://{host}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
