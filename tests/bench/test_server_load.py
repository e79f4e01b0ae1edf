"""The load generator on servers that a test makes up: who is asked what and when, and what goes wrong."""

import asyncio

import pytest

from helpers.stub_server import DROP, END, StubServer, chunk, completion, event, reply, stream, usage
from redrafter import ArgumentError
from redrafter.bench import http_client
from redrafter.bench.server_load import Load, LoadError, LoadRun, ServerUnderTest, find_server, run_load, summarize

LOAD = Load(["zero", "one", "two"], max_new_tokens=3, temperature=0.5, seed=100)


def run(url: str, concurrency: int = 1, requests: int = 4, load: Load = LOAD) -> LoadRun:
    async def find_and_run() -> LoadRun:
        return await run_load(await find_server(url, None, None), load, concurrency, requests)

    return asyncio.run(find_and_run())


def test_requests_ask_for_what_was_typed():
    with StubServer(lambda body: completion(["a", "b", "c"])) as server:
        run(server.url, concurrency=1, requests=5)
    warm_up, *bodies = server.bodies
    salts = {body.pop("cache_salt") for body in server.bodies}
    assert len(salts) == 1 + 5  # nothing of the warm-up, or of the same prompt before, is used again
    assert warm_up == bodies[0]
    assert [body["prompt"] for body in bodies] == ["zero", "one", "two", "zero", "one"]
    assert [body["seed"] for body in bodies] == [100, 101, 102, 103, 104]
    asked = {"model": "stub", "max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "stream": True}
    for body in bodies:
        assert body.items() >= (asked | {"stream_options": {"include_usage": True}}).items()


def test_so_many_requests_are_in_flight_on_connections_that_are_kept():
    with StubServer(lambda body: completion(["a"], 0.02)) as server:
        answered = run(server.url, concurrency=3, requests=9).answered
    assert server.most_at_once == 3
    assert len(server.bodies) == 3 + 9
    assert server.connections == 1 + 3  # /v1/models with /version, and the slots
    assert sorted(completion.index for completion in answered) == list(range(9))


def test_a_slot_takes_the_next_request_when_its_own_has_ended():
    def answer(body):
        return completion([body["prompt"]], 0.6 if body["seed"] == 100 else 0.01)

    with StubServer(answer) as server:
        ended = [completion.index for completion in run(server.url, concurrency=2, requests=6).completions]
    assert ended == [1, 2, 3, 4, 5, 0]


def test_times_are_those_of_the_stream():
    parts = stream(0.2, chunk("a"), 0.1, chunk("b"), 0.1, chunk(" c"), usage(7, 4), END)
    with StubServer(lambda body: parts) as server:
        load = run(server.url, requests=1)
    [one] = load.completions
    summary = summarize(load, 4)
    assert (one.text, one.prompt_tokens, one.completion_tokens) == ("ab c", 7, 4)
    assert summary["first_token_ms"] is not None
    assert summary["chunk_gap_ms"] is not None
    assert summary["ms_per_token"] is not None
    assert 195 < summary["first_token_ms"]["p50"] < 600
    assert 90 < summary["chunk_gap_ms"]["p50"] < 300
    assert 2 / 3 * 95 < summary["ms_per_token"] < 2 / 3 * 300
    assert 0 < summary["client_cpu_share"] < 0.9


def test_chunks_without_text_are_no_first_token():
    parts = stream(chunk(""), 0.1, chunk("a"), 0.1, chunk(""), chunk("b"), usage(1, 4), END)
    with StubServer(lambda body: parts) as server:
        [one] = run(server.url, requests=1).completions
    assert one.text == "ab"
    assert (len(one.chunk_times), len(one.text_times)) == (4, 2)
    assert one.text_times[0] - one.sent > 0.09


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (reply(b'{"error": {"message": "out of memory"}}', 500), "HTTP 500: out of memory"),
        (stream(chunk("a"), DROP), "the server closed the connection before its answer had ended"),
        (stream(chunk("a"), usage(1, 1)), "the stream ended without [DONE]"),
        (stream(b"data: {oops\n\n", END), "an event of the stream is no chunk of a completion: {oops"),
        (stream(b"data: 7\n\n", END), "an event of the stream is no chunk of a completion: 7"),
        (stream(event({"choices": [{"text": 7}]}), usage(1, 1), END), "an event of the stream is no chunk of"),
        (stream(event({"choices": [], "usage": {}}), END), "the stream has no token usage"),
        (stream(chunk("a"), END), "the stream has no token usage"),
        (stream(chunk("a"), event({"error": {"message": "too slow"}}), END), "in the stream: too slow"),
        (stream(chunk("a"), event({"error": "too slow"}), END), "in the stream: too slow"),
    ],
)
def test_a_request_that_fails_is_counted_and_the_load_goes_on(broken, message):
    def answer(body):
        return broken if body["prompt"] == "one" else completion(["a"])

    with StubServer(answer) as server:
        load = run(server.url, requests=4)
    assert [bool(completion.error) for completion in load.completions] == [False, True, False, False]
    assert load.completions[1].error.startswith(message)
    assert len(load.answered) == 3


def test_a_request_that_takes_too_long_fails(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_REQUEST_SECONDS", 0.5)
    with StubServer(lambda body: completion(["a"], 5.0 if body["prompt"] == "one" else 0.0)) as server:
        load = run(server.url, requests=3)
    assert [completion.error for completion in load.completions] == [None, "not answered within 0.5 s", None]


def test_a_server_that_answers_nothing_ends_the_load_before_it_is_timed():
    with StubServer(lambda body: reply(b"busy", 503)) as server, pytest.raises(LoadError, match="HTTP 503: busy"):
        run(server.url, concurrency=2, requests=50)
    assert len(server.bodies) == 2


@pytest.mark.parametrize(("model", "expected"), [(None, "stub"), ("mine", "mine")])
def test_a_server_says_what_it_serves(model, expected):
    with StubServer(lambda body: [], version=reply(b'{"version": "1.2"}')) as server:
        found = asyncio.run(find_server(server.url, model, "secret"))
    assert found == ServerUnderTest(server.url, expected, "nobody", "1.2", "secret")
    assert "secret" not in repr(found)
    assert all("\r\nauthorization: bearer secret\r\n" in head for head in server.headers)


@pytest.mark.parametrize("version", [reply(b"no such route", 404), reply(b"[]"), reply(b"1.2")])
def test_a_server_need_not_tell_its_version(version):
    with StubServer(lambda body: [], version=version) as server:
        assert asyncio.run(find_server(server.url, None, None)).version is None


@pytest.mark.parametrize("models", [{}, {"data": []}, [], {"data": [{}]}, 7])
def test_a_server_without_models_is_refused(monkeypatch, models):
    monkeypatch.setattr("helpers.stub_server.MODELS", models)
    with StubServer(lambda body: []) as server, pytest.raises(ArgumentError, match="/v1/models lists no model"):
        asyncio.run(find_server(server.url, None, None))


@pytest.mark.parametrize(("temperature", "keys"), [(0.0, [0, 1, 2, 0]), (0.7, [0, 1, 2, 3])])
def test_texts_are_the_same_by_prompt_or_if_sampled_by_request(temperature, keys):
    load = Load(LOAD.prompts, 3, temperature, 0)
    assert [load.text_key(index) for index in range(4)] == keys
