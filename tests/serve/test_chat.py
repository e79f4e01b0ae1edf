"""Requests of chats as clients send them: what is taken, and what is said of what is not."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from redrafter.serve.protocol.requests import ChatRequest, CompletionRequest
from redrafter.serve.routes.app import create_app

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
CHAT, COMPLETION = "chat/completions", "completions"
MANY = ["x"] * 17
TEXT, IMAGE = {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "x"}}
AUDIO, CONTINUE = {"type": "input_audio", "input_audio": {}}, {"continue_final_message": True}
FORM = {"type": "json_schema", "json_schema": {"schema": "x"}}


def refusal(path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    """Return status, message and parameter of the error that a server says of a body."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(SimpleNamespace(images=None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(f"/v1/{path}", json=body)

    answer = asyncio.run(ask())
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"]


def talk(**message: Any) -> dict[str, Any]:
    return {"messages": [HELLO | message]}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETION, {"stop": MANY}, 400, "stop: List should have at most 16 items"),
        (COMPLETION, {"stop": ["a", 5]}, 400, "stop.1: Input should be a valid string"),
        (COMPLETION, {"suffix": "b"}, 400, "suffix is not supported"),
        (COMPLETION, {"prompt": 5}, 400, "prompt: Input should be a text, a list of texts, a list of token ids or a"),
        (COMPLETION, {"prompt": [[1], [2.5]]}, 400, "prompt.1.0: Input should be a valid integer"),
        (COMPLETION, {"prompt": ["a"] * 1025}, 400, "prompt: List should have at most 1024 items"),
        (CHAT, talk(content=5), 400, "messages.0.content: Input should be a text or a list of parts"),
        (CHAT, talk(content=[{"type": "text"}]), 400, "messages.0.content.0.text: Field required"),
        (CHAT, talk(content=[TEXT, IMAGE]), 400, "messages.0.content.1.image_url.url is not supported: this server f"),
        (CHAT, talk(content=[AUDIO]), 400, "messages.0.content.0: Input should be a part of text or an image"),
        (CHAT, talk(role="function"), 400, "messages.0.role: Input should be 'system', 'developer', 'user'"),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, 400, "tool_choice: Input should be 'none', 'auto', 'required' or"),
        (CHAT, {"tools": [TOOL], "tool_choice": TOOL | {"function": {}}}, 400, "tool_choice.function.name: Field req"),
        (CHAT, {"response_format": FORM}, 400, "response_format.json_schema.schema: Input should be a schema"),
        (CHAT, {"functions": []}, 400, "functions is not supported"),
        ("responses", {"max_tokens": 5}, 400, "max_tokens is not supported"),
        (CHAT, {"modalities": ["audio"]}, 400, "modalities.0: Input should be 'text'"),
        (CHAT, talk(annotations=[{}]), 400, "messages.0.annotations: List should have at most 0 items"),
        (CHAT, CONTINUE | {"add_generation_prompt": True}, 400, "continue_final_message continues a message: leave"),
        (CHAT, CONTINUE, 400, "continue_final_message needs a last message of the assistant"),
    ],
)
def test_an_error_names_the_field_and_the_real_reason(path, body, status, says):
    body = {CHAT: {"messages": [HELLO]}, COMPLETION: {"prompt": "a"}, "responses": {"input": "a"}}[path] | body
    code, message, param = refusal(path, body)
    assert code == status, message
    assert message.startswith(says), message
    assert param is None or message.startswith(param)


def test_what_is_null_is_as_if_left_out():
    nothing = dict.fromkeys(("annotations", "audio", "refusal", "function_call", "tool_calls", "anything"))
    plain = {"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "stream": True}
    body = json.loads(json.dumps(plain)) | dict.fromkeys(("store", "stop", "tools", "unknown", "n", "ignore_eos"))
    body["messages"][0] |= nothing
    body["messages"][1]["function_call"] = None
    body["messages"][1]["tool_calls"][0]["index"] = None
    assert ChatRequest.model_validate(body) == ChatRequest.model_validate(plain)
    assert CompletionRequest.model_validate({"prompt": "a", "suffix": None, "x": None}).prompt == "a"
    assert refusal(CHAT, plain | {"unknown": 1}) == (400, "unknown is not supported", "unknown")


def test_fields_without_an_effect_on_the_text_are_taken():
    fields = {"metadata": {"a": "b"}, "store": False, "modalities": ["text"], "user": "u", "safety_identifier": "s"}
    fields |= {"prompt_cache_key": "k", "service_tier": "auto", "response_format": {"type": "text"}}
    fields |= {"tools": [TOOL], "tool_choice": "required"}
    assert ChatRequest.model_validate({"messages": [HELLO]} | fields).callable_tools[0].function.name == "find"


class Item(BaseModel):
    name: Literal["tea", "coffee"]
    price: Literal[1, 2, 3]


class Order(BaseModel):
    first: Item
    second: Item


@pytest.fixture(scope="module")
def client(url) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


TALK = [{"role": "user", "content": "Order two things"}]
SAME: dict[str, Any] = {"model": "boxed", "messages": TALK, "max_tokens": 100, "seed": 3}
ORDER = openai.pydantic_function_tool(Order, name="order")


@pytest.mark.variant
def test_a_call_is_streamed_and_its_message_sent_back(client):
    options = {"tools": [ORDER], "tool_choice": "required"}
    with client.chat.completions.stream(**SAME, **options) as events:
        deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        message = events.get_final_completion().choices[0].message
    unstreamed = client.chat.completions.create(**SAME, **options).choices[0].message
    assert len(deltas) > 5
    assert message.tool_calls[0].function.arguments == unstreamed.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    answers = [
        client.chat.completions.create(**SAME | {"messages": [*TALK, sent, result], "max_tokens": 8}, tools=[ORDER])
        for sent in (message, message.model_dump(), unstreamed, unstreamed.model_dump())
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_a_call_that_is_cut_ends_for_its_length_and_a_text_comes_at_once(client):
    def both(**options: Any) -> tuple[Any, list[Any]]:
        streamed = client.chat.completions.create(**SAME | options, stream=True)
        return client.chat.completions.create(**SAME | options).choices[0], [part.choices[0] for part in streamed]

    choice, parts = both(tools=[ORDER], tool_choice="required", max_tokens=30)
    assert choice.finish_reason == parts[-1].finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")
    choice, parts = both(tools=[{"type": "function", "function": {"name": "find"}}], temperature=0, max_tokens=30)
    texts = [part.delta.content for part in parts]
    assert "".join(filter(None, texts)) == choice.message.content
    assert sum(map(bool, texts)) > 4


def test_the_coldest_temperatures_are_greedy_and_a_spelt_special_token_is_text(client):
    def chat(**body: Any) -> Any:
        return client.chat.completions.create(**SAME | body)

    cold = [chat(max_tokens=16, temperature=degrees) for degrees in (0, 1e-40, 1e-9, 9e-6)]
    assert len({answer.choices[0].message.content for answer in cold}) == 1
    spelt, text = (
        chat(messages=[{"role": "user", "content": content}], max_tokens=1) for content in ("a<|eos|>b", "a.b")
    )
    assert spelt.usage.prompt_tokens > text.usage.prompt_tokens + 2
