"""The server in a process of its own, or an application in a thread, and requests that tests send to it."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from helpers.ranks import launch
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from redrafter.serve.metrics import TEXT_SECONDS
from redrafter.serve.network.server_process import http_config

_MODEL_LABEL = re.compile(r'\{model_name="[^"]*"\}$|,model_name="[^"]*"|model_name="[^"]*",')
PROMPTS = ["Once upon a time", "The old man looked at the sea and", "def add(a, b):", "She said"]


class Address:
    """Where a server answers.

    Attributes:
        url: Its address.
    """

    url: str

    @property
    def healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=300, **how)

    def post(self, path: str, body: Any = None, **how: Any) -> httpx.Response:
        """Send a body as JSON."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=300, **how)

    def parts(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The parts of a stream, which ends with [DONE]."""
        *events, last = self.post(path, body).raise_for_status().text.strip().split("\n\n")
        assert last == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def metrics(self) -> dict[str, float]:
        """Return what `/metrics` reports, by name and labels without that of the model."""
        time.sleep(TEXT_SECONDS)  # an earlier text may still be sent
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {_MODEL_LABEL.sub("", name): float(value) for name, value in pairs}

    def wait_until_idle(self) -> None:
        """Wait until no sequence of an earlier test runs or waits any more."""
        end = time.monotonic() + 300
        while any(self.metrics()[f"vllm:num_requests_{state}"] for state in ("running", "waiting")):
            assert time.monotonic() < end, "sequences of earlier tests still run"
            time.sleep(0.02)


class Program(Address):
    """`redrafter serve` in a process of its own.

    Attributes:
        process: The process.
        log: Lines of its log so far.
        first_metrics: Its metrics before the first request, if somebody has noted them.
    """

    first_metrics: dict[str, float]
    ready_word = "curl"  # in the line that says that it serves
    start_seconds = end_seconds = 300.0

    def __init__(self, *more: str, ranks: int = 1):
        words = ["redrafter", "serve", "--port", "0", *more]
        words = [sys.executable, "-m", *words] if ranks == 1 else launch(ranks, *words, module=True)
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._listening = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._listening.wait(self.start_seconds * ranks), self.log
        assert hasattr(self, "url"), self.log
        while not self.healthy:
            assert self.process.poll() is None, self.log  # it may refuse its model after it has begun to listen
            time.sleep(0.05)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.url = found.group()
            if self.ready_word in line:
                self._listening.set()
        self._listening.set()

    def end(self) -> int:
        """End the process by SIGTERM, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=self.end_seconds)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application that serves in a thread."""
    options = ServeOptions(port=0)
    listener, server = listen(options), uvicorn.Server(http_config(app, 100, options))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:  # else a test that fails keeps the process from ending
        server.should_exit = True
        thread.join(timeout=300)


def offline(pair: tuple, prompt: str, count: int, **arguments: object) -> list[int]:
    engine, tokenizer = pair
    ids = torch.tensor([tokenizer(prompt).input_ids])
    arguments.setdefault("do_sample", True)
    if arguments["do_sample"]:
        arguments.setdefault("top_k", 0)
    return engine.generate(ids, max_new_tokens=count, speculate=False, **arguments)[0, ids.shape[1] :].tolist()


def text_of(pair: tuple, ids: list[int]) -> str:
    return pair[1].decode(ids, skip_special_tokens=True)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
