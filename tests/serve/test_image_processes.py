"""Images that take long to decode are given up, and neither other clients nor a server that stops wait for them."""

import asyncio
import base64
import gc
import io
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("fastapi")

import httpx
import psutil
import torch
from PIL import Image

from helpers.chats_with_images import data_url, image_part, llava_processor, llava_with_processor, picture, text_part
from helpers.processes import children, command_of, soon
from helpers.serving import Program
from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve import images
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.images import ChatImageReader
from redrafter.serve.network import guards
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.routes.app import create_app

NAMES = ("pixel_values",)
DECODER = b"redrafter.serve.image_decoder"  # among the arguments of the server that forks decoders


def of_many_scans(side: int = 1024, count: int = 20_000) -> str:
    """Return a progressive JPEG whose last scan, which changes nothing, is written so many times: 0.7 MB, 8 s."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (9, 90, 200)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[[found.start() for found in re.finditer(b"\xff\xda", data)][-1] : -2]
    whole = data[:-2] + last * count + data[-2:]
    return f"data:image/jpeg;base64,{base64.b64encode(whole).decode()}"


@pytest.fixture
def reader() -> Iterator[ChatImageReader]:
    gc.collect()  # ends the processes of readers of earlier tests
    assert soon(lambda: not decoders(), seconds=60)
    reader = ChatImageReader(llava_processor(), NAMES, ServeOptions(max_image_pixels=1 << 22))
    yield reader
    reader.close()


def place(reader: ChatImageReader, url: str) -> Callable[[SandboxedProcess], Any]:
    return lambda process: reader.place("<image>", [url], process)


def test_an_image_of_many_scans_is_given_up_and_the_next_one_is_read(reader):
    with pytest.raises(ApiError, match="takes too long or too much memory") as caught:
        reader.place("<image>", [of_many_scans()])
    assert caught.value.status == 400
    assert caught.value.code == "image_too_complex"
    assert reader.place("<image>", [data_url(picture(1))])[1]["pixel_values"].shape == (1, 3, 28, 28)


def test_the_kernel_knows_the_limit_of_memory(reader):
    process = reader.new_process()
    [child] = decoders()
    bound = (64 << 20) + 32 * reader.options.max_image_pixels

    def limit() -> int:
        return psutil.Process(child).rlimit(psutil.RLIMIT_AS)[0]  # -1 while there is none

    assert soon(lambda: bound < limit() < bound + (1 << 30))
    process.end()
    assert soon(lambda: not os.path.exists(f"/proc/{child}"))


def decoders() -> list[int]:
    """Return the processes that decode images for this one, which may have other children: servers under test."""
    ours = [pid for pid in children(os.getpid()) if DECODER in command_of(pid)]
    return [child for server in ours for child in children(server)]


class Held:
    """Stands for work that takes as long as it is let."""

    def __init__(self) -> None:
        self.go_on, self.running, self.most, self.lock = threading.Event(), 0, 0, threading.Lock()

    def __call__(self, process: SandboxedProcess) -> str:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.go_on.wait(300)
        with self.lock:
            self.running -= 1
        return "held"


async def test_many_images_of_one_client_leave_a_turn_to_others(reader):
    held = Held()
    many = [asyncio.ensure_future(reader.run_encoding(held, "many")) for _ in range(20)]
    while held.running < images.MAX_AT_ONCE_PER_CLIENT:
        await asyncio.sleep(0.01)
    try:
        for seed in range(3):
            _, inputs = await asyncio.wait_for(reader.run_encoding(place(reader, data_url(picture(seed))), "few"), 300)
            assert len(inputs["pixel_values"]) == 1
        assert not any(task.done() for task in many)
    finally:
        held.go_on.set()
    assert await asyncio.gather(*many) == ["held"] * 20
    assert held.most == images.MAX_AT_ONCE_PER_CLIENT


async def test_an_image_that_nobody_waits_for_any_more_is_given_up(reader):
    begun, ended = [], []

    def work(process: SandboxedProcess) -> None:
        begun.append(process)
        try:
            place(reader, of_many_scans())(process)
        except BaseException as error:
            ended.append(error)
            raise

    asked = [asyncio.ensure_future(reader.run_encoding(work, "leaves")) for _ in range(images.MAX_AT_ONCE_PER_CLIENT)]
    while len(begun) < len(asked):
        await asyncio.sleep(0.01)
    started = decoders()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert all(task.cancelled() for task in asked)
    assert soon(lambda: not any(os.path.exists(f"/proc/{child}") for child in started))
    assert await reader.run_encoding(lambda process: "the next", "leaves") == "the next"
    assert len(ended) == images.MAX_AT_ONCE_PER_CLIENT


async def test_a_reader_that_is_closed_keeps_nobody_waiting(reader):
    asked = [asyncio.ensure_future(reader.run_encoding(place(reader, of_many_scans()), "one")) for _ in range(4)]
    while len(decoders()) < images.MAX_AT_ONCE_PER_CLIENT:
        await asyncio.sleep(0.01)
    reader.close()
    assert {type(error) for error in await asyncio.gather(*asked, return_exceptions=True)} == {Stopped}


@pytest.mark.variant
def test_a_server_that_is_told_to_stop_waits_for_no_image(tmp_path):
    model, processor = llava_with_processor()
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    program = Program(str(tmp_path), "--prompt-lookup", "--device", "cpu", "--drain-timeout", "600")
    content = [image_part(of_many_scans(4096, 20_000)), text_part("What is it?")]
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": content}]}
        answers.append(program.post("/v1/chat/completions", body))

    asking = threading.Thread(target=ask)
    before = children(program.process.pid)  # the engine's
    asking.start()
    assert soon(lambda: any(children(pid) for pid in children(program.process.pid) if pid not in before))
    assert program.end() == 0
    asking.join()
    assert answers[0].status_code == 503, answers[0].text
    assert not any("by force" in line for line in program.log)


async def test_a_body_that_waits_for_its_images_counts_among_those_that_are_held(monkeypatch):
    monkeypatch.setattr(guards, "SMALL_BODY_BYTES", 1000)
    monkeypatch.setattr(guards, "MAX_LARGE_BODIES_BYTES", 5000)
    decode = asyncio.Event()

    async def chat(request: Any, facts: Any) -> dict[str, Any]:
        await decode.wait()
        return {}

    app = create_app(SimpleNamespace(engine=None, chat=chat), max_body_bytes=ServeOptions.max_body_size)
    body = {"messages": [{"role": "user", "content": [image_part("data:image/png;base64," + "A" * 2000)]}]}

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        send = lambda: client.post("/v1/chat/completions", json=body)  # noqa: E731
        waiting = [asyncio.ensure_future(send()) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert (await send()).status_code == 503
        decode.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (await send()).status_code == 200


async def test_images_that_the_engine_has_not_read_make_more_of_their_client_wait_alone(reader, monkeypatch):
    inputs = {"pixel_values": torch.zeros(1000)}
    monkeypatch.setattr(images, "MAX_HELD_BYTES", 2 * inputs["pixel_values"].nbytes)
    read, goes_on = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    async def write(number: int) -> AsyncGenerator[int, None]:
        await read[number].wait()
        yield 1
        await goes_on.wait()
        yield 2

    async def listen(number: int) -> list[int]:
        return [delta async for delta in reader.count(write(number), inputs, "many")]

    listening = [asyncio.ensure_future(listen(number)) for number in range(2)]
    await asyncio.sleep(0)
    waits = asyncio.ensure_future(reader.run_encoding(lambda process: "its next", "many"))
    assert await asyncio.wait_for(reader.run_encoding(lambda process: "another's", "few"), 300) == "another's"
    await asyncio.sleep(3 * images.POLL_SECONDS)
    assert not waits.done()
    read[0].set()  # the engine has read one of them
    assert await asyncio.wait_for(waits, 300) == "its next"  # while that text is still written
    goes_on.set()
    assert await listening[0] == [1, 2]
    listening[1].cancel()
    await asyncio.gather(*listening, return_exceptions=True)
