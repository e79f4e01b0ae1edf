"""`/v1/messages` as Anthropic's client and coding agents send and read it, events and answers checked by its types."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from helpers.chats import LLAMA_LIKE, tiny_tokenizer
from helpers.serving import SCHEMA, Program
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.extensions.messages.protocol import (
    MessagesRequest,
)
from redrafter.extensions.messages.routes import as_chat, message_events
from redrafter.scheduler.request import RequestBounds
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.answers.call_forms import HarmonyMessages
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.prompts import PromptEncoder
from redrafter.serve.protocol.requests import ApiError, ChatRequest

EVENTS = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "Tell me of the sea"}
TALK: dict[str, Any] = {"messages": [USER], "max_tokens": 24, "temperature": 0}
TOOL = {"name": "find_dog", "description": "finds", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "find_dog", "description": "finds", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def claude(program: Program) -> Any:
    """Anthropic's client of `program`."""
    return anthropic.Anthropic(base_url=program.url, api_key="none", max_retries=0)


def posted(program: Any, **body: Any) -> dict[str, Any]:
    answer = program.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json(), strict=False)
    return answer.json()


def streamed(program: Any, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, checked to have the types that their lines name and the client knows."""
    answer = program.post("/v1/messages", body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return check(events)


def check(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for event in events:
        if event["type"] not in ("ping", "error"):
            kind = type(EVENTS.validate_python(event))
            assert kind.model_fields["type"].annotation.__args__ == (event["type"],)
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events tell, whose blocks begin and end one after the other."""
    [message] = [event["message"] for event in events if event["type"] == "message_start"]
    message = message | {"content": []}
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            kind, delta = event["delta"]["type"], event["delta"]
            if kind == "signature_delta":
                message["content"][-1]["signature"] = delta["signature"]
            else:
                texts[-1] += delta[{"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))]
        elif event["type"] == "content_block_stop":
            block, text = message["content"][event["index"]], texts[-1]
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "metrics": event["metrics"]}
    return message


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, and runs of deltas as one."""
    names = [event["type"] for event in events]
    return [name for at, name in enumerate(names) if not (name.endswith("_block_delta") and name == names[at - 1])]


def chat(client: Any, **settings: Any) -> Any:
    return client.chat.completions.create(model="boxed", **settings)


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its id, and with its prompt counted at once, wherever that was found."""
    usage = dict(answer["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return answer | {"id": None, "usage": usage, "metrics": None}


# Texts


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_message_is_what_a_chat_writes(client, program, claude, sampling):
    system = "Be brief, and speak of the sea as one who has been there."
    talk = [{"role": "system", "content": system}, USER]
    expected = chat(
        client, messages=talk, max_tokens=24, temperature=sampling["temperature"], seed=sampling.get("seed")
    )
    message = claude.messages.create(model="boxed", system=system, max_tokens=24, messages=[USER], extra_body=sampling)
    [block] = message.content
    assert block.text == expected.choices[0].message.content
    usage, read = message.usage, expected.usage.prompt_tokens
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (
        read,
        expected.usage.completion_tokens,
    )
    assert usage.cache_read_input_tokens > 0  # the chat has read it
    body = TALK | sampling | {"system": system}
    undrafted = posted(program, **body, speculate=False)
    assert told(undrafted) == told(posted(program, **body)) == told(joined(streamed(program, **body)))
    assert undrafted["content"][0]["text"] == block.text
    assert undrafted["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_streams_events_come_in_order_and_join_to_the_whole(program, claude):
    events, whole = streamed(program, **TALK), posted(program, **TALK)
    shown = "content_block_start content_block_delta content_block_stop"
    assert kinds(events) == f"message_start ping {shown} message_delta message_stop".split()
    assert told(joined(events)) == told(whole)
    first = events[0]["message"]
    assert first["stop_reason"] is None
    assert first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"] > 0
    assert sum(event["type"] == "content_block_delta" for event in events) > 2
    extra = {"temperature": 0}
    with claude.messages.stream(model="boxed", max_tokens=24, messages=[USER], extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert message.content[0].text == text == whole["content"][0]["text"]
    assert message.stop_reason == whole["stop_reason"]
    assert message.usage.output_tokens == whole["usage"]["output_tokens"]


def test_it_is_said_why_a_message_ended(program):
    body = TALK | {"max_tokens": 12, "ignore_eos": True}
    text = posted(program, **body)["content"][0]["text"]
    for stop in (text[5:8], text[len(text) // 2 :][:4]):
        ended = posted(program, **body, stop_sequences=["\x00", stop])
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
        assert ended["content"][0]["text"] == text[: text.index(stop)]
        assert told(ended) == told(joined(streamed(program, **body, stop_sequences=["\x00", stop])))
    assert text.index(text[6:8]) == 6
    both = posted(program, **body, stop_sequences=[text[6:8], text[5:8]])  # which end with the same character
    assert (both["stop_sequence"], both["content"][0]["text"]) == (text[5:8], text[:5])
    assert posted(program, **body)["stop_reason"] == "max_tokens"


def test_an_answer_goes_on_with_a_last_message_of_the_assistant(client, program):
    talk = [USER, {"role": "assistant", "content": "The sea is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    expected = chat(client, messages=talk, max_tokens=8, temperature=0, extra_body=extra)
    answer = posted(program, messages=talk, max_tokens=8, temperature=0)
    assert answer["content"][0]["text"] == expected.choices[0].message.content
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    for last in ({"role": "assistant", "content": ""}, called):
        refused = program.post("/v1/messages", TALK | {"messages": [USER, last]})
        assert "no text alone to continue" in refused.json()["error"]["message"]


# Tools


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find_dog"}], ids=["any", "tool"])
def test_tools_are_called(choice, program, claude):
    settings = {"messages": [{"role": "user", "content": "Find Rex"}], "tools": [TOOL], "tool_choice": choice}
    answer = posted(program, **settings, max_tokens=80, seed=2)
    [call] = answer["content"]
    assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "find_dog", "tool_use")
    assert set(call["input"]) == {"name", "age"}
    events = streamed(program, **settings, max_tokens=80, seed=2)
    shown = "content_block_start content_block_delta content_block_stop"
    assert kinds(events) == f"message_start ping {shown} message_delta message_stop".split()
    assert joined(events)["content"] == [call | {"id": joined(events)["content"][0]["id"]}]
    with claude.messages.stream(model="boxed", max_tokens=80, extra_body={"seed": 2}, **settings) as stream:
        message = stream.get_final_message()
    assert message.content[0].input == call["input"]


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(program):
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 30, "seed": 2}
    answer = posted(program, **body)
    [call] = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert call["input"]["unparsed"].startswith("{")
    pieces = [
        event["delta"]["partial_json"] for event in streamed(program, **body) if "delta" in event and "index" in event
    ]
    assert "".join(pieces) == call["input"]["unparsed"]


def test_a_schema_of_the_output_is_followed(claude, program):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(
        model="boxed", max_tokens=200, messages=[USER], output_config=form, extra_body={"seed": 1}
    )
    assert set(json.loads(message.content[0].text)) == {"name", "age"}
    earlier = posted(program, messages=[USER], max_tokens=200, seed=1, output_format=form["format"])
    assert earlier["content"][0]["text"] == message.content[0].text


# What agents send


def agents_body() -> dict[str, Any]:
    """A request in the shape in which coding agents send it."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {
        "model": "boxed",
        "max_tokens": 12,
        "temperature": 0,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.77; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "\nBe brief.", "cache_control": {"type": "ephemeral", "scope": "global"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<reminder>a</reminder>"}, {"type": "text", "text": "Hi"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "abc"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "find_dog", "input": {"name": "Rex", "age": 3}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "text", "text": "Go on.", **cached},
                ],
            },
        ],
        "tools": [TOOL | {"eager_input_streaming": True, "type": "custom", **cached}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1"},
        "betas": ["context-management-2025-06-27"],
        "service_tier": "auto",
        "stream": True,
        "diagnostics": {"previous_message_id": "msg_1"},
    }


AGENTS_CHAT = [
    {"role": "system", "content": "You are an agent.\nBe brief."},
    {"role": "user", "content": "<reminder>a</reminder>Hi"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "I look.",
        "tool_calls": [{"id": "toolu_1", "function": {"name": "find_dog", "arguments": '{"name": "Rex", "age": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "toolu_1", "content": "ok"},
    {"role": "user", "content": "Go on."},
]


def test_what_agents_send_is_read(client, program, claude):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    answer = program.post("/v1/messages?beta=true", agents_body(), headers=headers)
    events = [json.loads(event.split("\ndata: ")[1]) for event in answer.text.strip().split("\n\n")]
    same = {"messages": AGENTS_CHAT, "tools": [FUNCTION], "parallel_tool_calls": False}
    expected = chat(client, **same, max_tokens=12, temperature=0)
    message = joined(check(events))
    assert message["content"][0]["text"] == expected.choices[0].message.content
    assert events[0]["message"]["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.usage.prompt_tokens
    other_hash = agents_body()
    other_hash["system"][0]["text"] = other_hash["system"][0]["text"].replace("00000", "fa690")
    again = posted(program, **other_hash | {"stream": False})
    assert again["usage"]["cache_read_input_tokens"] > 0.8 * expected.usage.prompt_tokens  # whatever the hash
    assert again["content"] == message["content"]
    beta = claude.beta.messages.create(
        model="boxed",
        max_tokens=12,
        messages=agents_body()["messages"],
        context_management=agents_body()["context_management"],
        betas=["context-management-2025-06-27"],
    )
    assert beta.content[0].text


# Prompts


def prompts_of(template: str) -> PromptEncoder:
    tokenizer = tiny_tokenizer(template)
    return PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 4096))


def asked(template: str = LLAMA_LIKE, **body: Any) -> ChatRequest:
    request, prompts = (
        MessagesRequest.model_validate({"messages": [USER], "max_tokens": 5} | body),
        prompts_of(template),
    )
    return as_chat(request, prompts.template, prompts.thoughts is not None)


def turns(chat: ChatRequest) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in chat.messages]


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
HOISTS_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LATE = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "one"},
    {"role": "system", "content": [{"type": "text", "text": "two"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "system", "content": "three"},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "four"}]},
    {"role": "assistant", "content": "five"},
    {"role": "system", "content": "six"},
    {"role": "user", "content": "seven"},
]


def test_a_late_system_message_stays_in_its_place_where_the_template_has_one():
    assert turns(asked(system="zero ", messages=LATE)) == [
        ("system", "zero first"),
        ("user", "one"),
        ("system", "two"),
        ("assistant", ""),
        ("tool", "four"),
        ("system", "three"),
        ("assistant", "five"),
        ("system", "six"),
        ("user", "seven"),
    ]


@pytest.mark.parametrize("template", [SYSTEM_FIRST, HOISTS_SYSTEM, DROPS_SYSTEM], ids=["refuses", "hoists", "drops"])
def test_a_late_system_message_is_told_within_its_neighbour_elsewhere(template):
    assert turns(asked(template, messages=LATE)) == [
        ("system", "first"),
        ("user", "one\n\ntwo"),
        ("assistant", ""),
        ("tool", "four\n\nthree"),
        ("assistant", "five"),
        ("user", "six\n\nseven"),
    ]


def test_turns_of_the_user_are_one_and_results_come_first():
    result = {"type": "tool_result", "tool_use_id": "a"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [{"type": "text", "text": "d"}, result, result | {"content": [image]}]},
    ]
    chat = asked(messages=talk)
    assert turns(chat) == [("user", "a\n\nb"), ("assistant", "c"), ("tool", ""), ("tool", ""), ("user", "d")]
    assert chat.messages[-1].images == ["data:image/png;base64,AAAA"]
    assert [part.type for part in chat.messages[-1].content] == ["image_url", "text"], "as the turn has them"
    for content in ("Error: none", "none"):
        error = result | {"content": content, "is_error": True}
        assert turns(asked(messages=[{"role": "user", "content": [error]}])) == [("tool", "Error: none")]


def test_tools_and_how_they_are_chosen_become_those_of_a_chat():
    plain = asked(tools=[TOOL | {"strict": True}], tool_choice={"type": "auto"})
    assert plain.tools is not None
    assert plain.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": FUNCTION["function"] | {"strict": True},
    }
    assert plain.tool_choice is None
    assert asked(tools=[TOOL], tool_choice={"type": "any"}).tool_choice == "required"
    assert asked(tools=[TOOL], tool_choice={"type": "none"}).callable_tools == []
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert asked(tools=[TOOL], tool_choice=alone).parallel_tool_calls is False
    assert asked(stop_sequences=["a"], top_k=3, top_p=0.5).stops == ["a"]


# Thoughts

QWEN = LLAMA_LIKE + "{% if enable_thinking %}{# <think> </think> #}{% endif %}"
DEEPSEEK = LLAMA_LIKE + "{% if thinking %}{# <think> </think> #}{% endif %}"
ALWAYS = LLAMA_LIKE + "{# <think> </think> #}"
GPT_OSS = LLAMA_LIKE + f"{{{{ reasoning_effort }}}}{{# {HarmonyMessages.template_mark} #}}"
BUDGET = QWEN + "{{ thinking_budget }}"


@pytest.mark.parametrize(
    ("template", "thinking", "variables"),
    [
        (QWEN, {"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        (QWEN, {"type": "enabled"}, {"enable_thinking": True}),
        (QWEN, {"type": "adaptive"}, {"enable_thinking": True}),
        (QWEN, {"type": "disabled"}, {"enable_thinking": False}),
        (DEEPSEEK, {"type": "enabled"}, {"thinking": True}),
        (DEEPSEEK, {"type": "disabled"}, {"thinking": False}),
        (BUDGET, {"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True, "thinking_budget": 2000}),
        (ALWAYS, {"type": "enabled"}, {}),
        (GPT_OSS, {"type": "adaptive"}, {}),
        (LLAMA_LIKE, {"type": "enabled", "budget_tokens": 2000}, {}),
        (LLAMA_LIKE, {"type": "disabled"}, {}),
    ],
)
def test_thinking_sets_the_variables_of_the_template(template, thinking, variables):
    assert asked(template, thinking=thinking).chat_template_kwargs == variables


@pytest.mark.parametrize("template", [ALWAYS, GPT_OSS], ids=["marks", "channels"])
def test_thoughts_that_cannot_be_turned_off_are_not_said_to_be(template):
    with pytest.raises(ApiError, match="cannot turn thoughts off") as raised:
        asked(template, thinking={"type": "disabled"})
    assert raised.value.param == "thinking"


def test_the_effort_and_other_variables_go_to_a_template_that_reads_them():
    assert asked(GPT_OSS, output_config={"effort": "low"}).reasoning_effort == "low"
    assert asked(LLAMA_LIKE, output_config={"effort": "low"}).reasoning_effort is None
    chosen = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}}
    assert asked(QWEN, **chosen).chat_template_kwargs == {"enable_thinking": False}


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


async def events_of(*deltas: dict[str, Any], error: Exception | None = None, **more: Any) -> list[dict[str, Any]]:
    """Return the events for a chat's stream of these deltas."""

    async def parts() -> AsyncIterator[dict[str, Any]]:
        for delta in deltas:
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": USAGE}
        if error is not None:
            raise error
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}
        yield {"choices": [], "usage": USAGE, "metrics": {}}

    body = MessagesRequest.model_validate(TALK | more)
    head = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m", "stop_reason": None}
    return check([event async for event in message_events(head, parts(), body)])


def call(index: int, arguments: str, **more: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": more["name"]} if more else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": more["id"]} if more else {})]}


async def test_thoughts_texts_and_calls_follow_each_other():
    events = await events_of(
        {"role": "assistant"},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "m."},
        {"content": "I look."},
        call(0, "", id="a", name="f"),
        call(0, '{"x"'),
        call(0, ": 1}"),
        call(1, "{}", id="b", name="g"),
    )
    message = joined(events)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": "msg_1"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    pieces = [event["delta"].get("partial_json") for event in events if event["type"] == "content_block_delta"]
    assert [piece for piece in pieces if piece] == ['{"x"', ": 1}", "{}"]
    omitted = {"type": "adaptive", "display": "omitted"}
    message = joined(await events_of({"reasoning_content": "Hmm."}, {"content": "I look."}, thinking=omitted))
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": "msg_1"}


async def test_a_text_of_nothing_is_an_empty_block_and_an_error_ends_a_stream():
    assert joined(await events_of({"role": "assistant"}))["content"] == [{"type": "text", "text": ""}]
    events = await events_of({"content": "a"}, error=ApiError(503, "the server is stopping"))
    error = {"type": "overloaded_error", "message": "the server is stopping"}
    assert events[-1] == {"type": "error", "error": error}
    assert "message_stop" not in kinds(events)


# Tokens


def test_tokens_are_counted_as_they_are_read(claude, program):
    body = agents_body()
    counted = {name: body[name] for name in ("messages", "system", "tools", "thinking", "tool_choice")}
    told = claude.messages.count_tokens(model="boxed", **counted)
    assert isinstance(told, MessageTokensCount)
    usage = posted(program, **counted, max_tokens=1)["usage"]
    assert told.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert told.input_tokens > claude.messages.count_tokens(model="boxed", messages=body["messages"]).input_tokens
    long = [{"role": "user", "content": "word " * 2000}]
    assert claude.messages.count_tokens(model="boxed", messages=long).input_tokens > 2000  # than the model can read
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="boxed", messages=long, max_tokens=1)
    answer = program.post("/v1/messages/count_tokens?beta=true", {"messages": [USER], "betas": ["x"]})
    assert list(answer.json()) == ["input_tokens"]


# What is refused


def said(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", None, "max_tokens: Field required"),
        ("messages", [], "at least 1 item"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content: Input should be a text or a list of"),
        ("messages", said(5), "messages.0.content.0: Input should be a block of type"),
        ("messages", said({"type": "text", "text": "a", "x": 1}), "content.0.x is not supp"),
        ("messages", said({"type": "document", "source": {}}), "block of type text, image"),
        ("messages", said({"type": "redacted_thinking"}, role="assistant"), "block of type text, image"),
        ("messages", said({"type": "thinking", "thinking": "a"}), "does not belong in a mess"),
        ("messages", said({"type": "image", "source": {"type": "url"}}), "source.type: Input should be 'base64'"),
        (
            "messages",
            said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "video"}]}),
            "messages.0.content.0.content.0: Input should be a block of text or an image",
        ),
        ("system", [{"type": "image"}], "system.0.type: Input should be 'text'"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools.0.type: Input should be 'custom'"),
        ("tools", [TOOL | {"defer_loading": True}], "tools.0.defer_loading"),
        ("tool_choice", {"type": "any"}, "tool_choice needs tools"),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015"}]}, "keep"),
        ("chat_template_kwargs", {"nonsense": 1}, "the chat template reads no 'nonsense'"),
        ("nonsense", 1, "nonsense is not supported"),
    ],
)
def test_what_is_not_there_is_refused_by_name(field, value, says, program):
    answer = program.post("/v1/messages", TALK | {field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_errors_have_anthropics_types(claude, program):
    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here; 'boxed' is") as missing:
        claude.messages.create(model="claude", messages=[USER], max_tokens=1)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        claude.messages.create(model="boxed", messages=[USER | {"content": "x" * (3 << 20)}], max_tokens=1)
    assert large.value.type == "request_too_large"
    for method, path, status, says in (
        ("GET", "/v1/messages", 405, "Method Not Allowed"),
        ("POST", "/v1/messages/nothing", 404, "'/v1/messages/nothing' is not served: use"),
    ):
        answer = httpx.request(method, f"{program.url}{path}", json={})
        assert answer.status_code == status
        assert says in answer.json()["error"]["message"]
        assert answer.json()["type"] == "error"
    broken = httpx.post(f"{program.url}/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["message"].startswith("the body is not valid JSON")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ArgumentError("no"), 400, "invalid_request_error"),
        (QueueFullError("full"), 429, "rate_limit_error"),
        (Stopped("the server is stopping"), 529, "overloaded_error"),
        (ReDrafterError("broken"), 500, "api_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_engine_refuses_has_anthropics_shape(server, url, monkeypatch, error, status, kind):
    async def deltas(*_: Any) -> AsyncIterator[Any]:
        raise error
        yield

    monkeypatch.setattr(server.engine, "deltas", deltas)
    for stream in (False, True):
        answer = httpx.post(f"{url}/v1/messages", json=TALK | {"stream": stream})
        assert answer.status_code == status
        assert answer.json() == {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert ("retry-after" in answer.headers) == (status in (429, 529))
