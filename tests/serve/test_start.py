"""How a server starts and ends: 503 until the model is loaded, and an end whatever its clients do."""

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.bare_server import BareServer, open_files
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import END_SECONDS
from redrafter.serve.network.server_process import FORCED_END_SECONDS, ServerProcess

Start = Callable[..., BareServer]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as made:
        yield lambda *changes: made.enter_context(closing(BareServer(*changes)))


def test_it_answers_503_until_the_model_is_loaded_and_ends_though_a_client_never_reads(start):
    program = start("IDLE = False; server_process.LOADING_LOG_SECONDS = 0.2")  # texts that never end
    for path in ("/health", "/v1/health/ready", "/v1/models", "/", "/docs"):
        answer = program.get(path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        if path in ("/", "/docs"):  # which ask again by themselves
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        else:
            assert answer.json()["error"]["code"] == "loading"
    assert program.get("/v1/health/live").status_code == 200
    assert httpx.head(f"{program.url}/health").status_code == 503
    assert program.get("/health").json()["error"]["message"] == "the model is still loading"
    program.said("still loading after")
    program.cue()
    program.said("ready")
    assert program.get("/health").text == "fine"
    never_read = program.connect(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
    began = time.monotonic()
    assert program.end() == 0
    assert time.monotonic() - began >= 1
    never_read.close()
    assert "stopping: 1 texts are still written, for 1 s at most" in "".join(program.log)
    assert "dropped 1 connections" in program.log[-1]


@pytest.mark.variant
def test_a_server_runs_where_uvloop_is_not_installed(start):
    program = start('import importlib; sys.modules["uvloop"] = None; importlib.reload(server_process)')
    program.cue()
    program.said("ready")
    assert program.get("/health").text == "fine"
    assert program.end() == 0


def test_the_engine_is_started_before_the_server_imports_its_own_libraries():
    code = (
        "import sys; from redrafter.serve import command; "
        "command.EngineProcess = lambda _: sys.exit(str([x for x in ('uvicorn', 'torch') if x in sys.modules])); "
        "command.main(['--port', '0'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "[]\n"


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once_whatever_hangs(start):
    hangs = "threading.Thread(target=threading.Event().wait).start()"
    program = start(f"import threading; {hangs}; server_process.FORCED_END_SECONDS = 0.5; IDLE = False; DRAIN = 100.0")
    program.cue()
    program.said("ready")
    program.process.terminate()
    program.said("stopping")
    assert program.end() == 0
    assert "ended by force" in program.log[-1]


def test_an_engine_that_hangs_is_killed_before_the_server_ends_by_force():
    assert FORCED_END_SECONDS >= 2 * END_SECONDS


@pytest.mark.slow
def test_it_ends_while_it_loads_and_when_a_load_fails(start):
    assert start().end() == 0
    program = start()
    program.cue("fail")
    assert program.process.wait(timeout=300) != 0
    program.log_reader.join(timeout=300)
    assert "CheckpointError: this model is no good" in program.log[-1]


@pytest.mark.slow
def test_a_shortage_of_files_closes_connections_and_passes(start):
    program = start(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); "
        "server_process.room_for_connections = lambda _: 9999"
    )
    program.cue()
    program.said("ready")
    held = [program.connect() for _ in range(100)]  # the system takes them all
    held[-1].settimeout(60)
    assert held[-1].recv(1) == b""  # there is no file for it
    assert open_files(program.process) > 50
    for each in held:
        each.close()
    assert program.get("/health").status_code == 200
    code = program.end()
    assert code == 0
    assert len(program.log) < 10


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate for this machine that it has signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *files, *names]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.slow
def test_https_and_clients_that_prove_who_they_are(start, certificate):
    cert, key = map(str, certificate)
    with_own = ssl.create_default_context(cafile=cert)
    with_own.load_cert_chain(cert, key)
    files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": cert}
    program = start(f"FILES = {files!r}", with_own)
    program.cue()
    program.said("ready")
    assert program.get("/").text == "fine"
    without_own = ssl.create_default_context(cafile=cert)
    for client in (without_own, True):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{program.url}/", verify=client, timeout=300)
    with pytest.raises(httpx.TransportError):
        httpx.get(program.url.replace("https", "http"), timeout=300)
    stalled = with_own.wrap_socket(program.connect(), server_hostname="127.0.0.1")
    stalled.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
    assert program.end() == 0
    stalled.close()


def test_a_certificate_that_cannot_be_used_is_named(tmp_path, certificate):
    (tmp_path / "bad.pem").write_text("no certificate")
    for cert, key in ((tmp_path / "none.pem", None), (tmp_path / "bad.pem", None), (certificate[0], tmp_path / "none")):
        options = ServeOptions(ssl_certfile=str(cert), ssl_keyfile=None if key is None else str(key))
        says = r"--ssl-certfile, --ssl-keyfile: .* cannot"
        with socket.socket() as listening, pytest.raises(ArgumentError, match=says):
            ServerProcess(options, listening)
    with pytest.raises(ArgumentError, match="need --ssl-certfile"):
        ServeOptions(ssl_keyfile="key.pem")
