"""Requests that are refused with the numbers or the names that are wrong, in each protocol."""

import asyncio
import json
import re
import socket

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.engine_in_thread import server_of, written
from redrafter.app.options import LoadOptions
from redrafter.errors import ArgumentError
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.protocol.requests import TOO_LONG, ApiError

PROMPT = "The old man looked at the sea"
TALK = [{"role": "user", "content": PROMPT}]
# The body of a request and the field of its most tokens, by path.
ASKED = {
    "/v1/completions": ({"prompt": [PROMPT, "Once"]}, "max_tokens"),
    "/v1/chat/completions": ({"messages": TALK}, "max_tokens"),
    "/v1/chat/completions?": ({"messages": TALK}, "max_completion_tokens"),
    "/v1/responses": ({"input": PROMPT}, "max_output_tokens"),
    "/v1/messages": ({"messages": TALK}, "max_tokens"),
}
CONTEXT = 1024  # of the boxed pair


def length_of_prompt(url, path, body) -> int:
    if path == "/v1/completions":
        return httpx.post(f"{url}/tokenize", json={"prompt": body["prompt"][0]}, timeout=300).json()["count"]
    return httpx.post(f"{url}/tokenize", json={"messages": TALK}, timeout=300).json()["count"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_has_room_for_are_refused_with_the_numbers(url, path, stream):
    body, field = ASKED[path]
    prompt = length_of_prompt(url, path, body)
    asked = CONTEXT - prompt + 1
    answer = httpx.post(url + path, json=body | {field: asked, "stream": stream}, timeout=300)
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":  # in the words by which agents know that fewer tokens would do
        said = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
    else:
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        said = rf"'{field}' is too large: \d+\. .*has (\d+) input tokens \((\d+) > (\d+) - {prompt}\)"
    assert list(map(int, re.search(said, error["message"]).groups())) == [prompt, asked, CONTEXT]
    if path != "/v1/responses":  # whose texts no string can stop
        body = body | {"stop_sequences" if path == "/v1/messages" else "stop": [" "], field: asked - 1}
        assert httpx.post(url + path, json=body, timeout=300).status_code == 200


@pytest.mark.parametrize("path", ASKED)
def test_the_drafts_of_each_request_are_limited_in_every_protocol_and_its_text_is_the_same(url, path):
    body, field = ASKED[path]

    def ask(**more):
        fields = body | {field: 30, "temperature": 0} | more
        if path == "/v1/completions":
            fields |= {"prompt": PROMPT}
        return httpx.post(url + path, json=fields, timeout=300)

    def text(answer):
        return [part.get("text") or part.get("message") or part.get("content") for part in parts(answer)]

    def parts(answer):
        return answer.get("choices") or answer.get("output") or answer["content"]

    whole = ask().json()
    assert whole["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 2
    for name, limit in (("num_speculative_tokens", 1), ("speculative.n_max", 1), ("num_speculative_tokens", 0)):
        limited = ask(**{name: limit}).json()
        assert text(limited) == text(whole)
        found = limited["metrics"]["speculative_decoding"]
        assert max(length for length, steps in enumerate(found["acceptance_histogram"]) if steps or not length) == limit
    refused = ask(num_speculative_tokens=99)
    assert refused.status_code == 400
    assert re.search(r"num_speculative_tokens .* \(0 to \d+; 0 for no drafts\), got 99", refused.text)
    both = ask(num_speculative_tokens=1, speculate=False)
    assert both.status_code in (400, 400)
    assert "speculate=false takes no drafts" in both.text
    twice = ask(**{"num_speculative_tokens": 1, "speculative.n_max": 2})
    assert twice.status_code in (400, 400)


def test_without_a_number_an_answer_may_take_the_rest_of_the_context(url):
    body = {"prompt": [5] * (CONTEXT - 3), "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
    assert answer["usage"]["completion_tokens"] == 3, "not the 16 of the protocol's default"


@pytest.mark.parametrize(
    ("path", "tool", "status"),
    [
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}}, 400),
        ("/v1/messages/count_tokens", {"name": "f", "input_schema": {"type": "object"}}, 400),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}, 400),
        ("/v1/responses", {"type": "function", "name": "f"}, 400),
        ("/tokenize", {"type": "function", "function": {"name": "f"}}, 400),
    ],
)
def test_two_tools_of_one_name_are_refused(url, path, tool, status):
    body = {"input": PROMPT} if path == "/v1/responses" else {"messages": TALK}
    body |= {"max_tokens": 5} if path == "/v1/messages" else {}
    answer = httpx.post(url + path, json=body | {"tools": [tool, tool]}, timeout=300)
    assert (answer.status_code, "the name 'f' twice" in answer.text) == (status, True)


@pytest.mark.parametrize("order", (1, -1))
@pytest.mark.parametrize("encoding", (b"chunked", b"Chunked", b"gzip, chunked", b"identity"))
def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(url, encoding, order):
    """Else what follows the body by one length is another request by the other one."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = [b"Transfer-Encoding: " + encoding, b"Content-Length: %d" % (5 + len(smuggled))][::order]
    head = b"\r\n".join((b"POST /tokenize HTTP/1.1", b"Host: localhost", *lengths, b"\r\n"))
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + b"0\r\n\r\n" + smuggled)
        heard = b""
        while part := connection.recv(1 << 16):
            heard += part
    assert heard.startswith(b"HTTP/1.1 400")
    assert heard.count(b"HTTP/1.1") == 1
    message = json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert "Content-Length or a Transfer-Encoding, not both" in message


def test_a_prompt_longer_than_max_input_len_is_refused_by_the_server_and_by_its_engine(loaded):
    served = server_of(loaded, load=LoadOptions(max_input_len=4))
    served.engine.start()
    try:
        with pytest.raises(ApiError, match="5 tokens; a prompt may have 4") as refused:
            served.prompts.encode_prompts([5] * 5)
        assert (refused.value.param, refused.value.code) == ("prompt", TOO_LONG)
        assert served.prompts.encode_prompts([5] * 4) == [[5] * 4]
        with pytest.raises(ArgumentError, match="5 tokens; a prompt may have 4"):
            asyncio.run(written(served.engine, [5] * 5, 2))
    finally:
        served.engine.stop()


def test_an_end_token_that_the_model_lacks_refuses_no_request(loaded, monkeypatch):
    monkeypatch.setattr(loaded.engine.model.generation_config, "eos_token_id", [2, 10**6])
    served = ServedEngine.from_pair(loaded, ServeOptions(), LoadOptions())
    served.scheduler.submit(
        TokenSequence(
            GenerationRequest([5, 6], 1, SamplingParams(stop_token_ids=served.facts.end_tokens)), lambda *_: None
        )
    )
