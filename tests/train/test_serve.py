"""The command that starts and watches the engines of a host."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pyrl_ext.parallel.open_files import none_free
from pyrl_ext.rollout.remote.commands import Command, commands_of
from pyrl_ext.rollout.remote.tls import trusting
from pyrl_ext.train import serve
from tests.helpers.certificates import Authority
from tests.helpers.deadline import until
from tests.helpers.guarded import key_folder
from tests.helpers.servers import free_port
from tests.helpers.tiny import CONFIG, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.multiprocess]

LAUNCH = (
    "rollout.launch.hosts=[localhost, elsewhere]",
    "rollout.launch.gpus=2",
    "rollout.launch.port=8100",
)
SERVE = [sys.executable, "-m", "pyrl_ext.train.serve", str(CONFIG)]


def test_serve_starts_an_engine_again_and_ends_all_of_them(tmp_path: Path):
    address = f"http://127.0.0.1:{free_port()}"
    log = tmp_path / f"engine-{address.rpartition(':')[2]}.log"
    with subprocess.Popen(
        [*SERVE, f"rollout.servers=[{address}]", f"run={tmp_path}"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")

        def said(text: str) -> None:
            assert any(text in line for line in lines), log.read_text()

        try:
            said(f"{address} is started; log in {log}")
            said(f"{address} answers")
            assert log.read_text() == address + "\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            first = int(children.read_text())
            assert os.getpgid(first) == first != os.getpgid(process.pid)
            os.kill(first, signal.SIGKILL)
            said("ended with status -9; it is started again, and joins at the next publish")
            said(f"{address} answers")
            second = os.pidfd_open(int(children.read_text()))
            process.terminate()
            assert process.wait() == 128 + signal.SIGTERM
            assert select.select([second], [], [], 0)[0]  # it has ended
            os.close(second)
        finally:
            process.kill()


STARVED = """
import os, resource, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
while not os.path.exists(sys.argv[2]):
    server.handle_request()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = []
while True:
    try:
        held.append(server.socket.accept())
    except OSError:
        break
while os.path.exists(sys.argv[2]):
    time.sleep(0.01)
