"""Paths and callers that a guarded server meets, and what the table says of them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from pyrl_ext.rollout.remote.auth import TABLE

SECRETS = {"generate": "g" * 32, "control": "c" * 32}
CALLERS = {"nobody": "", "stranger": "x" * 32, **SECRETS}

# what vLLM serves next to, and what a server may take for a path of the table
ODD = (
    "/",
    "//health",
    "/health/",
    "/Health",
    "/%68ealth",
    "/./health",
    "/x/../health",
    "//collective_rpc",
    "/collective_rpc/",
    "/Collective_RPC",
    "/collective%5Frpc",
    "/inference/v1/generate/",
    "/inference//v1/generate",
    "/pause/",
    "//pause",
    "/pause%2F",
    "/invocations",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v2/rerank",
    "/sleep",
    "/wake_up",
    "/server_info",
    "/update_weight_version",
    "/tokenize",
    "/docs",
    "/openapi.json",
    "/start_draft_weight_update",
    "/load",
    "/version",
    "/reset_mm_cache",
    "/inference/v1/abort_requests",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/weight_checker",
    "/scale_elastic_ep",
    "/start_profile",
)


def key_folder(folder: Path) -> Path:
    """A folder with both keys."""
    for name, text in SECRETS.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text + "\n")
    return folder


def expected(path: str, caller: str) -> bool:
    """True if the caller's call reaches the server behind the guard."""
    if path not in TABLE:
        return False
    whose = TABLE[path][1]
    return whose == "nobody" or caller == "control" or caller == whose


def raw_call(host: str, port: int, path: str, key: str) -> int:
    """The status of a call with an empty JSON object, to the path as it is written."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    method = TABLE[path][0] if path in TABLE else "POST"
    body = None if method == "GET" else json.dumps({"method": "weight_digests"})
    connection.request(method, path, body=body, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status
