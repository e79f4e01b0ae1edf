"""Grammars of calls in the forms of models: what follows them is read back as a call that fits the tool's schema."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from helpers.chats import tiny_tokenizer
from helpers.reading import read
from redrafter import ArgumentError, boxed_pair
from redrafter.chat.thoughts import MARKS
from redrafter.grammar.child import CompiledGrammar
from redrafter.grammar.source import GrammarSource
from redrafter.serve.answers.call_forms import FORMS, PARSERS
from redrafter.serve.answers.lark import CalledTool, LarkWriter
from redrafter.serve.answers.reader import ChatReader

FORM_NAMES = [form.parsers[-1] for form in FORMS]
KEYWORDS = {"type": "object", "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {
        "value": {"enum": [1, "</parameter>", None]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
    },
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nothing": KEYWORDS | {"properties": {}},
    "all types": KEYWORDS
    | {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer", "minimum": -3, "maximum": 12},
            "n": {"type": "number", "minimum": -1.5, "maximum": 2.5},
            "b": {"type": "boolean"},
            "z": {"type": "null"},
            "l": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
            "o": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["s", "b", "o"],
    },
    "choices": KEYWORDS
    | {
        "properties": {
            "e": {"enum": ["a", "b\"'\\é🙂", "null", "5", ""]},
            "m": {"enum": ["a", 1, None, 2.5, True]},
            "c": {"const": "x y"},
            "k": {"const": 7},
        },
        "required": ["e", "m", "c", "k"],
    },
    "unions": KEYWORDS
    | {
        "properties": {
            "u": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "U"},
            "y": {"type": ["string", "null"], "enum": ["a", "b", None]},
            "v": {"type": ["string", "integer"]},
            "w": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/L"}]},
        },
        "required": ["u", "v", "w"],
        "$defs": {"L": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}},
    },
    "references": {
        "$ref": "#/$defs/P",
        "$defs": {
            "P": KEYWORDS
            | {"properties": {"t": {"$ref": "#/$defs/Tree"}, "s": {"$ref": "#/$defs/a~1b"}}, "required": ["t"]},
            "Tree": TREE,
            "a/b": {"type": "string"},
        },
    },
    "marks": KEYWORDS
    | {
        "properties": {
            "c": {"const": "<tool_call>"},
            "d": {"enum": ["<think></think>", "<｜tool▁sep｜>"]},
            "l": {"type": "array", "items": {"enum": ["</parameter>", "</arg_value>"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["l"],
    },
    "free names": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
}
"""Schemas of parameters, each of which every form can keep to."""


def marked_tokenizer(special: bool) -> Any:
    """A tokenizer of bytes, which may have a token for each mark of a form or of a thought."""
    tokenizer = tiny_tokenizer()
    marks = {mark for form in FORMS for mark in (*form.marks, *form.begins) if mark} | {"<|start|>", "</tool_call>"}
    marks |= {mark.strip() for marks in MARKS for mark in (marks.begin, marks.end) if " " not in mark}
    marks -= {"<|channel|>analysis<|message|>", "<|channel>thought"}
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks | {"<|channel>", "<|constrain|>"})})
    return tokenizer


TOKENIZERS = {special: marked_tokenizer(special) for special in (False, True)}
VOCABULARIES = {special: from_tokenizer(tokenizer) for special, tokenizer in TOKENIZERS.items()}


def unspelled(special: bool) -> Mapping[str, int]:
    return {token.content: number for number, token in TOKENIZERS[special].added_tokens_decoder.items()}


def compiled(special: bool, source: GrammarSource) -> Any:
    return CompiledGrammar(source, VOCABULARIES[special])


def call_source(name: str, special: bool, *schemas: Any) -> GrammarSource:
    lark = LarkWriter(unspelled(special), name)
    tools = [CalledTool(f"tool-{number}", schema) for number, schema in enumerate(schemas)]
    return lark.source(PARSERS[name].write_forced(lark, tools))


ENDINGS = [
    '"',
    "\n</parameter>\n",
    "</parameter>\n",
    "</arg_value>",
    "</function>\n</tool_call>",
    "</tool_call>",
    "<|end|><|start|>assistant",
    ")]",
    "}",
    "]",
]


def write(grammar: Any, special: bool, rng: random.Random, most: int = 3000, begin: str = "") -> str:
    """Write a random text of a grammar, which begins with `begin`, and whose parts are brought to their ends soon."""
    matcher, tokenizer = grammar.start(), TOKENIZERS[special]
    endings = [tokenizer(text, add_special_tokens=False).input_ids for text in ENDINGS]
    stops = {
        *grammar.vocabulary.eos_tokens,
        *tokenizer("\x7f", add_special_tokens=False).input_ids,
    }  # in no JSON of theirs
    written: list[int] = tokenizer(begin, add_special_tokens=False).input_ids if begin else []
    assert matcher.consume_tokens(written)
    while len(written) < most:
        mask = matcher.compute_bitmask()
        allowed = [
            token for token in range(len(tokenizer)) if mask[token >> 3] >> (token & 7) & 1 and token not in stops
        ]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            return str(tokenizer.decode(written))
        assert allowed, tokenizer.decode(written)
        ids = [rng.choice(allowed)]
        if rng.random() < 0.5:
            fitting = [ending for ending in endings if matcher.validate_tokens(ending) == len(ending)]
            ids = rng.choice(fitting) if fitting else ids
        assert matcher.consume_tokens(ids)
        written += ids
    raise AssertionError(f"no end after {tokenizer.decode(written)[-200:]}")


@pytest.mark.parametrize("special", [False, True], ids=["spelled marks", "marks that are tokens"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", FORM_NAMES)
def test_what_follows_the_grammar_is_read_back_as_a_call_that_fits_the_schema(name, schema, special):
    parameters = SCHEMAS[schema]
    grammar = compiled(special, call_source(name, special, KEYWORDS | {"properties": {}}, parameters))
    fitting = compiled(False, GrammarSource.json_schema(parameters))
    rng, called = random.Random(3), set[str]()
    for _ in range(25):
        text = write(grammar, special, rng)
        reader = PARSERS[name]({"tool-0": {}, "tool-1": parameters})
        content, _, calls = read(reader, [text])
        assert content == "", text
        assert not reader.cut
        [(tool, arguments)] = calls
        called.add(tool)
        value = json.loads(arguments)
        if tool == "tool-0":
            assert value == {}, text
            continue
        ids = TOKENIZERS[False](arguments, add_special_tokens=False).input_ids
        matcher = fitting.start()
        assert matcher.consume_tokens(ids), (text, arguments)
        assert matcher.is_accepting(), (text, arguments)
    assert called == {"tool-0", "tool-1"}


def allows(grammar: Any, special: bool, text: str) -> bool:
    """Tell whether a text, whose marks are tokens if they are `special`, follows a grammar as a whole."""
    matcher, ids = grammar.start(), TOKENIZERS[special](text, add_special_tokens=False).input_ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


TYPED = KEYWORDS | {"properties": {"i": {"type": "integer"}, "s": {"type": "string"}}, "required": ["i"]}
SEP = "<｜tool▁sep｜>"
CALLS = {
    "qwen3_coder": [
        "<tool_call>\n<function=tool-0>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\na\n\n</parameter>\n</function>\n"
        "</tool_call>"
    ],
    "glm45": [
        "<tool_call>tool-0\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>tool-0<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value></arg_value></tool_call>",
    ],
    "mistral": ['[TOOL_CALLS][{"name": "tool-0", "arguments": {"i": 1}}]'],
    "pythonic": ["[tool-0(i=1)]", '[tool-0(i=1, s="it\'s")]'],
    "deepseek_v3": [
        f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}tool-0\n```json\n{{"i": 1}}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool-0{SEP}{{"i": 1}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "openai": [
        '<|channel|>commentary to=functions.tool-0 <|constrain|>json<|message|>{"i": 1}',
        ' to=functions.tool-0<|channel|>commentary json<|message|>{"i": 1}',
    ],
    "hermes": ['<tool_call>\n{"name": "tool-0", "arguments": {"i": 1}}\n</tool_call>'],
    "llama3_json": ['{"name": "tool-0", "parameters": {"i": 1}}', '{"name":"tool-0","arguments":{"i":1}}'],
}


@pytest.mark.parametrize("special", [False, True], ids=["spelled marks", "marks that are tokens"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_allowed_as_models_of_the_form_write_it_and_no_other(name, special):
    grammar = compiled(special, call_source(name, special, TYPED))
    for text in CALLS[name]:
        assert allows(grammar, special, text), text
        for wrong in (text.replace("tool-0", "tool-1"), f"{text} ", f" {text}", text[:-1], text.replace("1", '"1"', 1)):
            assert not allows(grammar, special, wrong), wrong
        if special and name not in ("pythonic", "llama3_json"):  # where marks are tokens, they are not spelled
            assert compiled(True, call_source(name, True, TYPED)).start().validate_tokens(
                TOKENIZERS[False](text, add_special_tokens=False).input_ids
            ) < len(text)
    others = [text for other in CALLS if other != name for text in CALLS[other]]
    assert not any(allows(grammar, special, text) for text in others)


def test_calls_after_args_are_of_tokenizers_that_have_it():
    text = '[TOOL_CALLS]tool-0[ARGS]{"i": 1}'
    assert allows(compiled(True, call_source("mistral", True, TYPED)), True, text)
    assert not allows(compiled(False, call_source("mistral", False, TYPED)), False, text)


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"anyOf": [{"type": "object"}]}, "'anyOf' at their top"),
        ({"type": "object", "patternProperties": {"a": {}}}, "'patternProperties' at their top"),
        ({"properties": {"a": TEXT | {"pattern": "^a"}}}, "'pattern' for the text 'a'"),
        ({"properties": {"a": TEXT | {"maxLength": 3}}}, "'maxLength' for the text 'a'"),
        ({"properties": {"a": TEXT | {"enum": ["a"], "format": "date"}}}, "'format' for the text 'a'"),
        ({"properties": {"a": {"not": {"const": "a"}}}}, "'not' for the text 'a'"),
        ({"properties": {"a": {"allOf": [TEXT]}}}, "'allOf' for the text 'a'"),
        ({"properties": {"a": {"anyOf": [TEXT | {"minLength": 2}, {"type": "null"}]}}}, "'minLength' for the text 'a'"),
        ({"properties": {"a": {"anyOf": [{"anyOf": [TEXT]}]}}}, "'anyOf' for the text 'a'"),
        ({"properties": {"a": {"anyOf": [TEXT], "type": "string"}}}, "'anyOf' for the text 'a'"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "'minimum' for the text 'a'"),
        ({"properties": {"a": {"enum": ["x</parameter></arg_value>"]}}}, "'enum' for the text 'a'"),
        ({"properties": {"a": {"enum": ["null", None]}}}, "'enum' for the text 'a'"),
        ({"properties": {"a": {"enum": ["b"], "const": "b"}}}, "'const' for the text 'a'"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "the reference '#'"),
    ],
)
def test_what_a_form_without_quotes_cannot_keep_to_is_refused_by_name_where_it_is_strict(schema, says):
    for name in ("qwen3_coder", "glm45"):
        with pytest.raises(ArgumentError) as raised:
            call_source(name, False, schema)
        assert says in str(raised.value)
        assert f"form {name!r}" in str(raised.value)
        assert "--tool-call-parser hermes" in str(raised.value)
        if "reference" in says:
            continue
        lark = LarkWriter(unspelled(False), name)
        source = lark.source(PARSERS[name].write_forced(lark, [CalledTool("tool-0", schema, strict=False)]))
        head, tail = ALLOWED[name]
        call = f"{head}tool-0{tail}".replace("=i>", "=a>").replace(">i<", ">a<").replace("{}", "a")
        assert allows(compiled(False, source), False, call), call


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array"}, "another type than an object"),
        ({"properties": [1]}, "another type than an object"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "another type than an object"),
        ({"properties": {"a\n": {}}}, "an argument called 'a\\n'"),
        ({"properties": {"": {}}}, "an argument called ''"),
        ({"properties": {"</arg_key>": {}}}, "an argument called '</arg_key>'"),
        ({"properties": {"a": False}, "required": ["a"]}, "the argument 'a', which is required and may not be given"),
        ({"properties": {"a": 5}}, "'5' is no schema"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "has no '#/$defs/none'"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "in a circle"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "in a circle"),
        ({"properties": {"a": {"enum": ["x" * 140_000]}}}, "131072 are the most"),
        ({"properties": {"a": {"enum": ["\ud800"]}}}, "a lone surrogate"),
        (
            {
                "properties": {str(n): {"type": "array", "items": [n, {"$ref": "#/$defs/a"}]} for n in range(900)},
                "$defs": {"a": {"enum": ["y" * 50_000]}},
            },
            "are too large for calls of the form",
        ),
    ],
)
def test_what_no_call_of_a_form_without_quotes_can_follow_is_refused(schema, says):
    for name in ("qwen3_coder", "glm45"):
        lark = LarkWriter({}, name)
        with pytest.raises(ArgumentError) as raised:
            PARSERS[name].write_forced(lark, [CalledTool("tool-0", schema, strict=False)])
        assert says in str(raised.value)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(a", "a)|(b", "[/", "\\1", "a^b", "(?P<x>"])
@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_a_pattern_that_cannot_be_read_is_an_error_of_the_grammar(name, pattern):
    schema = KEYWORDS | {"properties": {"a": {"type": "string", "pattern": pattern}}}
    with pytest.raises(ArgumentError, match="grammar: ") as raised:
        compiled(True, call_source(name, True, schema))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("special", [False, True], ids=["spelled marks", "marks that are tokens"])
@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.begin)
def test_an_answer_that_is_guided_may_follow_a_thought(marks, special):
    lark = LarkWriter(unspelled(special))
    form = next(form for form in (*FORMS[:1], ChatReader) if form.own_thoughts in (marks, None))
    content = form.write_answer(lark, "@answer")
    head = "" if form is ChatReader else "<|channel|>final<|message|>"
    gap = "\n\n" if form is ChatReader else "<|start|>assistant"
    thought = f"{marks.begin} hm, {marks.end[:-1]} <｜tool▁sep｜> </s"
    answers = {'{"a": 1}': {"json_schema": KEYWORDS | {"properties": {"a": {"type": "integer"}}}}}
    answers |= {"abc": {"regex": "[a-c]+"}, "(12)": {"lark": 'start: "(" NUM ")"\nNUM: /[0-9]+/'}}
    answers |= {"yes": {"choice": ["yes", "no"]}, "xx": {"ebnf": 'root ::= "x" root | "x"'}}
    for answer, spec in answers.items():
        for state in ("possible", "open", "over"):
            around = lark.text(form.after_thought(lark, marks, state, content))
            grammar = compiled(special, GrammarSource.from_spec(spec)._replace(around=around))
            begun = thought.removeprefix(marks.begin) if state == "open" and form is ChatReader else thought
            for text, fits in (
                (f"{begun}{marks.end}{gap}{head}{answer}", state != "over" or form is not ChatReader),
                (f"{head}{answer}", state != "open" or form is not ChatReader),
                (begun, False),
                (f"{begun}{marks.end}{gap}", False),
                (f"{begun}{answer}", False),
                (f"{begun}{marks.end}{gap}{head}hm {answer}", False),
            ):
                assert allows(grammar, special, text) == fits, (text, state)
            reader = form({}, thoughts=marks, thinking=state)
            text = f"{begun}{marks.end}{gap}{head}{answer}"
            if state != "over":
                assert read(reader, list(text)) == (answer, thought.removeprefix(marks.begin).strip(), [])
                assert reader.thought_spans == [(0, len(begun) + len(marks.end))]


def test_tokens_of_several_characters_may_span_the_parts_of_a_grammar():
    tokenizer = AutoTokenizer.from_pretrained(boxed_pair())
    vocabulary = from_tokenizer(tokenizer)
    lark = LarkWriter({})
    marks = MARKS[-1]
    for name, texts in CALLS.items():
        call = PARSERS[name].write_forced(lark, [CalledTool("tool-0", TYPED)])
        thought = "" if name == "openai" else "\nI think so.\n</think>\n\n"  # its thoughts are a channel
        source = lark.source(lark.after_thought(marks, "open" if thought else "over", call))
        grammar = CompiledGrammar(source, vocabulary)
        for text in texts:
            ids = tokenizer(f"{thought}{text}", add_special_tokens=False).input_ids
            matcher = grammar.start()
            assert matcher.validate_tokens(ids) == len(ids), tokenizer.decode(ids[: matcher.validate_tokens(ids) + 1])
    answer = json.dumps({"i": 1, "s": "a b"})
    around = lark.text(lark.after_thought(marks, "open", "@answer"))
    matcher = CompiledGrammar(GrammarSource.json_schema(TYPED)._replace(around=around), vocabulary).start()
    ids = tokenizer(f"So.\n</think>\n\n{answer}", add_special_tokens=False).input_ids
    assert matcher.consume_tokens(ids)
    assert matcher.is_accepting()


ALLOWED = {
    "qwen3_coder": ("<tool_call>\n<function=", ">\n<parameter=i>\n{}\n</parameter>\n</function>\n</tool_call>"),
    "glm45": ("<tool_call>", "<arg_key>i</arg_key><arg_value>{}</arg_value></tool_call>"),
    "mistral": ('[TOOL_CALLS][{"name": "', '", "arguments": {"i": {}}}]'),
    "pythonic": ("[", "(i={})]"),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        SEP + '{"i": {}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "openai": ("<|channel|>commentary to=functions.", '<|message|>{"i": {}}'),
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": {"i": {}}}\n</tool_call>'),
    "llama3_json": ('{"name": "', '", "parameters": {"i": {}}}'),
}
"""What is written before the name of a tool, and after it with a value for its argument `i`, by form."""
AT_THE_BEGINNING = ("pythonic", "llama3_json")  # forms whose calls begin there alone
FINAL = "<|channel|>final<|message|>"


def allowed_source(name: str, special: bool, several: bool = True) -> GrammarSource:
    lark = LarkWriter(unspelled(special), name)
    tools = [CalledTool("tool-0", TYPED), CalledTool("tool-1", {"type": "object"})]
    return lark.source(PARSERS[name].write_text(lark, tools, several))


@pytest.mark.parametrize("special", [False, True], ids=["spelled marks", "marks that are tokens"])
@pytest.mark.parametrize("name", ALLOWED)
def test_where_calls_are_strict_any_text_may_be_written_and_no_call_that_does_not_fit(name, special):
    grammar = compiled(special, allowed_source(name, special))
    one = compiled(special, allowed_source(name, special, several=False))
    head, tail = ALLOWED[name]
    call, wrong = (f"{head}tool-0{tail.replace('{}', value)}" for value in ("1", '"x"'))
    loose, unknown = f"{head}tool-1{tail.replace('{}', '5')}", f"{head}tool-2{tail.replace('{}', '1')}"
    begun = call[: len(head) + 6]
    before = "" if name in AT_THE_BEGINNING else "I look.\n"
    if name == "openai":
        before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    text = FINAL if name == "openai" else ""
    for fits in (call, loose, f"{before}{call}", f'{text}It is < [ "{{ </tool_cal é', f"{text}a"):
        for either in (grammar, one):
            assert allows(either, special, fits), fits
    for breaks in (wrong, unknown, f"{before}{wrong}", begun, f"{before}{begun}"):
        for either in (grammar, one):
            assert not allows(either, special, breaks), breaks
    assert not allows(grammar, special, f"{text}It is {ALLOWED['deepseek_v31'][0]}") or name != "deepseek_v31"
    if name not in (*AT_THE_BEGINNING, "openai"):
        for several in (f"{call}\n{call}", f"{call} and {loose} so."):
            assert allows(grammar, special, several), several
            assert not allows(one, special, several), several
        assert not allows(grammar, special, f"{call} and {wrong}")
    if name in ("hermes", "llama3_json"):
        assert not allows(grammar, special, ' {"name": "tool-0", "arguments": {"i": "x"}}')
        assert not allows(grammar, special, '[{"name": "tool-0"')
    if name == "hermes" and special:  # which the reader does not see, as a tool's result
        assert not allows(grammar, special, '<|channel>{"name": "tool-0", "arguments": {"i": "x"}}')
        assert allows(grammar, special, f"It<|channel> is {call}")


@pytest.mark.parametrize("special", [False, True], ids=["spelled marks", "marks that are tokens"])
@pytest.mark.parametrize("name", FORM_NAMES)
def test_random_texts_where_calls_are_strict_hold_calls_that_fit(name, special):
    form, grammar = PARSERS[name], compiled(special, allowed_source(name, special))
    fitting = compiled(False, GrammarSource.json_schema(TYPED))
    rng, called = random.Random(8), 0
    for _ in range(60):
        opening = form.opening or ("<|channel|>commentary" if form.has_channels else '{"name":')
        text = write(grammar, special, rng, begin=rng.choice(["", opening, opening]))
        for tool, arguments in read(form({"tool-0": TYPED, "tool-1": {}}), [text])[2]:
            called += 1
            if tool == "tool-1":
                assert isinstance(json.loads(arguments), dict)
                continue
            matcher = fitting.start()
            assert matcher.consume_tokens(TOKENIZERS[False](arguments, add_special_tokens=False).input_ids), text
            assert matcher.is_accepting()
    assert called > 5
