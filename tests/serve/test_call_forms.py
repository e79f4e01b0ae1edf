"""Calls in the forms that models write beside JSON objects, and how a form is chosen."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers import AutoTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from helpers.reading import read, split
from helpers.serving import listening
from redrafter import boxed_pair
from redrafter.chat.thoughts import PARSERS as THOUGHTS
from redrafter.chat.thoughts import ThoughtMarks
from redrafter.cli import main
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.arguments import as_json, parameter_types
from redrafter.serve.answers.call_forms import PARSERS, call_form
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import Server

PROPERTIES = {
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array"},
    "s": {"type": "string"},
    "e": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "k": {"enum": [1, 2]},
    "r": {"$ref": "#/$defs/R"},
}
SCHEMA = {"properties": PROPERTIES, "$defs": {"R": {"type": ["array", "null"], "anyOf": [{"$ref": "#/$defs/R"}]}}}
TOOLS = {"f": SCHEMA, "g": None}
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ANALYSIS = "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"i": 1}<|call|>'
F, FG = [("f", '{"i": 1}')], [("f", '{"i": 1}'), ("g", "{}")]
# What is written, by the name of a parser: its text, its thoughts, its calls, and whether it ends within a call.
WRITTEN: dict[str, dict[str, tuple[str, str, list[tuple[str, str]], bool]]] = {
    "qwen3_coder": {
        "I look.\n<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=g>\n</function>\n</tool_call> Done": ("I look. Done", "", FG, False),
        '<function=f><parameter=s>\nhe "is"\n\n5 \n</parameter>\n</function>': (
            "",
            "",
            [("f", '{"s": "he \\"is\\"\\n\\n5 "}')],
            False,
        ),
        "<think>hm <function=f></think><function=g></function>x": ("x", "hm <function=f>", [("g", "{}")], False),
        "<tool_call><function=h></function></tool_call>": (
            "<tool_call><function=h></function></tool_call>",
            "",
            [],
            False,
        ),
        "<tool_call><function=f> hello": ("<tool_call><function=f> hello", "", [], False),
        "<tool_call><function=f><parameter=s>a</par": ("", "", [("f", '{"s": "a')], True),
        "<function=f><parameter=i>1</parameter></fun": ("", "", [("f", '{"i": 1')], True),
        "<function=f><parameter=i>1": ("", "", [("f", "")], True),
        "<function=f><parameter=i>1</parameter> text": ("text", "", F, False),
        "a <functio": ("a <functio", "", [], False),
    },
    "glm45": {
        "<think>hm</think>\nSure.\n<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g</tool_call> Done": ("Sure. Done", "hm", FG, False),
        "<tool_call>f <arg_key>s</arg_key><arg_value>1</arg_value></tool_call>": (
            "",
            "",
            [("f", '{"s": "1"}')],
            False,
        ),
        "<tool_call>f is a mark": ("<tool_call>f is a mark", "", [], False),
        "<tool_call>h</tool_call>": ("<tool_call>h</tool_call>", "", [], False),
        "<tool_call>f<arg_key>s</arg_key><arg_value>x<": ("", "", [("f", '{"s": "x')], True),
        "<tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_v": (
            "",
            "",
            [("f", '{"i": 1')],
            True,
        ),
        "<tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value><arg_ke": ("", "", [("f", '{"i": 1')], True),
    },
    "mistral": {
        'Hm [TOOL_CALLS] [{"name": "f", "arguments": {"i": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]': (
            "Hm",
            "",
            FG,
            False,
        ),
        '[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]g[CALL_ID]12ab[ARGS]{}': ("", "", FG, False),
        '[TOOL_CALLS]f{"i": 1} ok': ("ok", "", F, False),
        '[TOOL_CALLS]h[ARGS]{"i": 1}': ('[TOOL_CALLS]h[ARGS]{"i": 1}', "", [], False),
        '[TOOL_CALLS]f[ARGS]{"i": ': ("", "", [("f", '{"i": ')], True),
        "[TOOL_CALLS]f[AR": ("[TOOL_CALLS]f[AR", "", [], False),
        '{"name": "f", "arguments": {}}': ('{"name": "f", "arguments": {}}', "", [], False),
    },
    "pythonic": {
        "[f(i=1), g()]": ("", "", FG, False),
        " <|python_tag|>[f(i=1)]": ("", "", F, False),
        "I look. <|python_tag|>f(i=1)": ("I look.", "", F, False),
        """[f(a={"x": [True, None, 'y']}, b='it"s, )', c="\\"]", d=-1.5, e=x + 1,)]""": (
            "",
            "",
            [("f", '{"a": {"x": [true, null, "y"]}, "b": "it\\"s, )", "c": "\\"]", "d": -1.5, "e": "x + 1"}')],
            False,
        ),
        "[f(a='\\ud800', b={1}, c=NaN)]": ("", "", [("f", '{"a": "\\ud800", "b": "{1}", "c": "NaN"}')], False),
        "[f](link) [f(x)]": ("[f](link) [f(x)]", "", [], False),
        "[h(i=1)]": ("[h(i=1)]", "", [], False),
        "[f(": ("[f(", "", [], False),
        "[f(i=1": ("", "", [("f", "")], True),
        "[f(i=1, s='a": ("", "", [("f", '{"i": 1')], True),
        "[f(i=1, ": ("", "", [("f", '{"i": 1')], True),
        "[f(i=1, b c)]": ("c)]", "", F, False),
        "It is [f(i=1)]": ("It is [f(i=1)]", "", [], False),
    },
    "deepseek_v3": {
        f'Yes.\n\n{CALLS}{CALL}function{SEP}f\n```json\n{{"i": 1}}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n'
        f"{{}}\n```{CALL_END}{CALLS_END} more": ("Yes. more", "", FG, False),
        f"<think>a</think>{CALLS}{CALL}function{SEP}h\n```json": (
            f"{CALLS}{CALL}function{SEP}h\n```json",
            "a",
            [],
            False,
        ),
    },
    "deepseek_v31": {
        f'{CALLS}{CALL}f{SEP}{{"i": 1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}': ("", "", FG, False),
        f'{CALL}f{SEP}{{"i": 1}}': ("", "", F, False),
        f"{CALLS}{CALL}h{SEP}{{}}{CALL_END}": (f"{CALLS}{CALL}h{SEP}{{}}{CALL_END}", "", [], False),
        f'{CALLS}{CALL}f{SEP}{{"i": ': ("", "", [("f", '{"i": ')], True),
        f"{CALLS}{CALL}f": (f"{CALLS}{CALL}f", "", [], False),
    },
    "openai": {
        ANALYSIS + HARMONY_CALL: ("", "Hm.", F, False),
        ANALYSIS + HARMONY_CALL.removesuffix("<|call|>"): ("", "Hm.", F, False),
        ANALYSIS + "<|channel|>final<|message|>It is. ": ("It is. ", "Hm.", [], False),
        ANALYSIS + "<|channel|>final<|message|>So<|return|>": ("So", "Hm.", [], False),
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HARMONY_CALL: ("I look.", "", F, False),
        ' to=functions.f<|channel|>commentary json<|message|>{"i": 1}<|call|>': ("", "", F, False),
        f"{HARMONY_CALL}<|start|>assistant to=functions.g<|channel|>commentary<|message|>{{}}": ("", "", FG, False),
        HARMONY_CALL.replace("=functions.f", "=functions.h"): (
            HARMONY_CALL.replace("=functions.f", "=functions.h"),
            "",
            [],
            False,
        ),
        '<|channel|>commentary to=functions.f<|message|>{"i": ': ("", "", [("f", '{"i": ')], True),
        "<|channel|>analysis<|message|>Hm": ("", "Hm", [], False),
        "<|channel|>analysis": ("", "", [], False),
        "to be": ("to be", "", [], False),
    },
}


