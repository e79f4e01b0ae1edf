"""Two processes that end together, whoever is killed, and serve what one process would."""

import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.processes import children, engine_of, soon
from helpers.serving import Program
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process import start
from redrafter.serve.engine_process.start import Channel, EngineEndedError, EngineProcess, LoadEngine

ENDLESS = {"prompt": "The sea", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@pytest.fixture
def mortal() -> Iterator[Program]:
    """A server that the test ends."""
    program = Program()
    yield program
    program.process.kill()
    program.process.wait()


def events(answer: httpx.Response) -> Iterator[dict]:
    lines = (line for line in answer.iter_lines() if line)
    return (json.loads(line.removeprefix("data: ")) for line in lines)


class Pickled:
    """A message that notes when it is pickled."""

    def __init__(self, times: list[float]):
        self.times = times

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        self.times.append(time.perf_counter())
        return str, ()


def test_a_message_leaves_while_another_thread_computes():
    """The thread that sends waited for 5 ms, which is Python's own interval, where the next step is prepared."""
    ours, theirs = Pipe()
    channel, left, waits = Channel(ours), list[float](), list[float]()
    for _ in range(15):
        began = time.perf_counter()
        channel.send(Pickled(left))
        while time.perf_counter() < began + 0.01:
            sum(range(100))
        assert theirs.recv() == ""
        waits.append(left[-1] - began)
    channel.close()
    assert sorted(waits)[5] < 0.004


@pytest.mark.variant
def test_an_engine_that_is_killed_ends_its_streams_and_the_server(mortal):
    with httpx.stream("POST", f"{mortal.url}/v1/completions", json=ENDLESS, timeout=300) as answer:
        parts = events(answer)
        assert next(parts)["choices"]
        os.kill(engine_of(mortal.process.pid), signal.SIGKILL)
        *_, last = parts
    assert "the engine's process was ended by SIGKILL" in last["error"]["message"]
    assert mortal.process.wait(timeout=300) == 2
    assert soon(lambda: "error: the engine's process was ended by SIGKILL" in mortal.log[-1])
    [logged] = [line for line in mortal.log if "POST /v1/completions" in line]
    assert "finish=error" in logged  # and not as of a client that left


@pytest.mark.slow
def test_a_server_is_not_healthy_while_its_engine_is_stopped(mortal):
    engine = engine_of(mortal.process.pid)
    os.kill(engine, signal.SIGSTOP)
    paths = ("/health", "/v1/health/live", "/v1/health/ready", "/v1/health/model")
    assert soon(lambda: {mortal.get(path).status_code for path in paths} == {503})
    os.kill(engine, signal.SIGCONT)
    assert soon(lambda: mortal.healthy)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_engine(mortal):
    engine = engine_of(mortal.process.pid)
    with httpx.stream("POST", f"{mortal.url}/v1/completions", json=ENDLESS, timeout=300) as answer:
        parts = events(answer)
        assert next(parts)["choices"]
        mortal.process.kill()
        assert soon(lambda: not os.path.exists(f"/proc/{engine}"))


@pytest.mark.variant
def test_an_engine_that_ends_while_it_loads_is_an_error_that_says_so():
    before = children(os.getpid())
    process = EngineProcess(LoadEngine(ServeOptions(), LoadOptions(), DraftOptions()))
    [pid] = set(children(os.getpid())) - set(before)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineEndedError, match="SIGKILL"):
        process.wait_until_loaded()


@pytest.mark.variant
def test_an_engine_that_still_loads_ends_with_its_server(monkeypatch):
    loads = "from redrafter.serve.engine_process import process; process.ServedEngine.load = lambda _: time.sleep(60)"
    program = start.PROGRAM.replace("from redrafter", f"import time; {loads}; from redrafter")
    monkeypatch.setattr(start, "PROGRAM", program)
    before = children(os.getpid())
    process = EngineProcess(LoadEngine(ServeOptions(), LoadOptions(), DraftOptions()))
    process.channel.close(flush_seconds=5)
    assert soon(lambda: set(children(os.getpid())) <= set(before))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_server_leave_its_engine_alone(program, number):
    os.kill(engine_of(program.process.pid), number)
    body = {"prompt": "The sea", "max_tokens": 5}
    assert program.post("/v1/completions", body).status_code == 200
