"""Calls and thoughts in what a model writes, and the schemas of calls that it must write."""

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from llguidance.hf import from_tokenizer

from helpers.reading import read, split
from redrafter import boxed_pair
from redrafter.chat.thoughts import PARSERS as THOUGHTS
from redrafter.errors import ArgumentError
from redrafter.grammar.child import CompiledGrammar
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.formats import ChatChoice
from redrafter.serve.answers.lark import LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.request_grammar import forced_tools

THINK = THOUGHTS["qwen3"]
TALK = [{"role": "user", "content": "Hello"}]
F, G = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"<tool_call>"}]}}', '{"name": "g", "parameters": {}}'
FIRST = ("f", '{"a": [1, {"b": "}\\"<tool_call>"}]}')
# What is written: its text, its thoughts, its calls, and whether it ends within a call.
WRITTEN: dict[str, tuple[str, str, list[tuple[str, str]], bool]] = {
    F: ("", "", [FIRST], False),
    f"  {F} \n": ("", "", [FIRST], False),
    f"[{F}, {G}]": ("", "", [FIRST, ("g", "{}")], False),
    f"{F}; {G}": ("", "", [FIRST, ("g", "{}")], False),
    f"<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>": ("", "", [FIRST, ("g", "{}")], False),
    f" I look. \n<tool_call>{F}</tool_call> Done.": (" I look. Done.", "", [FIRST], False),
    f"<tool_call>[{F},{G}]</tool_call>": ("", "", [FIRST, ("g", "{}")], False),
    f"<tool_call>{F}": ("", "", [FIRST], False),
    '{"arguments": {"a": 1}, "name": "f"}': ("", "", [("f", '{"a": 1}')], False),
    '{"type": "function", "name": "f"}': ("", "", [("f", "{}")], False),
    '{"name": "f", "arguments": "x"}': ("", "", [("f", '"x"')], False),
    '{"name": "f", "arguments": {"a": "\\ud800 é🙂"}}': ("", "", [("f", '{"a": "\\ud800 é🙂"}')], False),
    '{"name": "f", "arguments": {"a": ': ("", "", [("f", '{"a": ')], True),
    '{"name": "f", "arguments": {"a": 1}': ("", "", [("f", '{"a": 1}')], True),
    '{"name": "f", "argum': ('{"name": "f", "argum', "", [], False),
    '{"name": "Anna", "age": 3} ': ('{"name": "Anna", "age": 3} ', "", [], False),
    '{"age": 3}': ('{"age": 3}', "", [], False),
    "[1, 2] <tool": ("[1, 2] <tool", "", [], False),
    '{"name": ["f"], "arguments": {}}': ('{"name": ["f"], "arguments": {}}', "", [], False),
    '<tool_call>{"name": "h"}</tool_call> x': ('<tool_call>{"name": "h"}</tool_call> x', "", [], False),
    f"a <tool_call>no<tool_call>{G}</tool_call>": ("a <tool_call>no", "", [("g", "{}")], False),
    f"It is {F}": (f"It is {F}", "", [], False),
    " \n ": (" \n ", "", [], False),
    "": ("", "", [], False),
    "a  \n b <too": ("a  \n b <too", "", [], False),
    f"<think>\nhm, {F} <tool_call>\n</think>\n\nyes ": ("yes ", f"hm, {F} <tool_call>", [], False),
    f"<think>hm</think>{F}": ("", "hm", [FIRST], False),
    "\n<think>hm </thi": ("", "hm </thi", [], False),
    "<think></think> a": ("a", "", [], False),
    "a <think>hm</think>": ("a <think>hm</think>", "", [], False),
    "<thin": ("<thin", "", [], False),
}


def make_reader(**options: Any) -> ChatReader:
    return ChatReader(**({"tools": dict.fromkeys("fg"), "thoughts": THINK} | options))


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_found_does_not_depend_on_the_pieces(text):
    *expected, cut = WRITTEN[text]
    rng = random.Random(5)
    for trial in range(40):
        reader = make_reader()
        assert read(reader, split(text, trial, rng)) == tuple(expected)
        assert reader.cut == cut


def test_random_pieces_of_marks_are_read_alike_however_they_come():
    rng = random.Random(6)
    parts = [F, G, *' \na{}"[,\\', "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"f"']
    states = ["open", "over", "possible"]
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 9)))
        options = {"parallel_calls": rng.random() < 0.7, "thinking": rng.choice(states)}
        options["thoughts"] = THINK if rng.random() < 0.7 else None
        size = rng.randrange(1, 6)
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        whole = read(make_reader(**options), [text])
        assert read(make_reader(**options), pieces) == whole
        assert read(make_reader(**options), [*pieces, ""]) == whole


