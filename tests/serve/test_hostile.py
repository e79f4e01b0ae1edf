"""Requests that mean no good: each gets an answer of the 400s, soon, and nobody else waits for it."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from helpers.processes import cpu_seconds
from helpers.serving import Program
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.fields import Strict, limit_entries
from redrafter.serve.protocol.requests import error_body
from redrafter.serve.routes.app import create_app

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HALF = "\ud800"  # of a character
TALK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PROMPT = {"prompt": "Hello", "max_tokens": 2}
SOON = 8.0  # seconds of a processor; one where nothing else runs


def post(program: Program, path: str, body: bytes, **how: Any) -> httpx.Response:
    return httpx.post(f"{program.url}{path}", content=body, headers={"content-type": "application/json"}, **how)


def tool(**parts: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | parts}]}


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def blocks(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


WRONG = {
    "a lone surrogate in a name": (COMPLETION, {HALF: 1}, (400,)),
    "a lone surrogate in a message": (CHAT, said(HALF), (400,)),
    "a lone surrogate in a tool": (CHAT, tool(parameters={"title": HALF}), (400,)),
    "a lone surrogate in a choice": (COMPLETION, {"structured_outputs": {"choice": [HALF]}}, (400,)),
    "a digit that is no number": (COMPLETION, {"logit_bias": {"\u00b2": 1}}, (400,)),
    "no number": (COMPLETION, {"temperature": float("nan")}, (400,)),
    "a number of many digits": (COMPLETION, {"structured_outputs": {"json": {"const": "DIGITS"}}}, (400,)),
    "a lone surrogate in a block": (MESSAGES, blocks({"type": "text", "text": HALF}), (400,)),
    "a type of a megabyte": (MESSAGES, blocks({"type": "x" * 1_000_000}), (400,)),
    "a result of a result": (
        MESSAGES,
        blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_result", "tool_use_id": "a"}]}),
        (400,),
    ),
    "a number as text": (COMPLETION, {"max_tokens": "5"}, (400,)),
    "a name of a megabyte": (COMPLETION, {"x" * 1_000_000: 1}, (400,)),
    "a model of a megabyte": (COMPLETION, {"model": "x" * 1_000_000}, (404,)),
}
DEEP = {
    "a tool": tool(parameters="SCHEMA"),
    "a tool that must be called": tool(parameters="SCHEMA") | {"tool_choice": "required"},
    "a format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "SCHEMA"}}},
    "a grammar": {"structured_outputs": {"json": "SCHEMA"}},
}
M = 1 << 20
LARGE = {
    "a longer text": (COMPLETION, b'{"prompt": "' + b"a " * (6 * M) + b'"}'),
    "many wrong tokens": (COMPLETION, b'{"prompt": [' + b"-1," * M + b"1]}"),
    "many prompts": (COMPLETION, b'{"prompt": [' + b'"a",' * M + b'"a"]}'),
    "many wrong messages": (CHAT, b'{"messages": [' + b"1," * M + b"1]}"),
    "many wrong blocks": (
        MESSAGES,
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + b"1," * M + b"1]}]}",
    ),
    "a long block": (MESSAGES, b'{"max_tokens": 1, "system": "' + b"a " * (M - 50) + b'", "messages": []}'),
    "many fields": (COMPLETION, b"{" + b",".join(b'"x%d":1' % n for n in range(M // 2)) + b"}"),
    "few enough fields": (COMPLETION, b"{" + b",".join(b'"x%d":1' % n for n in range(M // 17)) + b"}"),
    "few enough prompts": (COMPLETION, b'{"prompt": [' + b'"a",' * (M // 5) + b'"a"]}'),
    "few enough lists": (COMPLETION, b'{"prompt": [' + b"[]," * (M // 17) + b"[1]]}"),
    "many digits": (COMPLETION, b'{"prompt": [' + b"1.23456789012345678," * (M // 11) + b"1]}"),
    "many biases": (COMPLETION, b'{"logit_bias": {' + b",".join(b'"%d":"x"' % n for n in range(M // 2)) + b"}}"),
}


def refused(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, answer.text
    fields = {"type", "message"} if answer.request.url.path == MESSAGES else {"message", "type", "param", "code"}
    assert set(answer.json()["error"]) == fields
    assert len(answer.content) < 5000


@pytest.mark.parametrize("name", WRONG)
def test_what_is_odd_is_refused(name, program):
    path, odd, statuses = WRONG[name]
    body = (PROMPT if path == COMPLETION else TALK) | odd
    refused(post(program, path, json.dumps(body).replace('"DIGITS"', "9" * 5000).encode()), *statuses)


NO_OBJECTS = [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "a"}'.encode("utf-16"), b"\xff{}", b"", b"{", b"[]", b'"x"']


@pytest.mark.parametrize("body", [*NO_OBJECTS, b"[" * 100_000, b"x" * (17 << 20)], ids=lambda body: repr(body[:9]))
def test_a_body_that_is_no_object_in_utf_8_is_refused(body, program):
    refused(post(program, COMPLETION, body), 400, 413)


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_deeply_is_refused_at_any_depth(name, program):
    """One part or another of what reads a body gives up at each of these depths."""
    for depth in (70, 130, 200, 300, 400, 460, 480, 900):
        schema = '{"anyOf": [' * depth + "true" + "]}" * depth
        answer = post(program, CHAT, json.dumps(TALK | DEEP[name]).replace('"SCHEMA"', schema).encode(), timeout=300)
        if name != "a tool" or answer.status_code != 200:  # which may be no more than told of
            refused(answer, 400)


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_is_refused_soon(name, program):
    path, body = LARGE[name]
    before, answers, done = cpu_seconds(program.process.pid), [], threading.Event()

    def watch() -> None:
        with httpx.Client() as client:
            while not (done.is_set() and answers):
                answers.append(client.get(f"{program.url}/health").status_code)

    watching = threading.Thread(target=watch)
    watching.start()
    refused(post(program, path, body, timeout=300), 400, 413)
    done.set()
    watching.join()
    took = cpu_seconds(program.process.pid) - before
    assert took < SOON
    assert set(answers) == {200}
    assert len(answers) >= took  # one, if they waited for it


def parts(schema: Any, around: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield every part of a core schema of pydantic with the part around it."""
    if isinstance(schema, dict):
        yield schema, around
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, (list, tuple)) else ():
        yield from parts(part, schema if isinstance(schema, dict) else around)


