"""Calls in the forms that models write beside JSON objects, and how a form is chosen."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

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
from redrafter.serve.answers.choice import ChoiceContext
from redrafter.serve.answers.formats import ChatChoice
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest
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
JSON_F, JSON_G = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"<tool_call>"}]}}', '{"name": "g", "parameters": {}}'
JSON_CALL = ("f", '{"a": [1, {"b": "}\\"<tool_call>"}]}')


class Read(NamedTuple):
    """What is read of an answer; `cut` if it ends within a call."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = []  # noqa: RUF012  # never changed
    cut: bool = False


# What a model writes and what is read of it, by the name of a parser.
WRITTEN: dict[str, dict[str, Read]] = {
    "qwen3_coder": {
        "I look.\n<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=g>\n</function>\n</tool_call> Done": Read("I look. Done", calls=FG),
        '<function=f><parameter=s>\nhe "is"\n\n5 \n</parameter>\n</function>': Read(
            calls=[("f", '{"s": "he \\"is\\"\\n\\n5 "}')]
        ),
        "<think>hm <function=f></think><function=g></function>x": Read(
            "x", thoughts="hm <function=f>", calls=[("g", "{}")]
        ),
        "<tool_call><function=h></function></tool_call>": Read("<tool_call><function=h></function></tool_call>"),
        "<tool_call><function=f> hello": Read("<tool_call><function=f> hello"),
        "<tool_call><function=f><parameter=s>a</par": Read(calls=[("f", '{"s": "a')], cut=True),
        "<function=f><parameter=i>1</parameter></fun": Read(calls=[("f", '{"i": 1')], cut=True),
        "<function=f><parameter=i>1": Read(calls=[("f", "")], cut=True),
        "<function=f><parameter=i>1</parameter> text": Read("text", calls=F),
        "a <functio": Read("a <functio"),
    },
    "glm45": {
        "<think>hm</think>\nSure.\n<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g</tool_call> Done": Read("Sure. Done", thoughts="hm", calls=FG),
        "<tool_call>f <arg_key>s</arg_key><arg_value>1</arg_value></tool_call>": Read(calls=[("f", '{"s": "1"}')]),
        "<tool_call>f is a mark": Read("<tool_call>f is a mark"),
        "<tool_call>h</tool_call>": Read("<tool_call>h</tool_call>"),
        "<tool_call>f<arg_key>s</arg_key><arg_value>x<": Read(calls=[("f", '{"s": "x')], cut=True),
        "<tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_v": Read(
            calls=[("f", '{"i": 1')], cut=True
        ),
        "<tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value><arg_ke": Read(calls=[("f", '{"i": 1')], cut=True),
    },
    "mistral": {
        'Hm [TOOL_CALLS] [{"name": "f", "arguments": {"i": 1}, "id": "123456789"}, '
        '{"name": "g", "arguments": {}}]': Read("Hm", calls=FG),
        '[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]g[CALL_ID]12ab[ARGS]{}': Read(calls=FG),
        '[TOOL_CALLS]f{"i": 1} ok': Read("ok", calls=F),
        '[TOOL_CALLS]h[ARGS]{"i": 1}': Read('[TOOL_CALLS]h[ARGS]{"i": 1}'),
        '[TOOL_CALLS]f[ARGS]{"i": ': Read(calls=[("f", '{"i": ')], cut=True),
        "[TOOL_CALLS]f[AR": Read("[TOOL_CALLS]f[AR"),
        '{"name": "f", "arguments": {}}': Read('{"name": "f", "arguments": {}}'),
    },
    "pythonic": {
        "[f(i=1), g()]": Read(calls=FG),
        " <|python_tag|>[f(i=1)]": Read(calls=F),
        "I look. <|python_tag|>f(i=1)": Read("I look.", calls=F),
        """[f(a={"x": [True, None, 'y']}, b='it"s, )', c="\\"]", d=-1.5, e=x + 1,)]""": Read(
            calls=[("f", '{"a": {"x": [true, null, "y"]}, "b": "it\\"s, )", "c": "\\"]", "d": -1.5, "e": "x + 1"}')]
        ),
        "[f(a='\\ud800', b={1}, c=NaN)]": Read(calls=[("f", '{"a": "\\ud800", "b": "{1}", "c": "NaN"}')]),
        "[f](link) [f(x)]": Read("[f](link) [f(x)]"),
        "[h(i=1)]": Read("[h(i=1)]"),
        "[f(": Read("[f("),
        "[f(i=1": Read(calls=[("f", "")], cut=True),
        "[f(i=1, s='a": Read(calls=[("f", '{"i": 1')], cut=True),
        "[f(i=1, ": Read(calls=[("f", '{"i": 1')], cut=True),
        "[f(i=1, b c)]": Read("c)]", calls=F),
        "It is [f(i=1)]": Read("It is [f(i=1)]"),
    },
    "deepseek_v3": {
        f'Yes.\n\n{CALLS}{CALL}function{SEP}f\n```json\n{{"i": 1}}\n```{CALL_END}\n{CALL}function{SEP}g\n```json\n'
        f"{{}}\n```{CALL_END}{CALLS_END} more": Read("Yes. more", calls=FG),
        f"<think>a</think>{CALLS}{CALL}function{SEP}h\n```json": Read(
            f"{CALLS}{CALL}function{SEP}h\n```json", thoughts="a"
        ),
    },
    "deepseek_v31": {
        f'{CALLS}{CALL}f{SEP}{{"i": 1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}': Read(calls=FG),
        f'{CALL}f{SEP}{{"i": 1}}': Read(calls=F),
        f"{CALLS}{CALL}h{SEP}{{}}{CALL_END}": Read(f"{CALLS}{CALL}h{SEP}{{}}{CALL_END}"),
        f'{CALLS}{CALL}f{SEP}{{"i": ': Read(calls=[("f", '{"i": ')], cut=True),
        f"{CALLS}{CALL}f": Read(f"{CALLS}{CALL}f"),
    },
    "openai": {
        ANALYSIS + HARMONY_CALL: Read(thoughts="Hm.", calls=F),
        ANALYSIS + HARMONY_CALL.removesuffix("<|call|>"): Read(thoughts="Hm.", calls=F),
        ANALYSIS + "<|channel|>final<|message|>It is. ": Read("It is. ", thoughts="Hm."),
        ANALYSIS + "<|channel|>final<|message|>So<|return|>": Read("So", thoughts="Hm."),
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HARMONY_CALL: Read("I look.", calls=F),
        ' to=functions.f<|channel|>commentary json<|message|>{"i": 1}<|call|>': Read(calls=F),
        f"{HARMONY_CALL}<|start|>assistant to=functions.g<|channel|>commentary<|message|>{{}}": Read(calls=FG),
        HARMONY_CALL.replace("=functions.f", "=functions.h"): Read(
            HARMONY_CALL.replace("=functions.f", "=functions.h")
        ),
        '<|channel|>commentary to=functions.f<|message|>{"i": ': Read(calls=[("f", '{"i": ')], cut=True),
        "<|channel|>analysis<|message|>Hm": Read(thoughts="Hm"),
        "<|channel|>analysis": Read(),
        "to be": Read("to be"),
    },
    "hermes": {
        JSON_F: Read(calls=[JSON_CALL]),
        f"  {JSON_F} \n": Read(calls=[JSON_CALL]),
        f"[{JSON_F}, {JSON_G}]": Read(calls=[JSON_CALL, ("g", "{}")]),
        f"{JSON_F}; {JSON_G}": Read(calls=[JSON_CALL, ("g", "{}")]),
        f"<tool_call>\n{JSON_F}\n</tool_call>\n<tool_call>{JSON_G}</tool_call>": Read(calls=[JSON_CALL, ("g", "{}")]),
        f" I look. \n<tool_call>{JSON_F}</tool_call> Done.": Read(" I look. Done.", calls=[JSON_CALL]),
        f"<tool_call>[{JSON_F},{JSON_G}]</tool_call>": Read(calls=[JSON_CALL, ("g", "{}")]),
        f"<tool_call>{JSON_F}": Read(calls=[JSON_CALL]),
        '{"arguments": {"a": 1}, "name": "f"}': Read(calls=[("f", '{"a": 1}')]),
        '{"type": "function", "name": "f"}': Read(calls=[("f", "{}")]),
        '{"name": "f", "arguments": "x"}': Read(calls=[("f", '"x"')]),
        '{"name": "f", "arguments": {"a": "\\ud800 é🙂"}}': Read(calls=[("f", '{"a": "\\ud800 é🙂"}')]),
        '{"name": "f", "arguments": {"a": ': Read(calls=[("f", '{"a": ')], cut=True),
        '{"name": "f", "arguments": {"a": 1}': Read(calls=[("f", '{"a": 1}')], cut=True),
        '{"name": "f", "argum': Read('{"name": "f", "argum'),
        '{"name": "Anna", "age": 3} ': Read('{"name": "Anna", "age": 3} '),
        '{"age": 3}': Read('{"age": 3}'),
        "[1, 2] <tool": Read("[1, 2] <tool"),
        '{"name": ["f"], "arguments": {}}': Read('{"name": ["f"], "arguments": {}}'),
        '<tool_call>{"name": "h"}</tool_call> x': Read('<tool_call>{"name": "h"}</tool_call> x'),
        f"a <tool_call>no<tool_call>{JSON_G}</tool_call>": Read("a <tool_call>no", calls=[("g", "{}")]),
        f"It is {JSON_F}": Read(f"It is {JSON_F}"),
        " \n ": Read(" \n "),
        "": Read(),
        "a  \n b <too": Read("a  \n b <too"),
        f"<think>\nhm, {JSON_F} <tool_call>\n</think>\n\nyes ": Read("yes ", thoughts=f"hm, {JSON_F} <tool_call>"),
        f"<think>hm</think>{JSON_F}": Read(thoughts="hm", calls=[JSON_CALL]),
        "\n<think>hm </thi": Read(thoughts="hm </thi"),
        "<think></think> a": Read("a"),
        "a <think>hm</think>": Read("a <think>hm</think>"),
        "<thin": Read("<thin"),
    },
}


