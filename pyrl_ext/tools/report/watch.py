"""The page of active runs on a port of this machine, built again when their files change."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyrl_ext.parallel.ports import family_of, is_own, process_on
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
    try:
        server = _server(WatchedPage(runs, most), host, port)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is held by {process_on(host, port)}"
        raise OSError(
            f"--host {host} --port {port}: {reason}, expected an address of this machine and a "
            "free port. Name another with --port, or 0 for any"
        ) from error
    with server:
        name = f"[{host}]" if ":" in host else host
        print(f"http://{name}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _server(page: WatchedPage, host: str, port: int) -> ThreadingHTTPServer:
    """Raises: OSError if the address cannot be used."""

    class Server(ThreadingHTTPServer):
        address_family = family_of(host)

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a browser may leave at any time
                super().handle_error(request, client_address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self._head()
            self.wfile.write(content)

        def do_HEAD(self) -> None:
            self._head()

        def _head(self) -> bytes:
            """Write the status and the headers; the content to write after them."""
            status, kind, text = self._answer()
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if status == 503:
                self.send_header("Refresh", str(RETRY_S))
            self.end_headers()
            return content

        def _answer(self) -> tuple[int, str, str]:
            """Status, type and text."""
            name = self.headers.get("Host", "")
            if not is_own(name, host):
                wanted = f"expected localhost, an IP address or {host}"
                other = "to answer to every name, start with --host 0.0.0.0"
                return 403, "text/plain", f"Host {name}: {wanted}; {other}"
            path = self.path.partition("?")[0]
            try:
                if path == "/version":
                    return 200, "text/plain", page.version
                if path == "/":
                    return 200, "text/html", page.text()
            except (OSError, ValueError) as error:
                return 503, "text/plain", f"{error}\nasked again every {RETRY_S} s"
            return 404, "text/plain", f"{path}: not here, expected /"

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return Server((host, port), Handler)
