"""Thoughts before answers that follow a grammar, and how many tokens they have."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from helpers.serving import SCHEMA, listening, text_of
from redrafter import boxed_pair
from redrafter.chat.thoughts import PARSERS as THOUGHTS
from redrafter.chat.thoughts import ThoughtMarks
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.call_forms import PARSERS
from redrafter.serve.answers.choice import ChoiceContext, count_usage
from redrafter.serve.answers.formats import ChatChoice
from redrafter.serve.answers.lark import LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.request_grammar import forced_tools
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import Server

FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CALLS = {"tools": [TOOL], "tool_choice": "required"}
# The pair in the box ends a thought with such marks by itself.
MARKS = ThoughtMarks("<think>", ".")
ASKED = {"role": "user", "content": "Tell me about a dog named Rex."}
BEGUN: dict[str, Any] = {
    "messages": [ASKED, {"role": "assistant", "content": "<think>\n"}],
    "extra_body": {"continue_final_message": True},
}


@pytest.fixture(scope="module")
def thinking(server) -> Iterator[Server]:
    """A server of the pair in the box as of a model that thinks."""
    on_delta = server.engine.on_delta
    made = Server(server.engine, server.tokenizer)
    made.prompts.__dict__["thoughts"] = MARKS
    yield made
    server.engine.on_delta = on_delta


@pytest.fixture(scope="module")
def client(thinking) -> "Iterator[openai.OpenAI]":
    with listening(server_app(thinking)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: "openai.OpenAI", **body: Any) -> Any:
    settings: dict[str, Any] = {"model": "boxed", "max_tokens": 200, "temperature": 0}
    return client.chat.completions.create(**settings | BEGUN | body)


def guided(thinking: Server, pair: tuple, source: GrammarSource, more: dict[str, Any], **how: Any) -> str:
    """Return the text that undrafted decoding writes of a chat whose thought has begun, by a grammar of all of it."""
    request = ChatRequest.model_validate({"messages": BEGUN["messages"], "continue_final_message": True} | more)
    ids, state, _ = thinking.prompts.encode_chat(request)
    assert state == "open"
    how = {"do_sample": True, "top_k": 0} | how
    prompt, grammar = torch.tensor([ids]), Grammar(source, pair[1])
    written = pair[0].generate(prompt, max_new_tokens=200, speculate=False, grammar=grammar, **how)
    return text_of(pair, written[0, len(ids) :].tolist())


def test_a_guided_answer_follows_the_thought_that_is_written_without_a_grammar(client, thinking, pair):
    free = ask(client)
    thought = free.choices[0].message.reasoning_content
    assert len(thought) > 20
    answer = ask(client, response_format=FORM)
    message = answer.choices[0].message
    assert message.reasoning_content == thought
    assert set(json.loads(message.content)) == {"name", "age"}
    assert answer.choices[0].finish_reason == "stop"
    lark = LarkWriter({})
    around = lark.text(lark.after_thought(MARKS, "open", "@answer"))
    source = GrammarSource.json_schema(SCHEMA)._replace(around=around)
    written = guided(thinking, pair, source, {}, do_sample=False)
    assert [part.strip() for part in written.split(".", 1)] == [thought, message.content.strip()]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_forced_call_follows_the_thought_and_is_what_plain_decoding_writes(client, thinking, pair, temperature):
    how: dict[str, Any] = {"temperature": temperature, "seed": 5} if temperature else {"do_sample": False}
    answer = ask(client, **CALLS, temperature=temperature, seed=5)
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].message.reasoning_content
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    lark = LarkWriter({})
    tools = forced_tools(ChatRequest.model_validate({"messages": [ASKED], **CALLS}))
    source = lark.source(lark.after_thought(MARKS, "open", ChatReader.write_forced(lark, tools)))
    written = guided(thinking, pair, source, CALLS, **how)
    thought, rest = written.split(".", 1)
    assert thought.strip() == answer.choices[0].message.reasoning_content
    assert json.loads(rest)["name"] == "find"
    assert call.function.arguments in rest


def test_reasoning_tokens_are_counted_whole_and_streamed(client):
    for more in (CALLS, {"n": 2, "temperature": 0.8, "seed": 3}):
        whole = ask(client, **more)
        thoughts = whole.usage.completion_tokens_details.reasoning_tokens
        assert 5 < thoughts < whole.usage.completion_tokens + more.get("n", 0)  # sampled ones may be cut
        options = {"include_usage": True, "continuous_usage_stats": True}
        *parts, last = ask(client, **more, stream=True, stream_options=options)
        assert last.usage.completion_tokens_details.reasoning_tokens == thoughts
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        counts: dict[int, list[int]] = {}
        for part in parts:
            told = part.usage.completion_tokens_details.reasoning_tokens
            assert told <= part.usage.completion_tokens
            counts.setdefault(part.choices[0].index, []).append(told)
        assert all(told == sorted(told) for told in counts.values())
        assert sum(told[-1] for told in counts.values()) == thoughts


BUDGETED = ThoughtMarks("<think>", "<|system|>")  # whose end is a token of its own, which the model does not write


@pytest.fixture(scope="module")
def budgeted(server) -> "Iterator[tuple[openai.OpenAI, Server]]":
    """A client of a server as of a model whose thoughts end with a special token, and the server."""
    on_delta = server.engine.on_delta
    made = Server(server.engine, server.tokenizer)
    made.prompts.__dict__["thoughts"] = BUDGETED
    with listening(server_app(made)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), made
    server.engine.on_delta = on_delta


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.8, "seed": 8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 7])
def test_a_thought_ends_after_its_budget_with_and_without_drafts_and_in_a_stream(budgeted, pair, how, budget):
    client, served = budgeted
    ids, state, _ = served.prompts.encode_chat(
        ChatRequest.model_validate({"messages": BEGUN["messages"], "continue_final_message": True})
    )
    assert state == "open"
    sampling = {"do_sample": True, "top_k": 0, **how} if how["temperature"] else {"do_sample": False}
    written = list(ids)
    for count, after in ((budget, [served.tokenizer.convert_tokens_to_ids(BUDGETED.end)]), (30 - budget - 1, [])):
        if count:
            prompt = torch.tensor([written])
            written = pair[0].generate(prompt, max_new_tokens=count, speculate=False, **sampling)[0].tolist()
        written += after
    thought, content = pair[1].decode(written[len(ids) :]).split(BUDGETED.end, 1)
    for speculate in (True, False):
        extra = BEGUN["extra_body"] | {"thinking_token_budget": budget, "speculate": speculate}
        answer = ask(client, max_tokens=30, extra_body=extra, **how)
        message = answer.choices[0].message
        assert (getattr(message, "reasoning_content", "") or "").strip() == thought.strip()
        assert message.content.strip() == content.replace("<|eos|>", "").strip()
        assert answer.usage.completion_tokens_details.reasoning_tokens == budget + 1
        parts = [part.choices[0].delta for part in ask(client, max_tokens=30, extra_body=extra, stream=True, **how)]
        assert "".join(part.content or "" for part in parts) == message.content
        assert "".join(getattr(part, "reasoning_content", "") or "" for part in parts).strip() == thought.strip()


def test_anthropics_budget_is_that_of_vllm(budgeted):
    client, _ = budgeted
    url = str(client.base_url).removesuffix("/v1/")
    talk = [ASKED, {"role": "assistant", "content": "<think>\n"}]
    body = {"messages": talk, "max_tokens": 30, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 7}
    message = httpx.post(f"{url}/v1/messages", json=body | {"thinking": thinking}, timeout=300).json()
    chat = ask(client, max_tokens=30, extra_body=BEGUN["extra_body"] | {"thinking_token_budget": 7})
    first, second = message["content"]
    assert (first["type"], second["type"]) == ("thinking", "text")
    assert first["thinking"] == chat.choices[0].message.reasoning_content
    assert second["text"] == chat.choices[0].message.content
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 8


def test_a_budget_of_thoughts_that_no_token_ends_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="no thoughts that end with a token of their own"):
        ask(client, extra_body=BEGUN["extra_body"] | {"thinking_token_budget": 5})


def test_a_thought_that_is_cut_is_all_there_is(client):
    for more in ({}, CALLS):
        thought = ask(client, **more).choices[0].message.reasoning_content
        for cut in ({"max_tokens": 5}, {"stop": [thought[10:16]]}):
            answer = ask(client, **more, **cut)
            message = answer.choices[0].message
            assert message.content is None
            assert not message.tool_calls
            assert thought.startswith(message.reasoning_content)
            assert answer.choices[0].finish_reason == ("length" if "max_tokens" in cut else "stop")
            assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
            parts = [*ask(client, **more, **cut, stream=True)]
            told = [getattr(part.choices[0].delta, "reasoning_content", None) or "" for part in parts]
            assert "".join(told) == message.reasoning_content
            assert parts[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_a_stop_string_after_the_thought_ends_the_answer(client):
    answer = ask(client, response_format=FORM, stop=['"age"'])
    assert answer.choices[0].message.reasoning_content == ask(client).choices[0].message.reasoning_content
    assert answer.choices[0].message.content.startswith('{"name"')
    assert '"age"' not in answer.choices[0].message.content


def test_completions_have_no_such_details(client):
    answer = client.completions.create(model="boxed", prompt="a", max_tokens=2)
    assert answer.usage.completion_tokens_details is None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(boxed_pair())
    made.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>"]}
    )
    made.add_special_tokens(
        {"additional_special_tokens": ["<|start|>", "<|hidden|>"]}, replace_extra_special_tokens=False
    )
    return made


@pytest.mark.parametrize(
    ("form", "thought", "rest"),
    [
        (ChatReader, " \n<think>\nhm é🙂<|hidden|> so</think>", "\n\nyes, <think>no</think>"),
        (
            PARSERS["openai"],
            "<|channel|>analysis<|message|>Hm é.<|end|>",
            "<|start|>assistant<|channel|>final<|message|>Yes",
        ),
    ],
)
def test_counts_are_of_the_tokens_up_to_the_end_of_the_thought_however_they_come(tokenizer, form, thought, rest):
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = form.own_thoughts or THOUGHTS["qwen3"]
    context = ChoiceContext(tokenizer)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (thought, rest)]
    all_ids, rng = [*ids[0], *ids[1]], random.Random(4)
    for trial in range(30):
        choice = ChatChoice([5], ChatRequest(messages=[ASKED]), context, form=form, special=special, thoughts=marks)
        at = 0
        while choice.finish is None:
            size = rng.randrange(1, 7) if trial else len(all_ids)
            finish = "stop" if at + size >= len(all_ids) else None
            choice.append([SequenceDelta(all_ids[at : at + size], accepted=rng.randrange(size), finish=finish)])
            at += size
            if trial % 2:
                choice.format_chunks(0, choice.text[len(choice._reader.text) :], [])  # noqa: SLF001
        if trial % 2 == 0:
            choice.format_choice(0)
        details = count_usage([choice], [choice])["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(ids[0])}
