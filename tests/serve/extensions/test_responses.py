"""`/v1/responses` as OpenAI's client sends and reads it, every event and answer checked against its own types."""

import asyncio
import json
from typing import Literal

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from helpers.serving import SCHEMA, Program
from redrafter.extensions.responses.routes import ResponsesRequest, as_chat, response_events
from redrafter.serve.protocol.requests import ApiError

EVENTS = TypeAdapter(ResponseStreamEvent)
TALK = {"input": "Tell me of the sea", "max_output_tokens": 24, "temperature": 0}
BEGUN = "created in_progress output_item.added"
TOOLS = [{"type": "function", "name": "find_dog", "description": "finds", "parameters": SCHEMA, "strict": True}]


def posted(program: Program, **body: object) -> dict:
    answer = program.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=False)
    return answer.json()


def streamed(program: Program, **body: object) -> list[dict]:
    """Return the events of a stream, checked to have the types that their lines name and the client knows."""
    events = []
    with httpx.stream("POST", f"{program.url}/v1/responses", json=body | {"stream": True}, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for event in "".join(answer.iter_text()).strip().split("\n\n"):
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    check(events)
    return events


def check(events: list[dict]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        kind = type(EVENTS.validate_python(event))
        assert kind.model_fields["type"].annotation.__args__ == (event["type"],)


def kinds(events: list[dict]) -> list[str]:
    """Return the types of events without their common prefix, and runs of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if not (name.endswith("delta") and name in names[at - 1 : at])]


def chat(client, **settings: object):
    return client.chat.completions.create(model="boxed", **settings)


def test_a_response_is_what_a_chat_writes(client, program):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea"}]
    expected = chat(client, messages=talk, max_tokens=24, temperature=0)
    response = client.responses.create(model="boxed", instructions="Be brief.", **TALK)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == 24
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.store is False
    assert response.instructions == "Be brief."
    raw = posted(program, **TALK | {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"})
    assert raw["metadata"] == {"a": "b"}
    assert raw["output"][0]["content"][0]["text"] == response.output_text
    again = posted(program, **TALK | {"instructions": "Be brief."})["usage"]
    assert again["input_tokens_details"]["cached_tokens"] > 0
    assert again["output_tokens_details"] == {"reasoning_tokens": 0}


def test_items_are_read_as_messages(client, program):
    first = posted(program, **TALK)["output"]
    function = {"name": "find_dog", "arguments": '{"name": "Rex", "age": 3}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Tell me ", "all")]},
        *first,
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": "found"},
    ]
    call = {"id": "a", "type": "function", "function": function}
    talk = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Tell me all"},
        {"role": "assistant", "content": first[0]["content"][0]["text"], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "found"},
    ]
    expected = chat(client, messages=talk, max_tokens=8, temperature=0)
    response = client.responses.create(model="boxed", input=items, max_output_tokens=8, temperature=0)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens


def test_a_streams_events_come_in_order_and_join_to_the_whole(program):
    response, events = posted(program, **TALK), streamed(program, **TALK)
    shown = "content_part.added output_text.delta output_text.done content_part.done"
    assert kinds(events) == f"{BEGUN} {shown} output_item.done {response['status']}".split()
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert text == response["output"][0]["content"][0]["text"] == last["output"][0]["content"][0]["text"]
    assert events[0]["response"]["status"] == "in_progress"
    assert last["status"] == response["status"]
    assert last["usage"]["output_tokens"] == response["usage"]["output_tokens"]
    assert last["id"] == events[0]["response"]["id"]
    assert last["output"][0] == events[-2]["item"]
    # Which drafts are verified depends on the time that steps take, so the counts of two requests differ.
    drafted = last["metrics"]["speculative_decoding"]
    assert drafted.keys() == response["metrics"]["speculative_decoding"].keys()
    assert drafted["num_spec_steps"] > 0


class Person(BaseModel):
    name: Literal["Anna", "Rex"]
    age: int = Field(ge=0, le=99)


def test_a_text_and_a_stream_are_parsed_into_a_type(client, program):
    settings = {"model": "boxed", "input": "Who?", "text_format": Person, "extra_body": {"seed": 3}}
    with client.responses.stream(max_output_tokens=100, **settings) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert "".join(deltas) == response.output_text
    assert isinstance(response.output_parsed, Person)
    response = client.responses.parse(max_output_tokens=300, temperature=0.5, **settings)
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Person)
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    raw = posted(program, text=form, input="Who?", max_output_tokens=200, seed=1)
    assert set(json.loads(raw["output"][0]["content"][0]["text"])) == {"name", "age"}
    assert raw["text"] == form
    assert posted(program, text={"format": {"type": "text"}}, **TALK)["text"] == {"format": {"type": "text"}}


def test_an_automatic_choice_of_no_tools_is_none(program):
    assert posted(program, tool_choice="auto", **TALK)["output"][0]["type"] == "message"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "find_dog"}], ids=str)
def test_tools_are_called(choice, client, program):
    settings = {"input": "Find Rex", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 80, "seed": 2}
    [call] = posted(program, **settings)["output"]
    assert call["type"] == "function_call"
    assert set(json.loads(call["arguments"])) == {"name", "age"}
    events = streamed(program, **settings)
    shown = "function_call_arguments.delta function_call_arguments.done"
    assert kinds(events) == f"{BEGUN} {shown} output_item.done completed".split()
    [again] = events[-1]["response"]["output"]
    assert again["arguments"] == call["arguments"]
    assert again["name"] == "find_dog"
    assert again["call_id"]
    without_seed = {name: value for name, value in settings.items() if name != "seed"}
    with client.responses.stream(model="boxed", extra_body={"seed": 2}, **without_seed) as stream:
        assert stream.get_final_response().output[0].arguments == call["arguments"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("store", True, "Input should be False"),
        ("previous_response_id", "resp_1", "not supported"),
        ("reasoning", {"summary": "auto"}, "reasoning.summary is not supported"),
        ("include", ["message.output_text.logprobs"], "at most 0 items"),
        ("tools", [{"type": "web_search"}], "tools.0.type: Input should be 'function'"),
        (
            "input",
            [{"type": "reasoning", "id": "rs_1", "encrypted_content": "x"}],
            "encrypted_content is not supported",
        ),
        (
            "input",
            [{"type": "web_search_call", "id": "ws_1"}],
            "input.0: Input should be an item of type message",
        ),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "needs a schema"),
        ("nonsense", 1, "nonsense is not supported"),
    ],
)
def test_what_is_not_there_is_refused_by_name(field, value, says, program):
    answer = program.post("/v1/responses", TALK | {field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"].startswith(field)


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [], "parallel_tool_calls": True}
HEAD |= {"tool_choice": "auto", "tools": [], "status": "in_progress"}


def events_of(*deltas: dict, finish: str | None = "stop", error: Exception | None = None) -> list[dict]:
    """Return the events for a chat's stream of these deltas."""

    async def parts():
        for delta in deltas:
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if error is not None:
            raise error
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        yield {"choices": [], "usage": USAGE, "metrics": {}}

    async def joined() -> list[dict]:
        return [event async for event in response_events(HEAD, parts())]

    events = asyncio.run(joined())
    check(events)
    return events


def call(index: int, arguments: str, **more: str) -> dict:
    function = {"arguments": arguments} | ({"name": more["name"]} if more else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": more["id"]} if more else {})]}


def test_calls_that_come_in_pieces_are_told_in_pieces():
    events = events_of(
        {"role": "assistant", "content": ""},
        {"content": "I look."},
        call(0, "", id="a", name="f"),
        call(0, '{"x"'),
        call(0, ": 1}"),
        call(1, "{}", id="b", name="g"),
    )
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert deltas == ['{"x"', ": 1}", "{}"]
    assert events[-1]["type"] == "response.completed"
    message, first, second = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "I look."
    assert message["status"] == "completed"
    assert (first["name"], first["arguments"], first["call_id"]) == ("f", '{"x": 1}', "a")
    assert (second["name"], second["arguments"], second["call_id"]) == ("g", "{}", "b")
    indices = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert indices == [0, 1, 2]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_thoughts_are_an_item_of_their_own():
    events = events_of(
        {"role": "assistant"}, {"reasoning_content": "Hm"}, {"reasoning_content": "m."}, {"content": "Yes."}
    )
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    thoughts, message = events[-1]["response"]["output"]
    assert deltas == ["Hm", "m."]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "Yes."
    assert thoughts["status"] == message["status"] == "completed"
    [cut] = events_of({"reasoning_content": "Hm"}, finish="length")[-1]["response"]["output"]
    assert (cut["type"], cut["status"]) == ("reasoning", "incomplete")


def test_thoughts_may_be_sent_back():
    thoughts, message = events_of({"reasoning_content": "Hm."}, {"content": "Yes."})[-1]["response"]["output"]
    user = {"role": "user", "content": "And?"}
    chat = as_chat(ResponsesRequest.model_validate({"input": [user, thoughts, message, user]}))
    turns = [(turn.role, turn.text, turn.reasoning_content) for turn in chat.messages]
    assert turns == [("user", "And?", None), ("assistant", "Yes.", "Hm."), ("user", "And?", None)]
    request = as_chat(ResponsesRequest.model_validate({"input": "a", "reasoning": {"effort": "low"}}))
    assert request.reasoning_effort == "low"


def test_a_call_alone_and_a_text_of_nothing_and_an_error_within_a_stream():
    [only] = events_of(call(0, "{}", id="a", name="f"))[-1]["response"]["output"]
    assert only["type"] == "function_call"
    [message] = events_of({"role": "assistant", "content": ""})[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""
    events = events_of({"content": "a"}, error=ApiError(500, "the engine failed"))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine failed"}
