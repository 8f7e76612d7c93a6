"""Hub ids: one rank of a node downloads, all of them read the folder."""

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch.distributed as dist

from pyrl_ext.models.hf_folder import save_safetensors
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.hf_download import fetch
from pyrl_ext.trainer.policy import Policy
from tests.helpers.deadline import DEADLINE
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BARE = ("pyrl_ext.trainer.policy",)  # without the libraries of the hub
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BOTH = ("model.tokenizer=owner/name", "model.weights=owner/name")
BESIDE = {"pytorch_model.bin": b"pickled", "original/model.safetensors": b"again", "README.md": b""}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model, with its tokenizer, and the sum of its weights."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(CONFIG.parent / "tiny", folder, dirs_exist_ok=True)
    with topology.start(plan := tiny_plan("seed=7")) as topo:
        policy = Policy.build(plan, topo)
        save_safetensors(folder, policy.weights(), plan.hf)
        return folder, sum_of(policy)


def sum_of(policy):
    return sum(tensor.double().sum().item() for _, tensor in policy.weights())


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download asks for: owner/name, and refusals of others."""

    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        if "/owner/name" not in path:
            problem = {"none": "RepoNotFound", "closed": "GatedRepo"}.get(path.split("/")[-3], "")
            return self.answer(403 if problem == "GatedRepo" else 404, b"", "X-Error-Code", problem)
        if "/resolve/" in path:
            content = self.files[path.split("/resolve/")[1].partition("/")[2]]
            return self.answer(200, content, "ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        if "/tree/" in path:
            found = [
                {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for p, c in self.files.items()
            ]
        else:
            found = {"id": "owner/name", "sha": COMMIT, "siblings": []}
        return self.answer(200, json.dumps(found).encode(), "Content-Type", "application/json")

    do_HEAD = do_GET

    def answer(self, code, content, header, value):
        self.send_response(code)
        self.send_header(header, value)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format, *args):
        """Nothing on the terminal."""


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    """A hub on this machine, and an empty cache; what it is asked."""
    Hub.files = {p.name: p.read_bytes() for p in model[0].iterdir()} | BESIDE
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield Hub.asked
    server.shutdown()
    server.server_close()


def train_on(run):
    from pyrl_ext import train  # brings transformers, which brings the hub

    quick = ("parallel.dp=2", "steps=1", "batching.prompts=2", "evaluate.every=0")
    return train.main([str(CONFIG), f"run={run}", "log.progress=false", *quick, *BOTH])


def on_rank(group, per_node, run, *attempts):
    """Per attempt: (whether this rank knows the hub, folder, sum of weights), or the error; then,
    with a run folder, the exit code of a step."""
    os.environ |= {"WORLD_SIZE": str(group.size()), "LOCAL_RANK": str(group.rank() % per_node)}
    assert "huggingface_hub" not in sys.modules
    found = []
    for overrides in attempts:
        plan = tiny_plan("parallel.dp=2", "log.progress=false", *overrides)
        assert plan.unsupported == ()
        with topology.start(plan) as topo:
            if topo.is_main and not found:
                delay(2)
            store = dist.distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=1))
            try:
                there = fetch(plan, topo)
            except OSError as error:
                found.append(str(error))
                continue
            finally:  # the next groups meet through it, on a busy machine later than that
                store.set_timeout(timedelta(seconds=DEADLINE))
            knows = "huggingface_hub" in sys.modules
            total = sum_of(Policy.build(there, topo))
            assert there.fetched == {"owner/name": there.weights_path}
            found.append((knows, there.weights_path, there.tokenizer_path, total))
    return [*found, train_on(run)] if run else found


def delay(seconds):
    """Fetching takes longer than the store lets a rank wait."""
    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return real(*args, **kwargs)

    huggingface_hub.snapshot_download = slow


def test_fetch_downloads_on_one_rank_for_all(hub, model):
    none, closed = (("model.weights=owner/" + name,) for name in ("none", "closed"))
    ranks = run_ranks(on_rank, 2, 2, None, BOTH, none, closed, preload=BARE)
    (knows, weights, tokenizer, total), *refusals = ranks[0]
    assert ranks[1] == [(False, weights, tokenizer, total), *refusals] and knows
    assert tokenizer == weights and total == model[1]
    fetched = sorted(p.name for p in Path(weights).rglob("*"))
    assert fetched == sorted(p.name for p in model[0].iterdir())  # and none of BESIDE
    assert sum(each.startswith("GET") and "model.safetensors" in each for each in hub) == 1
    assert refusals == [
        "rank 0: model.weights: owner/none: the hub has no such model, or not for this token. "
        "Correct the id, or set HF_TOKEN",
        "rank 0: model.weights: owner/closed: its owner asks for consent, expected a token with "
        "it. Give it, and set HF_TOKEN",
    ]


def teacher_on_rank(group):
    """The folder of a teacher on servers."""
    os.environ |= {"WORLD_SIZE": str(group.size()), "LOCAL_RANK": str(group.rank())}
    servers = "teacher.servers=[http://127.0.0.1:1]"
    teacher = ("teacher.model=owner/name", servers, "objective.distill_coef=1")
    plan = tiny_plan("parallel.dp=2", "log.progress=false", *teacher)
    with topology.start(plan) as topo:
        return fetch(plan, topo).teacher_folders["owner/name"]


def test_fetch_leaves_out_the_weights_of_a_teacher_on_servers(hub, model):
    folder, same = run_ranks(teacher_on_rank, 2, preload=BARE)
    assert folder == same
    wanted = {p.name for p in model[0].iterdir() if p.suffix != ".safetensors"}
    assert {"config.json", "tokenizer.json"} < wanted
    assert {p.name for p in Path(folder).iterdir()} == wanted


def test_fetch_without_a_network_reads_the_cache_of_each_node(model, tmp_path, monkeypatch):
    folder = tmp_path / "models--owner--name/snapshots" / COMMIT
    shutil.copytree(model[0], folder)
    (tmp_path / "models--owner--name/refs").mkdir()
    (tmp_path / "models--owner--name/refs/main").write_text(COMMIT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    attempts = BOTH, (BOTH[0], "model.weights=owner/other")
    ranks = run_ranks(on_rank, 2, 1, tmp_path / "run", *attempts, preload=BARE)
    for found, refusal, exit_code in ranks:
        assert exit_code == 0
        assert found == (True, str(folder), str(folder), model[1])
        assert refusal.splitlines() == [
            f"rank {rank}: model.weights: owner/other: HF_HUB_OFFLINE is set and it is not whole "
            "in the hub's cache, expected to reach the hub. Download it elsewhere and name the "
            "folder"
            for rank in range(2)
        ]
    saved = json.loads((tmp_path / "run/plan.json").read_text())
    assert saved["model"]["weights"] == "owner/name" and "owner/name" in saved["fetched"]