def marks_of(parser: str) -> ThoughtMarks:
    return THOUGHTS["openai_gptoss" if parser == "openai" else "qwen3"]


CASES = [(parser, text) for parser, texts in WRITTEN.items() for text in texts]


@pytest.mark.parametrize(("parser", "text"), CASES)
def test_what_is_found_does_not_depend_on_the_pieces(parser, text):
    expected = WRITTEN[parser][text]
    rng = random.Random(5)
    for trial in range(40):
        reader = PARSERS[parser](TOOLS, thoughts=marks_of(parser))
        assert read(reader, split(text, trial, rng)) == expected[:3]
        assert reader.cut == expected.cut


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
    two = next(text for text in texts if len(WRITTEN[parser][text].calls) == 2)
    assert read(form(TOOLS, parallel_calls=False), [two])[2] == WRITTEN[parser][two].calls[:1]


def write_answer(tokenizer: Any, ids: list[int], sizes: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message of a whole answer, and what the deltas of a stream in steps of these sizes join to."""
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools}
    body |= {"stream": True, "stream_options": {"include_drafts": True}}
    request = ChatRequest.model_validate(body)
    choice, unstreamed = (
        ChatChoice([5], request, ChoiceContext(tokenizer), thoughts=THOUGHTS["qwen3"]) for _ in range(2)
    )
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


@pytest.mark.parametrize("text", WRITTEN["hermes"])
def test_a_stream_joins_to_the_message_of_a_whole_answer(tokenizer, text):
    content, thoughts, calls, cut = WRITTEN["hermes"][text]
    rng = random.Random(7)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for _ in range(12):
        sizes = [rng.randrange(1, 5) for _ in range(rng.randrange(len(ids) + 1))]
        message, streamed = write_answer(tokenizer, ids, sizes)
        assert message == streamed
        assert (message["content"], message["reasoning_content"]) == (content, thoughts)
        assert message["tool_calls"] == [list(call) for call in calls]
        assert message["finish"] == ("tool_calls" if calls and not cut else "stop")


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