def test_what_is_certain_comes_at_once():
    def arguments(text: str) -> list:
        return [({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}, [])]

    reader = make_reader(thoughts=None)
    assert reader.push("I look") == [({"content": "I look"}, [(0, 6)])]
    assert reader.push(' <tool_call>{"name": "f", "argu') == []
    (begun, _), *first = reader.push('ments": {"a')
    assert begun["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert first == arguments('{"a')
    assert reader.push('": 1') == arguments('": 1')
    assert reader.push("}}</tool_call>", last=True) == arguments("}")
    no_tool = '{"name": "Anna",'
    assert make_reader(thoughts=None).push(no_tool + " ") == [({"content": no_tool}, [(0, 16)])]
    assert make_reader(thinking="open").push("hm") == [({"reasoning_content": "hm"}, [])]


@pytest.mark.parametrize(
    "text", [f"[{F}, {G}]", f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call> more", f"{F} more"]
)
def test_one_call_where_no_more_may_be_made(text):
    assert read(make_reader(parallel_calls=False), list(text)) == ("", "", [FIRST])


@pytest.mark.parametrize(
    ("begin", "again"), [("", " "), ('{"x": "', "a"), ("", "<tool_call>"), ('{"name": "f", "arguments": ', "[")]
)
def test_a_long_text_is_read_in_linear_time(begin, again):
    """A reader that read any text twice would take minutes."""
    reader, text = make_reader(), begin + again * (200_000 // len(again))
    for begin in range(0, len(text), 4):
        reader.push(text[begin : begin + 4])
    reader.push("", last=True)


ITEM = {
    "type": "object",
    "properties": {"price": {"type": "integer"}},
    "required": ["price"],
    "additionalProperties": False,
}
NESTED = {
    "$id": "https://example.org/order",
    "$defs": {"Item": ITEM, "$ref": {"const": "#/$defs/Item"}},
    "definitions": {"Note": {"enum": ["#/$defs/Item"]}},
    "type": "object",
    "properties": {
        "item": {"$ref": "#/$defs/Item"},
        "$ref": {"$ref": "#/$defs/$ref"},
        "note": {"$ref": "#/definitions/Note"},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["item"],
    "additionalProperties": False,
}


def grammar_for(*parameters: Any, choice: Any = "required") -> GrammarSource:
    tools = [
        {"type": "function", "function": {"name": f"tool-{n}", "parameters": schema_of_one}}
        for n, schema_of_one in enumerate(parameters)
    ]
    request = ChatRequest.model_validate({"messages": TALK, "tools": tools, "tool_choice": choice})
    lark = LarkWriter({})
    return lark.source(ChatReader.write_forced(lark, forced_tools(request)))


@pytest.fixture(scope="module")
def allows() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(boxed_pair())

    vocabulary = from_tokenizer(tokenizer)

    def allows(grammar: GrammarSource, text: str) -> bool:
        matcher = CompiledGrammar(grammar, vocabulary).start()
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())

    return allows


def test_references_of_a_tools_schema_lead_to_what_they_led_to(allows):
    schema = grammar_for(ITEM, NESTED)
    call = {"name": "tool-1", "arguments": {"item": {"price": 3}}}
    deep = {"item": {"price": 3}, "$ref": "#/$defs/Item", "note": "#/$defs/Item", "more": [{"item": {"price": 4}}]}
    assert allows(schema, json.dumps(call))
    assert allows(schema, json.dumps(call | {"arguments": deep}))
    assert allows(schema, json.dumps({"name": "tool-0", "arguments": {"price": 1}}))
    assert not allows(schema, json.dumps(call | {"arguments": {"item": {"price": "3"}}}))
    assert not allows(schema, json.dumps(call | {"arguments": deep | {"more": [{}]}}))
    assert not allows(schema, json.dumps(call | {"arguments": deep | {"$ref": "#/$defs/1/$defs/Item"}}))
    assert not allows(schema, json.dumps(call | {"name": "tool-0"}))
    named = grammar_for(ITEM, NESTED, choice={"type": "function", "function": {"name": "tool-1"}})
    assert allows(named, json.dumps(call))
    assert not allows(named, json.dumps({"name": "tool-0", "arguments": {"price": 1}}))


@pytest.mark.parametrize(
    "text", ['{"name": "tool-0", "arguments": {"price": 1}}', '{"name":"tool-0","arguments":{"price":1}}']
)
def test_a_call_that_must_be_written_holds_no_idle_spaces(allows, text):
    schema = grammar_for(ITEM, None)
    assert allows(schema, text)
    for index in (0, 1, text.index(":") + 1, len(text) - 1):
        assert not allows(schema, f"{text[:index]}\n{text[index:]}")
        assert not allows(schema, f"{text[:index]}  {text[index:]}")


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "null"}, {"type": "object", "properties": {}, "required": None}, {"properties": None}],
    ids=str,
)
def test_a_tool_that_describes_no_arguments_is_called_with_none(allows, parameters):
    schema = grammar_for(parameters)
    assert allows(schema, '{"name": "tool-0", "arguments": {}}')
    for arguments in ("null", '{"any": [1, 2]}'):
        assert not allows(schema, f'{{"name": "tool-0", "arguments": {arguments}}}')


