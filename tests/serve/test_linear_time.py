"""Texts of a model, or of whoever makes it write them, that would take quadratic time to read."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

from helpers.reading import read
from redrafter.chat.thoughts import MARKS
from redrafter.errors import ArgumentError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.arguments import MAX_LITERAL_TOKENS, as_json, python_as_json
from redrafter.serve.answers.call_forms import FORMS, PARSERS
from redrafter.serve.answers.choice import ChoiceContext
from redrafter.serve.answers.formats import ChatChoice
from redrafter.serve.answers.lark import CalledTool, LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.routes.translated import PartWriter

LARGE = 1 << 18  # characters, which are compared with a quarter of them
TOOLS = {"f": {"properties": {"s": {"type": "string"}, "o": {"type": ["object", "array", "string"]}}}}
# A call whose argument is `%s`, by the first name of its form.
CALLS = {
    "openai": "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]f[ARGS]%s",
    "glm45": "<tool_call>f<arg_key>o</arg_key><arg_value>%s</arg_value></tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=o>%s</parameter></function></tool_call>",
    "pythonic": "[f(o=%s)]",
    "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "llama3_json": '{"name": "f", "arguments": %s}',
}
# What is repeated within the argument, and what stands before and after it.
ARGUMENTS = {
    "f-string": ("f'", "{x}", "'"),
    "open brackets": ("[", '{"a": [', ""),
    "closing brackets": ("{", "]}", "}"),
    "quotes": ("[", "'\"", "]"),
    "escapes": ('{"a": "', '\\"', '"}'),
    "texts": ("[", "'a' ", "]"),
    "numbers": ("[", "1,", "1]"),
    "sums": ("", "1+", "1"),
    "digits": ("", "1", ""),
    "spaces": ('{"a"', " \n", ": 1}"),
    "half a mark": ('{"a": "', "</parameter</arg_value", '"}'),
}


def texts(form: type[ChatReader]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    call = CALLS[form.parsers[0]]
    head, tail = call.split("%s")
    for name, (before, unit, after) in ARGUMENTS.items():
        yield name, (head + before, unit, after + tail)
    yield "many calls", ("", call % "{}", "")
    yield "many openings", ("", head + '{"a": ', "")
    yield "all marks", ("", "".join(form.marks) or "{", "")
    yield "half marks", ("", "".join(mark[:-1] for mark in form.marks) or '{"', "")


def assert_linear(work: Callable[[int], Callable[[], object]], name: str, large_size: int = LARGE) -> None:
    """Assert that work of four times the size takes less than eight times as long, in one of three tries."""

    def seconds(size: int) -> float:
        run = work(size)
        begin = time.process_time()
        run()
        return time.process_time() - begin

    gc.disable()  # its pauses grow with all that the test run holds
    try:
        for _ in range(3):
            small, large = seconds(large_size // 4), seconds(large_size)
            if large < 8 * small + 0.02:
                return
    finally:
        gc.enable()
    pytest.fail(f"{name}: {small:.3f} s for {large_size >> 12} KiB, {large:.3f} s for {large_size >> 10} KiB")


def repeated(size: int, before: str, unit: str, after: str) -> str:
    return before + unit * (size // len(unit)) + after


@pytest.mark.parametrize("size", [None, 64], ids=["at once", "in pieces"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.parsers[0])
def test_a_hostile_call_is_read_in_linear_time(form, size):
    for name, parts in texts(form):

        def work(length: int, parts: tuple[str, str, str] = parts) -> Callable[[], object]:
            text = repeated(length, *parts)
            step = size or len(text)
            pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
            reader = form(TOOLS)
            return lambda: [reader.push(piece, number == len(pieces)) for number, piece in enumerate(pieces, 1)]

        assert_linear(work, name)


def test_a_long_text_in_small_pieces_is_not_copied_for_each():
    """A text that is copied for each piece takes the ratio of the squares."""
    assert_linear(lambda size: lambda: read(ChatReader(TOOLS), ["x " * 4] * (size // 8)), "pieces of a text")


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.end)
def test_hostile_thoughts_are_read_in_linear_time(marks):
    for name, parts in (
        ("openings", (marks.begin, marks.begin, "")),
        ("half ends", (marks.begin, marks.end[:-1], marks.end)),
        ("spaces", (marks.begin, " \n", "x")),
    ):

        def work(size: int, parts: tuple[str, str, str] = parts) -> Callable[[], object]:
            text = repeated(size, *parts)
            reader = ChatReader(TOOLS, thoughts=marks)
            return lambda: [reader.push(text[begin : begin + 64]) for begin in range(0, len(text), 64)]

        assert_linear(work, name)


def test_values_are_read_in_linear_time():
    for name, parts in ARGUMENTS.items():
        for read_value in (python_as_json, lambda text: as_json(text, {"object"})):

            def work(size: int, parts: Any = parts, read_value: Any = read_value) -> Callable[[], object]:
                text = repeated(size, *parts)
                return lambda: read_value(text)

            assert_linear(work, name)


def test_what_is_no_literal_of_python_becomes_a_text():
    for source in ("f'{x}'", "rf'a'", "b'a'", "'a' f'{x}'", "[1, f'{x}']", "1 if 2 else 3", "f(1)", "a.b", "x", "..."):
        assert json.loads(python_as_json(source)) == source
    for source, value in {
        "'a\"b'": 'a"b',
        "r'\\d'": "\\d",
        "'''a\nb'''": "a\nb",
        "(1, -2.5e3, 0x1F)": [1, -2500.0, 31],
        "{'a': [True, None, False], 2: 'f' 'g'}": {"a": [True, None, False], "2": "fg"},
    }.items():
        assert json.loads(python_as_json(source)) == value
    long = repr("it's" * LARGE)
    assert json.loads(python_as_json(long)) == "it's" * LARGE
    many = f"({'1,' * MAX_LITERAL_TOKENS})"
    assert json.loads(python_as_json(many)) == many


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.parsers[0])
def test_a_grammar_of_hostile_tools_is_written_in_bounded_time(form):
    """Sizes are bounded, so that the most that is done is too; what is refused is refused as soon."""
    properties = {f"a{number}": {"type": ["string", "integer"]} for number in range(4000)}
    deep: dict[str, Any] = {}
    for _ in range(120):
        deep = {"anyOf": [deep, {"$ref": "#/$defs/a"}]}
    for parameters in (
        {"properties": properties, "required": [*properties]},
        {"properties": {"s": {"type": "string", "pattern": "(a|" * 20_000 + ")" * 20_000}}},
        {"properties": {"s": {"enum": ["<" * 5] * 12_000}}},
        {"properties": {f"a{number}": {"$ref": "#/$defs/a"} for number in range(60)}, "$defs": {"a": deep}},
    ):
        before = time.process_time()
        lark = LarkWriter({f"<|special_{number}|>": number for number in range(256)}, form.parsers[0])
        with suppress(ArgumentError):
            lark.source(form.write_forced(lark, [CalledTool("f", {"type": "object"} | parameters)]))
        assert time.process_time() - before < 2


def test_an_answer_of_many_arguments_is_joined_in_linear_time(pair):
    request = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        }
    )

    def work(size: int) -> Callable[[], object]:
        begun = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}
        piece = {"index": 0, "function": {"arguments": "x" * 16}}
        deltas = [({"tool_calls": [call]}, []) for call in [begun, *[piece] * (size // 16)]]

        class Reader(ChatReader):
            def push(self, text: str, last: bool = False) -> Any:
                return deltas

        choice = ChatChoice([1], request, ChoiceContext(pair[1]), form=Reader)

        def run() -> None:
            message = choice.format_choice(0)["message"]
            assert message["tool_calls"][0]["function"]["arguments"] == "x" * size

        return run

    assert_linear(work, "arguments of an answer", 4 * LARGE)


def test_tokens_of_many_thoughts_are_counted_in_linear_time(pair):
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    form = PARSERS["openai"]
    tokens = pair[1]("<|channel|>analysis<|message|>a<|end|>", add_special_tokens=False).input_ids

    def work(size: int) -> Callable[[], object]:
        choice = ChatChoice([1], request, ChoiceContext(pair[1]), form=form, thoughts=form.own_thoughts)

        def run() -> None:
            for _ in range(size // (32 * len(tokens))):
                text, lines = choice.append([SequenceDelta(tokens)])
                choice.format_chunks(0, text, lines)
                assert choice.reasoning_tokens > 0

        return run

    assert_linear(work, "thoughts", 4 * LARGE)


def test_a_part_of_another_protocol_is_joined_in_linear_time():
    class Writer(PartWriter):
        def _begin(self, kind: Any, call: Any) -> Iterator[Any]:
            yield from ()

        def _tell(self, piece: str) -> Iterator[Any]:
            yield from ()

        def _end(self, cut: bool) -> Iterator[Any]:
            self.done.append({"text": self._written})
            yield from ()

    def work(size: int) -> Callable[[], object]:
        writer = Writer()
        chunk = {"choices": [{"finish_reason": None, "delta": {"content": "x" * 8}}]}

        def run() -> None:
            for _ in range(size // 8):
                list(writer.translate(chunk))
            list(writer.close())
            assert writer.done == [{"text": "x" * (size // 8 * 8)}]

        return run

    assert_linear(work, "parts", 4 * LARGE)
