"""Rounds that fail: one ends its own texts, and an error that stays ends the engine. No text of it reaches clients."""

import json
import os
import threading
from types import SimpleNamespace

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from helpers.engine_in_thread import GREEDY, asked, begun
from helpers.processes import soon
from helpers.scheduling import make_sequence, scheduler
from helpers.serving import Program
from redrafter import ArgumentError
from redrafter.errors import ends_device
from redrafter.scheduler.captured_step import LaunchedStep
from redrafter.scheduler.prefill import Prefiller
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.serve.engine_process import worker as worker_module
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.engine_process.messages import EngineError
from redrafter.serve.engine_process.worker import CHANGES, MAX_FAILED_ROUNDS

SECRET = "CUDA error: {}, at 0x7f00"
LASTING = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "misaligned address",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "uncorrectable ECC error encountered",
)
PASSING = ("out of memory", "invalid argument", "operation not permitted when stream is capturing")


def failing(error: Exception, times: int = 1 << 30):
    """Something that raises an error so many times, and then does what the original does."""
    left = [times]

    def wrap(original):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] >= 0:
                raise error
            return original(*arguments, **named)

        return call

    return wrap


def accelerator_error(text: str) -> RuntimeError:
    """What torch raises of a GPU, since 2.8 of a type of its own."""
    return getattr(torch, "AcceleratorError", RuntimeError)(text)


async def answer(client, **more) -> list[int]:
    """The 8 tokens after a prompt, or the error of the text."""
    tokens: list[int] = []
    async for _, deltas in asked(client, [[5, 6, 7]], 8, **more):
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            tokens += delta.tokens
    return tokens


async def ask_until_stopped(client, most: int = 50) -> tuple[list[str], str]:
    """What requests that came one after the other were told, until the engine stopped, and why that was."""
    told = []
    for number in range(most):
        try:
            await answer(client, request_id=f"request-{number}")
        except Stopped as stopped:
            return told, str(stopped)
        except (EngineError, ArgumentError) as error:
            told.append(str(error))
    return told, "never"


@pytest.mark.parametrize("part", ["step", "read"])
async def test_an_error_of_every_round_ends_the_engine_after_some(engine, monkeypatch, caplog, part):
    served, ends = scheduler(engine), []
    where, name = (served.batch, "step") if part == "step" else (served.prefiller, "forward")
    monkeypatch.setattr(where, name, failing(RuntimeError(SECRET.format("invalid argument")))(getattr(where, name)))
    client = begun(served, ends.append)
    told, stopped = await ask_until_stopped(client)
    assert len(told) == MAX_FAILED_ROUNDS - 1
    assert all("CUDA" not in text for text in told)
    assert all(f"under the id request-{number}" in text for number, text in enumerate(told))
    reason = f"the engine failed in {MAX_FAILED_ROUNDS} rounds in a row (RuntimeError): nothing is served any more"
    assert stopped == reason
    assert soon(lambda: ends == [reason])
    assert not client.alive
    logged = [record for record in caplog.records if "a round failed" in record.message]
    assert all("CUDA error" in str(record.exc_info[1]) for record in logged), "the log has what clients are not told"
    assert "of the requests request-0" in logged[0].message


async def test_rounds_that_fail_now_and_then_end_no_engine(engine, monkeypatch):
    served = scheduler(engine)
    client = begun(served)
    step, expected = served.batch.step, await answer(client)
    for _ in range(3):
        monkeypatch.setattr(served.batch, "step", failing(RuntimeError("no"), MAX_FAILED_ROUNDS - 1)(step))
        for _ in range(MAX_FAILED_ROUNDS - 1):
            with pytest.raises(EngineError):
                await answer(client)
        assert await answer(client) == expected
    client.stop()


async def test_errors_on_purpose_end_no_engine(engine, monkeypatch):
    served = scheduler(engine)
    monkeypatch.setattr(served.batch, "step", failing(ArgumentError("no such text"), 20)(served.batch.step))
    client = begun(served)
    told, _ = await ask_until_stopped(client, 20)
    assert told == ["no such text"] * 20
    assert await answer(client)
    client.stop()


@pytest.mark.parametrize("text", LASTING)
@pytest.mark.parametrize("part", ["step", "read", "draws"])
async def test_an_engine_ends_at_once_when_cuda_cannot_continue(engine, monkeypatch, text, part):
    served = scheduler(engine)
    where, name = {
        "step": (served.batch, "step"),
        "read": (served.prefiller, "forward"),
        "draws": (LaunchedStep, "read_deltas"),
    }[part]
    error = accelerator_error(SECRET.format(text))
    monkeypatch.setattr(where, name, failing(error)(getattr(where, name)))
    client = begun(served)
    told, stopped = await ask_until_stopped(client)
    assert told == []
    assert f"({type(error).__name__}), after which CUDA computes nothing in this process" in stopped
    assert text not in stopped


@pytest.mark.parametrize("text", PASSING)
async def test_an_engine_continues_after_an_error_of_cuda_that_passes(engine, monkeypatch, text):
    served = scheduler(engine)
    error = torch.OutOfMemoryError(text) if text == "out of memory" else accelerator_error(SECRET.format(text))
    monkeypatch.setattr(served.batch, "step", failing(error, 1)(served.batch.step))
    client = begun(served)
    with pytest.raises(EngineError) as raised:
        await answer(client)
    assert text not in str(raised.value)
    assert len(await answer(client)) == 8
    client.stop()


