"""How a conversation is split into the ids before each answer, and which of them may follow an answer of the base."""

import pytest

from helpers.chats import tiny_tokenizer
from helpers.training import VOCAB
from redrafter.data.rows import Row
from redrafter.train.regenerate.answer_writer import BaseLimits, Task
from redrafter.train.regenerate.parts import split_row

EOS, USER = 2, 4
CALLING = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'BAD' %}{{ raise_exception('no') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content | trim }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def turns(*contents: str, **more: object) -> list[dict]:
    """Return messages of which each content begins with the first letter of its role."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[content[0]], "content": content[1:]} | more for content in contents]


def continued(
    messages: list[dict], answer: str, template: str = CALLING, ends: set[int] | None = None, end: int = EOS
) -> tuple[str, str]:
    """Return the text of a row before its second answer where the first is `answer`, and why the row has ended."""
    tokenizer = tiny_tokenizer(template)
    row, limits = Row("t:1", messages=messages), BaseLimits(frozenset(ends or {EOS}), VOCAB, None)
    task = Task(0, row, 0, 0.0, split_row(row, tokenizer, 9, limits.eos))
    task.add_prompt(limits)
    task.add_answer([*tokenizer(answer, add_special_tokens=False)["input_ids"], end], limits)
    return tokenizer.decode(task.ids), task.finish


WEATHER = {"tool_calls": [{"type": "function", "function": {"name": "wx", "arguments": {"at": "Bern"}}}]}


@pytest.mark.parametrize(
    ("answer", "same"),
    [('[wx {"at": "Bern"}]', True), ('so [wx {"at": "Bern"}]', True), ("hm", False), ('[wx {"at": "Rom"}]', False)],
)
def test_a_tool_result_follows_the_same_call_alone(answer, same):
    messages = [*turns("uhi"), *turns("a", **WEATHER), *turns("t9 C", "t8 C", "acold")]
    before, results = f"<s><|user|>hi\n<|assistant|>{answer}</s>", "\n<|tool|>9 C\n<|tool|>8 C\n<|assistant|>"
    assert continued(messages, answer) == ((before + results, "eos") if same else (before, "tool"))
    written = turns("uhi", 'a[wx {"at": "Bern"}]', "t9 C", "t8 C", "acold")  # a call in the text
    assert continued(written, answer) == continued(messages, answer)


def test_a_template_that_refuses_a_result_without_a_call_ends_the_row_there():
    refusing = CALLING.replace("m.content == 'BAD'", "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls")
    messages = [*turns("uhi"), *turns("a", **WEATHER), *turns("t9 C", "acold")]
    assert continued(messages, '[wx {"at": "Bern"}]', refusing)[1] == "tool"


def test_turns_of_weight_0_are_the_context_of_answers():
    given = [*turns("uhi"), *turns("a", weight=0, **WEATHER), *turns("t9 C")]
    opening = '<s><|user|>hi\n<|assistant|>[wx {"at": "Bern"}]</s>\n<|tool|>9 C\n<|assistant|>'
    assert continued([*given, *turns("acold", "umore", "ax")], "yes")[0].startswith(f"{opening}yes</s>\n<|user|>more")
    text, finish = continued([*turns("uone", "ax"), *given, *turns("acold")], "yes")
    assert (text, finish) == (f"<s><|user|>one\n<|assistant|>yes</s>\n{opening[3:]}", "eos")
    assert continued(given, "yes") == (f"{opening}yes</s>", "eos")
    assert continued([*given, *turns("umore")], "yes")[0].startswith(f"{opening}yes</s>\n<|user|>more\n<|assistant|>")


def test_a_base_that_ends_with_the_mark_of_another_role_is_followed_by_the_templates_own():
    """As GLM's does, whose template ends a turn with nothing but the mark of the next."""
    plain = CALLING.replace("{{ eos_token }}", "").replace("{{ '\n' }}", "")
    for own in (USER, EOS):
        text, _ = continued(turns("uhi", "ax", "umore", "ay"), "yes", plain, {USER, EOS}, own)
        assert text == "<s><|user|>hi<|assistant|>yes<|user|>more<|assistant|>"