def marks_of(parser: str) -> ThoughtMarks:
    return THOUGHTS["openai_gptoss" if parser == "openai" else "qwen3"]


CASES = [(parser, text) for parser, texts in WRITTEN.items() for text in texts]


@pytest.mark.parametrize(("parser", "text"), CASES)
def test_what_is_found_does_not_depend_on_the_pieces(parser, text):
    *expected, cut = WRITTEN[parser][text]
    rng = random.Random(5)
    for trial in range(40):
        reader = PARSERS[parser](TOOLS, thoughts=marks_of(parser))
        assert read(reader, split(text, trial, rng)) == tuple(expected)
        assert reader.cut == cut


@pytest.mark.parametrize("parser", WRITTEN)
def test_random_marks_are_read_alike_however_they_come_and_one_call_where_no_more_may_be_made(parser):
    rng = random.Random(6)
    form = PARSERS[parser]
    texts = [*WRITTEN[parser]]
    parts = [*form.marks, *' \nfg{}"[,(=)\\', "f", "<function=f>", "<parameter=s>", "</parameter>", "[f(i=", *texts]
    for _ in range(400):
        text = "".join(rng.choices([part for part in parts if part], k=rng.randrange(1, 9)))
        options = {"parallel_calls": rng.random() < 0.7, "thoughts": marks_of(parser) if rng.random() < 0.7 else None}
        size = rng.randrange(1, 6)
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        whole = read(form(TOOLS, **options), [text])
        assert read(form(TOOLS, **options), [*pieces, ""]) == whole
        assert options["parallel_calls"] or len(whole[2]) <= 1
    two = next(text for text in texts if len(WRITTEN[parser][text][2]) == 2)
    assert read(form(TOOLS, parallel_calls=False), [two])[2] == F


