"""Calls that a served model must make, and strict tools, in the form that the model writes calls in."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from helpers.serving import listening, text_of
from redrafter.serve.config import ServeOptions
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import Server

PARSERS = ["qwen3_coder", "glm45", "mistral", "pythonic", "deepseek_v3", "hermes", "openai", "llama3_json"]
SCHEMA = {  # which every form can keep to
    "type": "object",
    "properties": {"name": {"enum": ["Rex", "Max"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
WRONG = {"type": "function", "function": {"name": "find", "parameters": {"anyOf": [SCHEMA]}, "strict": True}}
SAME: dict[str, Any] = {
    "model": "boxed",
    "messages": [{"role": "user", "content": "Tell me about a dog named Rex."}],
    "temperature": 0,
    "max_tokens": 300,
}


@pytest.fixture(scope="module")
def made(server) -> Iterator[Server]:
    """A server of the pair in the box as of a model whose template describes tools."""
    on_delta = server.engine.on_delta
    made = Server(server.engine, server.tokenizer)
    made.prompts.template.__dict__["reads_tools"] = True
    yield made
    server.engine.on_delta = on_delta


@pytest.fixture(scope="module")
def client(made) -> "Iterator[openai.OpenAI]":
    with listening(server_app(made)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(params=[PARSERS[0], *(pytest.param(name, marks=pytest.mark.variant) for name in PARSERS[1:])])
def parser(request, made, monkeypatch) -> str:
    """The form of the server's calls."""
    # Without thoughts: the pair in the box does not end them.
    monkeypatch.setattr(made, "options", ServeOptions(tool_call_parser=request.param, reasoning_format="none"))
    return request.param


def test_a_forced_call_is_written_in_the_form_of_the_model(client, parser):
    answer = client.chat.completions.create(**SAME, **FORCED)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "find"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"name", "age"}
    assert 0 <= arguments["age"] <= 99
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**SAME, **FORCED) as events:
        streamed = events.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == "tool_calls"
    plain = client.chat.completions.create(**SAME, **FORCED, extra_body={"speculate": False})
    assert plain.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.variant
def test_a_forced_call_that_is_cut_is_told_as_far_as_it_came(client, parser):
    whole = client.chat.completions.create(**SAME, **FORCED)
    tokens = whole.usage.completion_tokens
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    for most in (tokens // 2, tokens - 2):
        answer = client.chat.completions.create(**SAME | {"max_tokens": most}, **FORCED).choices[0]
        assert answer.finish_reason in ("length", "tool_calls")
        for call in answer.message.tool_calls or ():
            assert arguments.startswith(call.function.arguments)


@pytest.mark.variant
def test_several_texts_each_have_their_call(client, parser):
    sampled = SAME | {"temperature": 0.7, "seed": 4, "n": 3, "max_tokens": 500}
    answer = client.chat.completions.create(**sampled, **FORCED)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"name", "age"}


def test_a_strict_tool_changes_no_text_that_calls_nothing(client, parser, made, pair):
    if parser == "openai":
        pytest.skip("its texts are messages, which the pair in the box does not write")
    asked = ChatRequest.model_validate({"messages": SAME["messages"], "tools": [STRICT]})
    ids, _, _ = made.prompts.encode_chat(asked)
    plain = pair[0].generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, speculate=False)
    answer = client.chat.completions.create(**SAME | {"max_tokens": 20}, tools=[STRICT]).choices[0].message
    assert answer.content == text_of(pair, plain[0, len(ids) :].tolist())
    assert not answer.tool_calls


@pytest.mark.parametrize("parser", ["qwen3_coder"], indirect=True)
def test_a_schema_that_the_form_cannot_keep_to_is_refused_with_what_to_do(client, parser):
    for more in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "find"}}}, {}):
        with pytest.raises(
            openai.BadRequestError, match=r"'find' have 'anyOf' at their top.*--tool-call-parser hermes"
        ):
            client.chat.completions.create(**SAME, tools=[WRONG], **more)
    few = SAME | {"max_tokens": 3}
    assert client.chat.completions.create(**few, tools=[WRONG], tool_choice="none").choices
    loose = {"type": "function", "function": WRONG["function"] | {"strict": False}}
    assert client.chat.completions.create(**few, tools=[loose]).choices
