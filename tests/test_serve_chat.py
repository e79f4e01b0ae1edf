"""Requests of chats as clients send them: what is taken, and what is said of what is not."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from redrafter.serve.app import create_app
from redrafter.serve.protocol import ChatRequest, CompletionRequest

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
CHAT, COMPLETION = "chat/completions", "completions"
MANY = ["x"] * 17


def refusal(path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    """Return status, message and parameter of the error that a server says of a body."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(SimpleNamespace()))
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
        (COMPLETION, {"stop": MANY}, 422, "stop: List should have at most 16 items"),
        (COMPLETION, {"stop": ["a", 5]}, 422, "stop.1: Input should be a valid string"),
        (COMPLETION, {"stop": 5}, 422, "stop: Input should be a text or a list of texts"),
        (COMPLETION, {"stop": ""}, 422, "stop: String should have at least 1 character"),
        (COMPLETION, {"stop": ["a", "b" * 1001]}, 422, "stop.1: String should have at most 1000 characters"),
        (COMPLETION, {"prompt": 5}, 422, "prompt: Input should be a text, a list of texts, a list of token ids or a"),
        (COMPLETION, {"prompt": ["a", 5]}, 422, "prompt.1: Input should be a valid string"),
        (COMPLETION, {"prompt": [1, -2]}, 422, "prompt.1: Input should be greater than or equal to 0"),
        (COMPLETION, {"prompt": [1, "a"]}, 422, "prompt.1: Input should be a valid integer"),
        (COMPLETION, {"prompt": [[1], [2.5]]}, 422, "prompt.1.0: Input should be a valid integer"),
        (COMPLETION, {"prompt": ["a"] * 1025}, 422, "prompt: List should have at most 1024 items"),
        (COMPLETION, {"structured_outputs": {"json": 5}}, 422, "structured_outputs.json: Input should be a schema"),
        (CHAT, talk(content=5), 422, "messages.0.content: Input should be a text or a list of parts"),
        (CHAT, talk(content=[{"type": "text"}]), 422, "messages.0.content.0.text: Field required"),
        (CHAT, talk(content=["a"]), 422, "messages.0.content.0: Input should be a valid dictionary"),
        (
            CHAT,
            talk(content=[{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "x"}}]),
            400,
            "messages.0.content.1 is not supported: image_url parts cannot be read, only text",
        ),
        (CHAT, talk(role="function"), 422, "messages.0.role: Input should be 'system', 'developer', 'user'"),
        (CHAT, {"tools": [TOOL], "tool_choice": "any"}, 422, "tool_choice: Input should be 'none', 'auto' or 'requi"),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, 422, "tool_choice: Input should be 'none', 'auto', 'required' or"),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
            422,
            "tool_choice.function.name: Field required",
        ),
        (CHAT, {"tool_choice": "required"}, 422, "tool_choice needs tools"),
        (CHAT, {"tools": [TOOL | {"type": "custom"}]}, 422, "tools.0.type: Input should be 'function'"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            422,
            "response_format.json_schema.schema: Input should be a schema",
        ),
        (CHAT, {"functions": []}, 400, "functions is not supported: give tools"),
        (CHAT, {"function_call": "auto"}, 400, "function_call is not supported: give tool_choice"),
        (CHAT, {"chat_template": "{{ x }}"}, 400, "chat_template is not supported: the server's own is used"),
        (CHAT, {"prediction": {"type": "content"}}, 400, "prediction is not supported"),
        (CHAT, {"modalities": ["audio"]}, 422, "modalities.0: Input should be 'text'"),
        (CHAT, {"store": True}, 422, "store: Input should be False"),
        (CHAT, talk(refusal="no"), 400, "messages.0.refusal is not supported: give it as content"),
        (CHAT, talk(annotations=[{}]), 422, "messages.0.annotations: List should have at most 0 items"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            422,
            "continue_final_message goes on with a message: leave out add_generation_prompt",
        ),
        (CHAT, {"continue_final_message": True}, 422, "continue_final_message needs a last message of the assistant"),
    ],
)
def test_an_error_names_the_field_and_the_real_reason(path, body, status, says):
    body = ({"messages": [HELLO]} if path == CHAT else {"prompt": "a"}) | body
    found, message, param = refusal(path, body)
    assert found == status and message.startswith(says), message
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
    fields = {
        "metadata": {"a": "b"},
        "store": False,
        "modalities": ["text"],
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tools": [TOOL],
        "tool_choice": "required",
    }
    assert ChatRequest.model_validate({"messages": [HELLO]} | fields).callable_tools[0].function.name == "find"
