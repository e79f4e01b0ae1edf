"""Chat templates: where they come from, what a request may tell them, and what they refuse."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from helpers.chats import LLAMA_LIKE, tiny_tokenizer

pytest.importorskip("fastapi")

from redrafter.chat.thoughts import PARSERS
from redrafter.checkpoints.chat_templates import find_template, read_template
from redrafter.errors import ArgumentError
from redrafter.scheduler.request import RequestBounds
from redrafter.serve.prompts import PromptEncoder
from redrafter.serve.protocol.requests import ApiError, ChatRequest

HELLO = {"role": "user", "content": "Hello"}
THINKER = LLAMA_LIKE + (
    "{% if not add_generation_prompt %}{{ '' }}{% elif enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% elif reasoning_effort == 'high' %}{{ '<think>\n' }}{% endif %}"
)


def prompts(template: str) -> PromptEncoder:
    tokenizer = tiny_tokenizer(template)
    return PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 4096))


def text(template: str, *messages: dict[str, Any], **more: Any) -> str:
    """Return the text that a model reads of a chat."""
    read = prompts(template)
    ids = read.encode_chat(ChatRequest.model_validate({"messages": list(messages) or [HELLO]} | more))[0]
    return str(read.tokenizer.decode(ids))


def refusal(template: str, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as raised:
        text(template, **more)
    assert raised.value.status == 400
    return str(raised.value), raised.value.param


def test_variables_of_the_template_can_be_set_and_no_others():
    assert text(THINKER, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert text(THINKER, reasoning_effort="high").endswith("<|assistant|>\n<think>\n")
    assert text(THINKER, chat_template_kwargs={"reasoning_effort": "high"}).endswith("<think>\n")
    for name in ("messages", "tools", "tokenizer", "bos_token", "add_generation_prompt", "chat_template", "tokenize"):
        message, param = refusal(THINKER, chat_template_kwargs={name: "x"})
        assert param == "chat_template_kwargs"
        assert f"reads no '{name}'; it reads enable_thinking, reasoning_effort" in message
    for name in ("reasoning_effort", "verbosity"):
        assert refusal(LLAMA_LIKE, **{name: "high"}) == (
            f"{name}: the chat template reads no {name!r}; it reads none",
            name,
        )


THOUGHTFUL = "{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}"


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
def test_thoughts_of_a_turn_may_have_the_names_of_both_protocols_and_are_written_once(names):
    assert text(THOUGHTFUL, {"role": "assistant", "content": "b"} | dict.fromkeys(names, "a")) == "[a]"


def test_thoughts_that_differ_by_their_name_are_refused():
    for first, second, written in (("", "a", "[a]"), ("a", "", "[a]"), ("a", "b", None)):
        turn = {"role": "assistant", "content": "c", "reasoning": first, "reasoning_content": second}
        if written is not None:
            assert text(THOUGHTFUL, turn) == written
            continue
        with pytest.raises(ValidationError, match="another name of it"):
            ChatRequest.model_validate({"messages": [turn]})


CALLING = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["", "null", " null ", "{}", '{"a": null}', "[]", "3", '"a"', "{"])
def test_arguments_of_a_call_are_an_object(arguments):
    call = {"id": "call-7", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    if arguments in ("[]", "3", '"a"', "{"):
        message, param = refusal(CALLING, messages=[turn])
        assert (message[:32], param) == ("the arguments of call 'call-7' a", "messages")
    else:
        assert text(CALLING, turn) == "f" + ("{}" if "a" not in arguments else arguments)


def test_what_a_template_refuses_is_said():
    raising = "{{ raise_exception('roles must alternate') }}"
    assert refusal(raising) == ("the chat template refuses: roles must alternate", "messages")
    assert refusal("{{ messages[0].content.nothing.more }}")[0].startswith("the chat template refuses: ")
    assert refusal("{{ messages[0].content + 1 }}")[0].startswith("the chat template refuses: ")


def test_an_answer_may_be_continued_and_its_beginning_left_out():
    beginning = {"role": "assistant", "content": "The sea"}
    assert text(LLAMA_LIKE, HELLO, beginning, continue_final_message=True).endswith("<|assistant|>\nThe sea")
    assert text(LLAMA_LIKE, HELLO, beginning).endswith("The sea</s>\n<|assistant|>\n")
    assert text(LLAMA_LIKE, HELLO, add_generation_prompt=False).endswith("Hello\n")
    assert text(LLAMA_LIKE, HELLO, beginning | {"content": "a </s>"}, continue_final_message=True).endswith("\na </s>")


def test_a_developer_is_the_system_where_the_template_knows_none():
    developer = {"role": "developer", "content": "Be kind"}
    assert text(LLAMA_LIKE, developer, HELLO) == text(LLAMA_LIKE, developer | {"role": "system"}, HELLO)
    knows = "{% for m in messages %}{{ '[developer]' if m.role == 'developer' }}{{ m.content }}{% endfor %}"
    assert text(knows, developer) == "[developer]Be kind"


def test_a_template_reads_thoughts_and_calls_of_earlier_turns():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    assert text(template, turn) == "hm" + json.dumps([call | {"function": {"name": "f", "arguments": {}}}])


def test_it_is_seen_whether_thoughts_are_open():
    begun = lambda text: {"messages": [{"role": "assistant", "content": text}], "continue_final_message": True}  # noqa: E731
    for more, thinking in (
        ({}, "possible"),
        ({"reasoning_effort": "high"}, "open"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "over"),
        (begun("<think> hm"), "open"),
        (begun("<think></think> a"), "over"),
        (begun("a"), "over"),
    ):
        request = ChatRequest.model_validate({"messages": [HELLO]} | more)
        assert prompts(THINKER).encode_chat(request)[1] == thinking, more


@pytest.mark.parametrize(
    ("shown", "parser"),
    [
        ("{{ '<think>' }}{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '[THINK]' + thinking + '[/THINK]' }}", "mistral"),
        ("{{ '<seed:think>' + thinking + '</seed:think>' }}", "seed_oss"),
        ("{{ '<|channel>thought\\n' + thinking + '<channel|>' }}", "gemma4"),
        (
            "Write your thoughts after 'Here is my thought process:' and the answer after 'Here is my response:'",
            "granite",
        ),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}", "openai_gptoss"),
        ("{{ '<|user|>' + m.content + '<|end|>' }}", None),
    ],
)
def test_marks_of_thoughts_are_those_that_the_template_shows(shown, parser):
    assert prompts(LLAMA_LIKE + "{# " + shown + " #}").thoughts == (None if parser is None else PARSERS[parser])


def test_marks_of_thoughts_may_be_those_of_the_tokenizer_or_of_a_flag():
    read = prompts(LLAMA_LIKE)
    assert read.thoughts is None
    read = prompts(LLAMA_LIKE)
    read.tokenizer.add_special_tokens({"additional_special_tokens": ["◁think▷", "◁/think▷"]})
    assert read.thoughts == PARSERS["kimi"]
    read = replace(prompts(THINKER), reasoning_parser="mistral")
    assert read.thoughts == PARSERS["mistral"]
    assert prompts(THINKER).thoughts == PARSERS["qwen3"]


def test_it_is_seen_whether_a_template_describes_tools():
    assert not prompts(LLAMA_LIKE + "{# [TOOL_CALLS] #}").template.reads_tools
    assert prompts(LLAMA_LIKE + "{{ tools }}").template.reads_tools
    assert prompts("{{ raise_exception('a system message first') }}").template.reads_tools


def test_a_template_beside_the_model_is_found(tmp_path):
    for name, written in (("chat_template.j2", "{{ 1 }}"), ("chat_template.json", '{"chat_template": "{{ 2 }}"}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(written)
        tokenizer = tiny_tokenizer(None)
        find_template(tokenizer, str(folder))
        assert tokenizer.chat_template == ("{{ 1 }}" if name.endswith("j2") else "{{ 2 }}")
        tokenizer.chat_template = "own"
        find_template(tokenizer, str(folder))
        assert tokenizer.chat_template == "own"
    tokenizer = tiny_tokenizer(None)
    find_template(tokenizer, str(tmp_path))
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("name", "written", "says"),
    [
        ("a.jinja", b"{% for %}", "line 1: "),
        ("a.jinja", b"a\n{{ x | nothing }}", "line 2: No filter named 'nothing'."),
        ("a.jinja", b"\xff\xfe", "cannot be read: it is not text in UTF-8"),
        ("a.json", b"[]", "cannot be read: it is not text in UTF-8, or not JSON with a chat_template"),
        ("a.jinja", None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, name, written, says):
    if written is not None:
        (tmp_path / name).write_bytes(written)
    with pytest.raises(ArgumentError, match="chat template") as raised:
        read_template(tmp_path / name)
    assert says in str(raised.value)