held.clear()
server.serve_forever()
"""


def test_look_leaves_an_engine_whose_files_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(serve, "PATIENCE", 0.2)
    monkeypatch.setattr(serve, "SILENT", 2)
    port = free_port()
    full = tmp_path / "full"
    command = [sys.executable, "-c", STARVED, str(port), str(full)]
    address = f"http://127.0.0.1:{port}"
    engine = serve.Watched(Command(address, tuple(command), {}), tmp_path / "log")
    first = engine.process.pid
    strangers = list[socket.socket]()
    try:
        until(lambda: engine.look() or engine.answered)
        full.touch()
        with socket.create_connection(("127.0.0.1", port)) as last:  # ends handle_request
            last.send(b"\n")
        until(lambda: _connected(strangers, port) and none_free(first))
        for _ in range(5):
            engine.look()
        assert engine.process.pid == first and engine.starved
        said = capsys.readouterr().out
        assert said.count("cannot answer: 64 files open") == 1
        assert re.search(r"\d+ of them connections of 127.0.0.1, expected fewer than .* 64", said)
        full.unlink()
        until(lambda: engine.look() or not engine.starved)
        assert engine.process.pid == first and engine.answered
    finally:
        for each in strangers:
            each.close()
        engine.end(signal.SIGKILL)
        engine.close()


SECURE = """
import ssl, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[2], sys.argv[3])
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def test_look_leaves_an_engine_whose_certificate_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As when it expires: it may be in the middle of a step."""
    monkeypatch.setattr(serve, "SILENT", 2)
    own, other = (Authority(tmp_path / name) for name in ("own", "other"))
    pair = own.sign("engine", "IP:127.0.0.1")
    port = free_port()
    address = f"https://127.0.0.1:{port}"
    command = (sys.executable, "-c", SECURE, str(port), pair.cert, pair.key)
    engine = serve.Watched(Command(address, command, {}, trusting(own.cert)), tmp_path / "log")
    first = engine.process.pid
    try:
        until(lambda: engine.look() or engine.answered)
        engine.command = replace(engine.command, tls=trusting(other.cert))
        for _ in range(5):
            engine.look()
        assert engine.process.pid == first and engine.distrusted
        said = capsys.readouterr().out
        assert said.count("is not trusted: ") == 1 and "rollout.tls.ca signed" in said
        engine.command = replace(engine.command, tls=trusting(own.cert))
        engine.look()
        assert not engine.distrusted
    finally:
        engine.end(signal.SIGKILL)
        engine.close()


def _connected(strangers: list[socket.socket], port: int) -> bool:
    """One more, up to 100."""
    if len(strangers) < 100:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))
        strangers.append(stranger)
    return True


def test_serve_prints_the_command_of_each_engine(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"rollout\.keys: .*configs/keys/generate"):
        commands_of(tiny_plan(*LAUNCH, "rollout.keys=keys"), (), "elsewhere")
    assert serve.main([str(CONFIG), "rollout.servers=[http://localhost:8100]", "--print"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"env {sys.executable} -m pyrl_ext.rollout.remote.embedded {CONFIG} ")
    assert line.endswith("--host localhost --port 8100")


def test_commands_are_those_of_the_host(tmp_path: Path):
    keys = f"rollout.keys={key_folder(tmp_path)}"
    plan = tiny_plan(*LAUNCH, keys)
    found = {h: [c.address for c in commands_of(plan, (), h)] for h in (None, "elsewhere")}
    assert found[None] == ["http://localhost:8100", "http://localhost:8101"]
    assert found["elsewhere"] == ["http://elsewhere:8100", "http://elsewhere:8101"]
    with pytest.raises(ValueError, match=r"no engine on mars, expected one of localhost, elsewh"):
        commands_of(plan, (), "mars")


def test_serve_needs_remote_engines(capsys: pytest.CaptureFixture[str]):
    assert serve.main([str(CONFIG), "--host", "localhost"]) == 2
    assert "Set rollout.servers=[http://localhost:8000]" in capsys.readouterr().err


def test_serve_names_the_process_that_holds_a_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        servers = f"rollout.servers=[http://127.0.0.1:{port}]"
        assert serve.main([str(CONFIG), servers, f"run={tmp_path}"]) == 1
    me = f"{psutil.Process().name()} (pid {os.getpid()})"
    assert f"serve: port {port} is held by {me}, expected" in capsys.readouterr().err
    assert not [*tmp_path.glob("engine-*.log")]


def test_serve_says_where_it_cannot_write_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.write_text("")
    servers = f"rollout.servers=[http://127.0.0.1:{free_port()}]"
    assert serve.main([str(CONFIG), servers, f"run={file}"]) == 1
    assert f"expected run {file} to be a folder for logs" in capsys.readouterr().err


def test_command_of_vllm_has_keys_in_files_and_the_guard(tmp_path: Path):
    keys = f"rollout.keys={key_folder(tmp_path)}"
    plan = tiny_plan("rollout.servers=[http://127.0.0.1:8100]", keys, "rollout.engine=vllm")
    (command,) = commands_of(plan, (), None)
    words = shlex.split(str(command))
    assert words[0] == "env" and f"PYRL_SERVER_KEYS={tmp_path}" in words
    assert "PYRL_SERVER_ADDRESS=http://127.0.0.1:8100" in words
    given = dict(zip(command.arguments, command.arguments[1:]))
    assert given["--middleware"] == "pyrl_ext.rollout.remote.auth.Auth"
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "8100")
    assert int(given["--max-model-len"]) > 256  # a canary of two blocks
    for asked, expected in (("rollout.max_num_seqs=null", 1024), ("rollout.max_num_seqs=7", 7)):
        one = tiny_plan("rollout.servers=[http://127.0.0.1:8100]", "rollout.engine=vllm", asked)
        (command,) = commands_of(one, (), None)
        given = dict(zip(command.arguments, command.arguments[1:]))
        assert int(given["--max-num-seqs"]) == one.max_num_seqs == expected
    assert not re.search("[gc]{32}", str(command))


def test_commands_have_tls(tmp_path: Path):
    authority = Authority(tmp_path / "ca")
    pair = authority.sign("engine", "IP:127.0.0.1")
    tls = authority.options(pair)
    address = "https://127.0.0.1:8100"
    for engine in ("vllm", "hf"):
        plan = tiny_plan(f"rollout.servers=[{address}]", *tls, f"rollout.engine={engine}")
        (command,) = commands_of(plan, (), None)
        assert command.address == address and command.tls is not None
        given = dict(zip(command.arguments, command.arguments[1:]))
        asked = [given.get(f"--ssl-{name}") for name in ("certfile", "keyfile")]
        assert asked == ([pair.cert, pair.key] if engine == "vllm" else [None, None])
    launched = tiny_plan("rollout.launch.hosts=[127.0.0.1]", "rollout.launch.gpus=1", *tls)
    assert launched.addresses == ("https://127.0.0.1:8000",)
    Path(pair.key).chmod(0o644)
    with pytest.raises(ValueError, match=r"rollout\.tls\.key: .* has mode 0644"):
        commands_of(plan, (), None)


def failing_engine(folder: Path) -> serve.Watched:
    """An engine whose process ends with status 1 as soon as it starts."""
    command = Command(f"http://127.0.0.1:{free_port()}", ("false",), {})
    return serve.Watched(command, folder / "log")


def test_serve_gives_up_on_an_engine_that_never_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    engine = failing_engine(tmp_path)
    for _ in range(serve.TRIES - 1):
        engine.process.wait()
        engine.look()
    engine.process.wait()
    with pytest.raises(RuntimeError, match="ended with status 1 before it answered, 3 times"):
        engine.look()
    assert capsys.readouterr().out.count("it is started again") == serve.TRIES - 1


def test_serve_starts_no_engine_again_whose_port_was_taken(tmp_path: Path):
    engine = failing_engine(tmp_path)
    engine.process.wait()
    port = int(engine.command.address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(RuntimeError, match=rf"port {port} is held by .* \(pid {os.getpid()}\)"),
    ):
        engine.look()
