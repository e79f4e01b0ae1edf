"""Calls and thoughts in what a model writes, and the schemas of calls that it must write."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from llguidance.hf import from_tokenizer

from redrafter import boxed_pair
from redrafter.chat.thoughts import PARSERS as THOUGHTS
from redrafter.errors import ArgumentError
from redrafter.grammar.child import CompiledGrammar
from redrafter.grammar.source import GrammarSource
from redrafter.serve.answers.lark import LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.request_grammar import forced_tools

THINK = THOUGHTS["qwen3"]
TALK = [{"role": "user", "content": "Hello"}]
F, G = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"<tool_call>"}]}}', '{"name": "g", "parameters": {}}'


def make_reader(**options: Any) -> ChatReader:
    return ChatReader(**({"tools": dict.fromkeys("fg"), "thoughts": THINK} | options))


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