@pytest.mark.parametrize("kind", [{}, {"type": ["object", "null"]}], ids=str)
def test_arguments_are_an_object_whatever_else_the_schema_allows(allows, kind):
    schema = grammar_for(kind | {"properties": {"a": {"type": "integer"}}})
    assert allows(schema, '{"name": "tool-0", "arguments": {"a": 1}}')
    assert not allows(schema, '{"name": "tool-0", "arguments": null}')


def test_a_tool_of_any_object_takes_any_arguments(allows):
    for schema in ({"type": "object"}, {"properties": {}, "additionalProperties": {"type": "array"}}):
        assert allows(grammar_for(schema), '{"name": "tool-0", "arguments": {"any": [1, 2]}}')


def test_null_keywords_of_a_schema_count_as_absent_and_null_values_stay():
    inner = {"type": ["string", "null"], "description": None, "enum": ["a", None], "default": None, "required": None}
    schema = {"properties": {"type": inner, "const": {"const": None}}, "$defs": {"a": {"items": None}}, "anyOf": None}
    kept = {"type": ["string", "null"], "enum": ["a", None], "default": None}
    [tool] = ChatRequest.model_validate(
        {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    ).tools
    assert tool.function.parameters == {"properties": {"type": kept, "const": {"const": None}}, "$defs": {"a": {}}}


def test_a_schema_that_cannot_be_compiled_is_refused_without_the_text_of_the_grammar():
    vocabulary = from_tokenizer(AutoTokenizer.from_pretrained(boxed_pair()))
    with pytest.raises(ArgumentError) as refused:
        CompiledGrammar(grammar_for({"type": "object", "required": 3}), vocabulary)
    assert str(refused.value) == "grammar: failed to compile JSON schema: Expected array for 'required', got 3"


def write_answer(tokenizer: Any, ids: list[int], sizes: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message of a whole answer, and what the deltas of a stream in steps of these sizes join to."""
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    body = {"messages": TALK, "tools": tools, "stream": True, "stream_options": {"include_drafts": True}}
    request = ChatRequest.model_validate(body)
    choice, unstreamed = (ChatChoice([5], request, tokenizer, thoughts=THINK) for _ in range(2))
    streamed: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish": None}
    while choice.finish is None:
        size, *sizes = sizes or [len(ids)]
        gained = SequenceDelta(ids[:size], accepted=min(1, size), finish="stop" if size >= len(ids) else None)
        ids = ids[size:]
        unstreamed.append([gained])
        for part in choice.format_chunks(0, *choice.append([gained])):
            delta = part["delta"]
            assert "".join(run["text"] for run in part["drafts"]) == delta.get("content", "")
            for name in ("content", "reasoning_content"):
                streamed[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(streamed["tool_calls"]):
                    assert call["function"]["arguments"] == ""
                    streamed["tool_calls"].append([call["function"]["name"], ""])
                streamed["tool_calls"][-1][1] += call["function"]["arguments"]
            streamed["finish"] = part["finish_reason"] or streamed["finish"]
    entry = unstreamed.format_choice(0)
    message = entry["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    expected = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
    return expected | {"tool_calls": calls, "finish": entry["finish_reason"]}, streamed


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(boxed_pair())


@pytest.mark.parametrize("text", WRITTEN)
def test_a_stream_joins_to_the_message_of_a_whole_answer(tokenizer, text):
    content, thoughts, calls, cut = WRITTEN[text]
    rng = random.Random(7)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for _ in range(12):
        sizes = [rng.randrange(1, 5) for _ in range(rng.randrange(len(ids) + 1))]
        message, streamed = write_answer(tokenizer, ids, sizes)
        assert message == streamed
        assert (message["content"], message["reasoning_content"]) == (content, thoughts)
        assert message["tool_calls"] == [list(call) for call in calls]
        assert message["finish"] == ("tool_calls" if calls and not cut else "stop")
