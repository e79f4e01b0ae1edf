"""The server as a program of its own, and what it is asked in tests."""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

PROMPTS = ["Once upon a time", "The old man looked at the sea and", "def add(a, b):", "She said"]


class Program:
    """`redrafter serve` in a process of its own."""

    def __init__(self, *more: str):
        words = [sys.executable, "-m", "redrafter", "serve", "--port", "0", *more]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._listening = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self._listening.wait(60) and hasattr(self, "url"), self.log
        while not self.healthy:
            time.sleep(0.05)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.url = found.group()
            if "curl" in line:
                self._listening.set()
        self._listening.set()

    @property
    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


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