def test_what_is_certain_comes_at_once():
    def arguments(text: str) -> list:
        return [({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}, [])]

    reader = PARSERS["qwen3_coder"](TOOLS)
    assert reader.push("<tool_call><function=f>") == []
    (begun, _), *first = reader.push("<parameter=s>\nab")
    assert begun["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert first == arguments('{"s": "') + arguments("ab")
    assert reader.push('"c\n</para') == arguments('\\"c')
    assert reader.push("meter>") == arguments('"')
    assert reader.push("<parameter=i>12") == []
    assert reader.push("</parameter>") == arguments(', "i": 12')
    harmony = PARSERS["openai"]({}, thoughts=marks_of("openai"))
    assert harmony.push("<|channel|>analysis<|message|>hm") == [({"reasoning_content": "hm"}, [])]
    call = PARSERS["openai"](TOOLS).push('<|channel|>commentary to=functions.f<|message|>{"i')
    assert call[1:] == arguments('{"i')


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("i", "5", "5"),
        ("i", " 5.0 ", "5"),
        ("i", "5.5", '"5.5"'),
        ("i", "five", '"five"'),
        ("n", "5", "5"),
        ("n", "-1.5e3", "-1.5e3"),
        ("n", "NaN", '"NaN"'),
        ("b", "true", "true"),
        ("b", "False", "false"),
        ("b", "1", '"1"'),
        ("o", '{"a": [1]}', '{"a": [1]}'),
        ("o", "[1]", '"[1]"'),
        ("o", "[" * 100_000, json.dumps("[" * 100_000)),
        ("l", "[1, 2]", "[1, 2]"),
        ("s", "5", '"5"'),
        ("s", "null", '"null"'),
        ("e", "None", "null"),
        ("e", "7", "7"),
        ("k", "2", "2"),
        ("r", "[]", "[]"),
        ("unknown", "5", '"5"'),
    ],
)
def test_a_value_without_quotes_has_the_type_that_the_schema_gives_it(key, written, expected):
    for parser, text in (
        ("qwen3_xml", f"<tool_call><function=f><parameter={key}>{written}</parameter></function></tool_call>"),
        ("glm45", f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{written}</arg_value></tool_call>"),
    ):
        [(_, arguments)] = read(PARSERS[parser](TOOLS), [text])[2]
        assert arguments == f'{{"{key}": {expected}}}'


def test_a_schema_of_any_shape_gives_types_or_none():
    for schema in (None, [], {"properties": 5}, {"properties": {"a": {"type": [["x"], 5], "enum": 3, "anyOf": 1}}}):
        assert parameter_types(schema, "a") == set()
    assert parameter_types({"properties": {"a": {"const": True}}}, "a") == {"boolean"}
    assert as_json("nothing", None) is None


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<tool_call>\n<function=' + call.name }}{% for a in x %}{{ '<parameter=' + a }}", "qwen3_xml"),
        ("{{ '<tool_call>' ~ name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}{{ calls | tojson }}", "mistral"),
        ("{{ 'Answer with [func_name1(x=1), func_name2()]' }}", "llama4_pythonic"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type }}", "deepseek_v31"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "openai"),
        ('{{ \'<tool_call>\n{"name": "\' + call.name }}', "hermes"),
        ("{{ messages }}", "llama3_json"),
    ],
)
def test_the_template_or_a_flag_chooses_the_form(template, parser):
    assert call_form("auto", template) is PARSERS[parser]
    assert call_form("auto", "") is ChatReader
    assert all(call_form(name, template) is form for name, form in PARSERS.items())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer whose special tokens are the marks of two forms."""
    made = AutoTokenizer.from_pretrained(boxed_pair())
    marks = [*PARSERS["mistral"].marks, *PARSERS["openai"].marks, "<|hidden|>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    return made


@pytest.mark.parametrize(
    ("parser", "written", "thoughts"),
    [
        ("mistral", 'I look.[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]g<|hidden|>[ARGS]{}', None),
        (
            "openai",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            f"<|start|>assistant{HARMONY_CALL}<|hidden|><|start|>assistant to=functions.g<|channel|>commentary"
            "<|message|>{}",
            "Hm.",
        ),
    ],
)
def test_marks_that_are_special_tokens_are_read_of_an_answer(server, tokenizer, monkeypatch, parser, written, thoughts):
    ids = tokenizer(written, add_special_tokens=False).input_ids
    assert tokenizer.convert_tokens_to_ids("<|hidden|>") in ids

    async def deltas(asked: Any, choices: list[Any]) -> AsyncIterator[tuple[Any, list[SequenceDelta]]]:
        for begin in range(0, len(ids), 3):
            finish = "stop" if begin + 3 >= len(ids) else None
            for choice in choices:
                yield choice, [SequenceDelta(ids[begin : begin + 3], finish=finish)]

    template = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", f"{template}{{{{ tools }}}}{{# {PARSERS[parser].template_mark} #}}")
    monkeypatch.setattr(server.engine, "on_delta", server.engine.on_delta)  # is put back in the end
    serving = Server(server.engine, tokenizer)
    monkeypatch.setattr(server.engine, "deltas", deltas)
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    body: dict[str, Any] = {"model": serving.model, "messages": [{"role": "user", "content": "Hello"}], "tools": tools}
    with listening(server_app(serving)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.message.content == "I look."
        assert getattr(choice.message, "reasoning_content", None) == thoughts
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == FG
        assert choice.finish_reason == "tool_calls"
        with client.chat.completions.stream(**body) as events:
            streamed = events.get_final_completion().choices[0]
        assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls] == calls
        assert streamed.message.content == "I look."
        without = client.chat.completions.create(**body | {"tools": openai.NOT_GIVEN}).choices[0].message
        assert "[TOOL_CALLS]" not in without.content
        assert "<|hidden|>" not in without.content


def test_an_unknown_parser_is_refused_with_the_names(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--tool-call-parser", "nope"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--tool-call-parser" in error
    assert all(name in error for name in PARSERS)
