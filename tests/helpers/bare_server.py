"""A server process of its own with a small application, and a load that waits for its cue."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

# Reads a line from stdin where a model would be loaded: "fail" fails.
SCRIPT = """
import asyncio, logging, sys
from types import SimpleNamespace
from redrafter.errors import CheckpointError
from redrafter.serve.network import server_process
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions
from redrafter.serve.log import start_logging

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/endless":
        await send({"type": "http.response.body", "body": b"x" * 10000, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"fine"})

def load():
    if sys.stdin.readline().strip() == "fail":
        raise CheckpointError("this model is no good")
    load, nothing = SimpleNamespace(running=1), lambda *_: None
    engine = SimpleNamespace(start=nothing, idle=IDLE, load=load)
    return SimpleNamespace(engine=engine, drain=nothing, close=nothing), app

IDLE, DRAIN, FILES = True, 1.0, {}
CHANGES
start_logging("text", "info")
options = ServeOptions(port=0, drain_timeout=DRAIN, **FILES)
with listen(options) as listening:
    logging.getLogger("redrafter").info("on http://127.0.0.1:%d", listening.getsockname()[1])
    process = server_process.ServerProcess(options, listening)
    process.serve_until_signal(load, lambda loaded: logging.getLogger("redrafter").info("ready"))
"""


class BareServer:
    """`ServerProcess` in a process of its own, around a small application; `changes` is code that is run before."""

    def __init__(self, changes: str = "", tls: ssl.SSLContext | None = None):
        words = [sys.executable, "-c", SCRIPT.replace("CHANGES", changes)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.log_reader = threading.Thread(target=self._read, daemon=True)
        self.log_reader.start()
        self.port = int(re.search(r":(\d+)", self.said("on http"))[1])  # type: ignore[index]
        self.url, self._tls = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}", tls or True
        while True:
            try:
                self.get("/")
                break
            except httpx.TransportError:
                time.sleep(0.02)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def said(self, text: str, seconds: float = 300) -> str:
        """Wait for a line of the log that holds a text, and return it."""
        end = time.monotonic() + seconds
        while not (found := [line for line in list(self.log) if text in line]):
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        return found[0]

    def cue(self, word: str = "go") -> None:
        """Let the load go on; "fail" lets it fail."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=300, verify=self._tls, **how)

    def connect(self, sent: bytes = b"", **how: Any) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        found.sendall(sent)
        return found

    def end(self, with_signal: int = signal.SIGTERM) -> int:
        """End the process by a signal, and return its exit code."""
        self.process.send_signal(with_signal)
        code = self.process.wait(timeout=300)
        self.log_reader.join(timeout=300)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def open_files(process: subprocess.Popen[str]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))
