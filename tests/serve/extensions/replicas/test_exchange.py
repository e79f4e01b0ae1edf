"""Requests to an application in the same process."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from redrafter.extensions.replicas.exchange import AnswerPart, AnswerStart, HttpCall, answer_parts

CALL = HttpCall({"type": "http"}, b"the body")


def body(text: bytes) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": True}


async def test_what_an_application_sends_at_once_is_one_part():
    async def app(scope, receive, send):
        request = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send(body(request["body"]))
        await asyncio.sleep(0.01)
        await send(body(b"more"))

    parts = [part async for part in answer_parts(app, CALL)]
    assert parts == [AnswerPart(AnswerStart(200, [(b"a", b"b")]), b"the body"), AnswerPart(None, b"more")]


async def test_an_error_of_the_application_is_raised():
    async def app(scope, receive, send):
        await send(body(b"half"))
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        async for _ in answer_parts(app, CALL):
            pass


async def leave(app) -> None:
    parts = answer_parts(app, CALL)
    await anext(parts)
    await parts.aclose()


async def test_an_application_is_told_that_its_client_has_left():
    heard = []

    async def app(scope, receive, send):
        await receive()
        await send(body(b"one"))
        heard.append(await receive())

    await leave(app)
    assert heard == [{"type": "http.disconnect"}]


async def test_an_application_that_does_not_listen_is_cancelled(monkeypatch):
    monkeypatch.setattr("redrafter.extensions.replicas.exchange.LEAVING_SECONDS", 0.01)
    ended = []

    async def app(scope, receive, send):
        await send(body(b"one"))
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    await leave(app)
    await asyncio.sleep(0)
    assert ended


async def test_an_error_that_was_answered_is_no_part_of_the_answer(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send(body(b"the server failed") | {"more_body": False})
        raise RuntimeError("broken")  # as Starlette does

    call = HttpCall({"type": "http", "method": "POST", "path": "/v1/completions"}, b"")
    parts = [part async for part in answer_parts(app, call)]
    assert b"".join(part.body for part in parts) == b"the server failed"
    assert "/v1/completions failed" in caplog.text


async def test_parts_after_the_first_are_joined_for_the_time_of_a_pause():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(6):
            await asyncio.sleep(0.01)
            await send(body(b"%d" % number))
        await send({"type": "http.response.body", "body": b"end"})

    began = asyncio.get_running_loop().time()
    parts = [part.body async for part in answer_parts(app, CALL, lambda: 60.0)]
    assert parts == [b"", b"0", b"12345end"]
    assert asyncio.get_running_loop().time() - began < 30  # the end is not delayed
