"""The load generator on servers that a test makes up: who is asked what and when, and what goes wrong."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import load
from helpers.serving import listening
from load import Completion, percentiles, poisson_arrivals, steady_rate, summarize

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def written(*texts: str) -> bytes:
    """Return the stream of a completion, with a token in each chunk."""
    chunks = [event({"choices": [{"index": 0, "text": text}], "usage": None}) for text in texts]
    return b"".join([*chunks, event(USAGE), DONE])


@contextmanager
def server(answer: Any) -> Iterator[SimpleNamespace]:
    """Serve what a function of the body returns, and keep what is sent; a number is the status of an error."""
    found = SimpleNamespace(bodies=[], paths=[], keys=[])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        found.keys.append(dict(scope["headers"]).get(b"authorization"))
        content: Any = b'{"data": [{"id": "stub"}]}'
        if body:
            found.paths.append(scope["path"])
            found.bodies.append(json.loads(body))
            content = answer(found.bodies[-1])
        status, content = (content, b"busy") if isinstance(content, int) else (200, content)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    with listening(app) as found.url:
        yield found


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the script on servers and returns its exit code and its lines of JSON."""
    for name in ("REDRAFTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "prompts.txt").write_text("zero\none\ntwo\n")

    def run(*servers: Any, words: str = "") -> tuple[int, list[dict]]:
        names = ["--prompts", str(tmp_path / "prompts.txt"), "--json", str(tmp_path / "load.json")]
        names += ["--concurrency", "1", "--num-requests", "4", "--max-new-tokens", "3", *words.split()]
        monkeypatch.setattr(sys, "argv", ["load.py", *(server.url for server in servers), *names])
        code = load.main()
        return code, [
            json.loads(line) for line in (tmp_path / "load.json").read_text().splitlines()
        ] if code < 2 else []

    return run


def echo(body: dict[str, Any]) -> bytes:
    return written(body["prompt"], " and", " on")


def test_requests_ask_for_what_was_typed(measure, capsys, monkeypatch):
    monkeypatch.setenv("REDRAFTER_API_KEY", "secret")
    with server(echo) as asked:
        code, lines = measure(asked, words="--temperature 0.5 --seed 100 --model mine")
    out = capsys.readouterr().out
    assert (code, out.splitlines()[0].split()[0]) == (0, "server")
    assert "secret" not in out
    assert set(asked.keys) == {b"Bearer secret"}
    warm_up, *bodies = asked.bodies
    salts = {body.pop("cache_salt") for body in asked.bodies}
    assert len(salts) == 1 + 4  # nothing of the warm-up, or of the same prompt before, is used again
    assert (warm_up["prompt"], warm_up["seed"]) == ("two", 101)
    assert [(body["prompt"], body["seed"]) for body in bodies] == list(
        zip(["zero", "one", "two", "zero"], [100, 101, 102, 103], strict=True)
    )
    common = {"model": "mine", "max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "stream": True}
    common |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # not those of the model's config
    assert all(body.items() >= (common | {"stream_options": {"include_usage": True}}).items() for body in bodies)
    assert lines[0].items() >= {"at once": 1, "failed": 0, "tokens": 12, "same texts": "4/4"}.items()


def test_texts_of_servers_are_compared_at_each_concurrency(measure):
    def other(body):
        return written("x" if body["prompt"] == "two" else body["prompt"], " and", " on")

    with server(echo) as first, server(other) as second:
        _, lines = measure(first, second, words="--concurrency 1,3 --num-requests 6")
    assert [(line["server"], line["at once"]) for line in lines] == [
        (each.url, slots) for slots in (1, 3) for each in (first, second)
    ]
    assert [line["same texts"] for line in lines] == ["6/6", "4/6", "6/6", "4/6"]


def test_each_concurrency_has_its_own_prompts_and_shares_tables_if_asked(measure):
    with server(echo) as asked:
        measure(asked, words="--concurrency 1,2 --num-requests 2 --first 1 --shared")
    assert not any("cache_salt" in body for body in asked.bodies)
    assert [body["seed"] for body in asked.bodies] == [1, 1, 2, 2, 1, 3, 4]


def test_requests_arrive_in_a_poisson_stream_that_is_the_same_for_each_server(measure):
    with server(echo) as one, server(echo) as other:
        code, lines = measure(one, other, words="--rate 40,80 --num-requests 12")
    assert code == 0
    assert [(line["req/s sent"], line["steady"]) for line in lines] == [(40, None)] * 2 + [(80, None)] * 2
    assert all(line["gap p99"] >= line["gap p50"] and line["first p99"] >= line["first p50"] for line in lines)
    for found in (one, other):  # of each rate after its warm-up, in the order of their arrival
        assert [body["seed"] for body in found.bodies[40:52]] == list(range(12))
    times = poisson_arrivals(4000, 40, seed=1)
    assert times == sorted(times) == poisson_arrivals(4000, 40, seed=1) != poisson_arrivals(4000, 40, seed=2)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 40, rel=0.05)
    assert stdev(gaps) == pytest.approx(1 / 40, rel=0.1)  # as of an exponential distribution


def test_rows_of_messages_are_asked_as_chats(measure, tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "Me."}]},
        {"prompt": [turns[1], call, {"role": "tool", "content": "2"}], "tools": [{"name": "f"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with server(lambda body: written("a", "b")) as asked:
        assert measure(asked, words=f"--prompts {tmp_path / 'rows.jsonl'} --num-requests 2")[0] == 0
    chat, agent = asked.bodies[-2:]
    assert (chat["messages"], "prompt" in chat) == (turns, False)
    called = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert agent["messages"][1]["tool_calls"] == [called]
    assert agent["tools"][0]["function"] == {"name": "f"}
    assert set(asked.paths) == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (500, "HTTP 500"),
        (written("a").removesuffix(DONE), "the stream ended without [DONE], or without usage"),
        (b"data: {oops\n\n", "JSONDecodeError"),
        (b"data: 7\n\n", "AttributeError"),
        (event({"error": {"message": "too slow"}}) + DONE, "too slow"),
    ],
)
def test_a_request_that_fails_is_counted_and_the_load_continues(broken, message):
    async def run(url: str) -> list[Completion]:
        async with load.ClientSession() as session:
            return await load.run_load(session, url, [{"prompt": name} for name in ("zero", "one", "two")], 1)

    with server(lambda body: broken if body["prompt"] == "one" else written("a")) as asked:
        done = asyncio.run(run(asked.url))
    assert [bool(one.error) for one in done] == [False, True, False]
    assert message in done[1].error
    assert summarize(done, 1, 1.0)["failed"] == 1


def test_a_server_that_answers_nothing_ends_the_load_before_it_is_timed(measure, capsys):
    with server(lambda body: 503) as asked:
        assert measure(asked)[0] == 2
    assert "HTTP 503: busy" in capsys.readouterr().err
    assert len(asked.bodies) == 1


@pytest.mark.parametrize(
    ("words", "message"), [("", "is not a server of OpenAI's protocol"), ("--concurrency 0", "at least one stream")]
)
def test_what_cannot_be_measured_is_refused_by_name(measure, capsys, words, message):
    assert measure(SimpleNamespace(url="http://127.0.0.1:1"), words=words)[0] == 2
    assert message in capsys.readouterr().err


def completed(index: int, sent: float, chunks: list[float], ended: float, **more) -> Completion:
    return Completion(index, sent, ended, chunks, more.pop("texts", chunks), tokens=more.pop("tokens", len(chunks)))


TWO_SLOTS = [  # the third request follows the first, the fourth the second
    completed(0, 0.0, [1.0, 2.0, 3.0], 3.0),
    completed(1, 0.0, [1.5, 2.5, 3.5], 3.6),
    completed(2, 3.0, [4.0, 5.0, 6.0], 6.0),
    completed(3, 3.6, [4.5, 5.5, 7.5], 7.6),
]


def test_a_summary_of_two_slots():
    failed = Completion(4, 0.0, 0.1, error="no")
    found = summarize([*TWO_SLOTS, failed], 2, 8.0)
    assert (found["tok/s"], found["req/s"], found["failed"]) == (12 / 8, 4 / 8, 1)
    for name, p50, p99 in (("first", 1000, 1485), ("gap", 1000, 1930), ("request", 3300, 3988)):
        assert (found[f"{name} p50"], found[f"{name} p99"]) == (pytest.approx(p50), pytest.approx(p99))
    assert found["per token"] == pytest.approx(1e3 * (2 + 2 + 2 + 3) / 8)
    assert steady_rate(TWO_SLOTS, 2) == pytest.approx(9 / 4.5)
    assert steady_rate(TWO_SLOTS[:1], 2) is None or steady_rate(TWO_SLOTS[:1], 2) > 0
    # Chunks without text show nothing, but bring tokens.
    quiet = summarize([completed(0, 0.0, [1.0, 2.0, 4.0, 5.0], 5.0, texts=[2.0, 5.0])], 1, 5.0)
    assert (quiet["first p50"], quiet["gap p50"], quiet["per token"]) == (2000, 3000, pytest.approx(4000 / 3))
    assert percentiles("x", []) == {"x p50": None, "x p99": None}


@pytest.mark.variant  # starts a server
def test_our_own_server_writes_the_same_texts_at_each_concurrency(measure, program):
    class Server:
        url = program.url

    code, lines = measure(Server(), words="--concurrency 1,4 --num-requests 8 --max-new-tokens 12")
    assert code == 0
    for line in lines:
        assert (line["failed"], line["tokens"], line["same texts"]) == (0, 96, "8/8")
        assert line["tokens/step"] > 1
