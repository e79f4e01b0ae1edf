"""`redrafter serve --ray` in a process of its own, and what it runs on."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from helpers.processes import soon
from helpers.serving import Program

WORKER = "ray::ServeReplica:redrafter:Replica"  # Ray's name for the process of a replica
REPLACED_SECONDS = 240.0  # on a machine that does much else


class RayProgram(Program):
    """Replicas on the cluster of RAY_ADDRESS. Its `metrics` have the label of the replica."""

    ready_word = "is ready at"
    start_seconds, end_seconds = 300.0, 90.0

    @property
    def replicas(self) -> set[str]:
        """Names of the replicas that tell their metrics."""
        return set(
            re.findall(r'num_requests_running\{.*replica="(\w+)"', httpx.get(f"{self.url}/metrics", timeout=300).text)
        )

    def running(self) -> float:
        """Texts that are written by all replicas."""
        return sum(value for name, value in self.metrics().items() if name.startswith("vllm:num_requests_running"))

    def await_replicas(self, count: int, other_than: set[str] | None = None) -> set[str]:
        """Wait until there are so many, and not the same ones as before a loss."""
        found: set[str] = set()

        def arrived() -> bool:
            nonlocal found
            found = self.replicas
            return len(found) == count and found != other_than

        assert soon(arrived, REPLACED_SECONDS), found
        return found


def workers() -> list[psutil.Process]:
    """The processes of all replicas on this machine."""
    return [process for process in psutil.process_iter() if _title(process).startswith(WORKER)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@dataclass
class Stream:
    """Holds what a client receives of one stream, and from which replica."""

    text: str = ""
    finish: str | None = None
    replica: str = ""
    error: str | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self, url: str, **body: object) -> "Stream":
        """Ask for a completion, and read it to its end, or until the connection breaks."""
        try:
            for choice in self._choices(url, body):
                self.text += choice["text"]
                self.finish = self.finish or choice["finish_reason"]
                self.begun.set()
        except httpx.RemoteProtocolError as error:  # the end of the chunked answer is missing
            self.error = str(error)
        self.begun.set()
        return self

    def _choices(self, url: str, body: dict[str, object]) -> Iterator[dict]:
        with self._open(url, body) as answer:
            if answer.status_code != 200:
                self.error = answer.read().decode()
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error", {}).get("message")
                    yield from event.get("choices", ())

    @contextmanager
    def _open(self, url: str, body: dict[str, object]) -> Iterator[httpx.Response]:
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
            self.replica = answer.headers["x-replica"]
            yield answer