def subclasses(cls: type[Strict]) -> Iterator[type[Strict]]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_no_field_makes_an_error_of_each_of_a_million_entries():
    """An error holds the event loop for some microseconds, so lists end at the first and objects may not be large."""
    create_app(SimpleNamespace())  # which defines and imports all requests
    seen = set()
    for request in subclasses(Strict):
        for schema, around in parts(request.__pydantic_core_schema__):
            if schema.get("type") == "list" and schema.get("items_schema", {}).get("type", "any") != "any":
                assert schema.get("fail_fast") or schema.get("max_length") == 0, (request, schema)
            elif schema.get("type") == "dict" and schema.get("values_schema", {}).get("type", "any") != "any":
                assert around.get("function", {}).get("function") is limit_entries, (request, schema)
            else:
                continue
            seen.add(request.__name__)
    assert {"ChatRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest", "ContextManagement"} <= seen


def test_another_method_is_told_which_there_are(program):
    answer = httpx.put(f"{program.url}{COMPLETION}")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_an_error_can_be_sent_whatever_it_names():
    body = error_body(400, f"{HALF} is not known", "x" * 1000)["error"]
    assert body["message"] == "? is not known"
    assert len(body["param"]) == 100


def test_half_a_character_in_a_call_is_sent_as_it_was_written():
    _, (delta, _) = ChatReader({"f": None}).push('{"name": "f", "arguments": {"a": "\\ud800 \u00e9"}}', last=True)
    assert delta["tool_calls"][0]["function"]["arguments"] == '{"a": "\\ud800 \u00e9"}'