def test_what_ends_a_device_is_found_in_the_errors_that_another_was_raised_from():
    lasting = accelerator_error(SECRET.format(LASTING[0]))
    try:
        try:
            raise lasting
        except RuntimeError as error:
            raise ValueError("the capture failed") from error
    except ValueError as error:
        assert ends_device(error)
    assert ends_device(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not ends_device(ValueError(str(lasting))), "no error of a device is of that type"
    assert not ends_device(RuntimeError("misaligned address of a tensor"))


async def test_an_engine_ends_when_a_change_has_left_cuda_unable_to_continue(engine, monkeypatch):
    error = accelerator_error(SECRET.format(LASTING[0]))
    monkeypatch.setitem(CHANGES, "update_weights", failing(error)(None))
    client = begun(scheduler(engine))
    with pytest.raises(EngineError) as raised:
        await client.change_engine("update_weights", "somewhere")
    assert LASTING[0] not in str(raised.value)
    assert soon(lambda: not client.alive), "though it had nothing to write"


TALK = {"messages": [{"role": "user", "content": "Tell me of the sea"}], "max_tokens": 24}
ROUTES = {
    "/v1/completions": {"prompt": "The sea", "max_tokens": 24},
    "/v1/chat/completions": TALK,
    "/v1/messages": TALK,
    "/v1/responses": {"input": "Tell me of the sea", "max_output_tokens": 24},
}


@pytest.mark.parametrize(("part", "stream"), [("prefill", False), ("step", True)])
@pytest.mark.parametrize("path", ROUTES)
def test_no_route_tells_the_text_of_an_error_within_the_engine(url, monkeypatch, path, part, stream):
    first_part = threading.Event()

    def ask() -> httpx.Response:
        body, headers = ROUTES[path] | {"stream": stream}, {"X-Request-Id": "asked-by-me"}
        with httpx.stream("POST", url + path, json=body, headers=headers, timeout=60) as answer:
            first_part.set()
            answer.read()
        return answer

    kind, name = (RunningBatch, "step") if part == "step" else (Prefiller, "forward")
    fail = failing(accelerator_error(SECRET.format("invalid argument")), 1)(getattr(kind, name))

    def fail_after_first_token(*arguments, **named):
        # A step follows the first token. Without waiting, the error could overtake it on a busy machine.
        assert not (stream and part == "step") or first_part.wait(60)
        return fail(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, fail_after_first_token)
        answer = ask()
    assert answer.status_code == (200 if stream and part == "step" else 500), "a first token was sent"
    assert "the engine failed while it wrote this answer" in answer.text
    assert "asked-by-me" in answer.text
    assert "CUDA" not in answer.text
    answer = ask()
    assert (answer.status_code, "failed" in answer.text) == (200, False), "one failed round ends no engine"


@pytest.mark.parametrize("path", ROUTES)
def test_no_route_tells_the_text_of_an_error_that_nobody_expected(server, url, monkeypatch, path):
    async def fail(*_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(server, "completion" if path == "/v1/completions" else "chat", fail)
    answer = httpx.post(url + path, json=ROUTES[path], headers={"X-Request-Id": "asked-by-me"}, timeout=60)
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "asked-by-me")
    assert "under the id asked-by-me" in json.dumps(answer.json()["error"])
    assert "CUDA" not in answer.text


STICKY = """
import os, sys
if "-c" in sys.orig_argv and "engine_process" in " ".join(sys.orig_argv):
    import torch
    from redrafter.scheduler.running_batch import RunningBatch
    step = RunningBatch.step
    def fail(*arguments):
        if os.path.exists({mark!r}):
            raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")
        return step(*arguments)
    RunningBatch.step = fail
"""


@pytest.mark.slow
def test_a_server_whose_gpu_cannot_continue_ends_with_code_2(tmp_path, monkeypatch):
    mark = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(STICKY.format(mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    program = Program()
    body = {"prompt": "The sea", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{program.url}/v1/completions", json=body, timeout=300) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            mark.touch()
            *_, last = lines
        assert "the engine failed (AcceleratorError), after which CUDA computes nothing" in last
        assert "device-side" not in last
        assert not program.healthy
        assert program.process.wait(timeout=60) == 2
        assert soon(lambda: "error: the engine failed" in program.log[-1])
        assert any("device-side assert" in line for line in program.log), "the log has the details"
    finally:
        program.process.kill()
        program.process.wait()


def test_a_rank_whose_rounds_fail_ends_with_code_2(engine, monkeypatch):
    served = scheduler(engine)
    served.submit(make_sequence([5, 6, 7], 8, GREEDY))
    monkeypatch.setattr(served.batch, "step", failing(RuntimeError("no"))(None))
    monkeypatch.setattr(worker_module.ServedEngine, "load", lambda request: SimpleNamespace(scheduler=served))
    monkeypatch.setattr(worker_module.signal, "signal", lambda *_: None)
    assert worker_module.follow(SimpleNamespace()) == 2
