"""What a chat template reads is learnt by rendering, and messages are written in that form."""

import json

import pytest

from helpers.chat_templates import DEEPSEEK_V3, GEMMA3, GLM4_5, QWEN2_5, QWEN3, R1_DISTILL, SMOLLM2, TEMPLATES
from helpers.chats import tiny_tokenizer
from redrafter.chat.messages import find_missing_turn, render_chat
from redrafter.chat.template import CallForm, ChatError, ChatTemplate, chat_template_of, set_variables

ASKED = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def template(text: str) -> ChatTemplate:
    return chat_template_of(tiny_tokenizer(text))


def call(arguments: object, **more: object) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]} | more


def test_the_form_of_calls_is_the_one_in_which_name_and_arguments_appear():
    objects, text = CallForm(True, ""), CallForm(False, "")
    forms = dict.fromkeys(TEMPLATES, objects) | {"deepseek-v3": text, "r1-distill": CallForm(False, None)}
    forms |= dict.fromkeys(("smollm2", "gemma3"), None)
    assert {name: template(text).call_form for name, text in TEMPLATES.items()} == forms


@pytest.mark.parametrize("text", [QWEN2_5, QWEN3, GLM4_5])
def test_arguments_are_the_same_as_objects_and_as_text(text):
    forms = ({"city": "Bern"}, '{"city":"Bern"}', json.dumps({"city": "Bern"}, indent=1))
    assert len({render_chat(template(text), [ASKED, call(form)]) for form in forms}) == 1


@pytest.mark.parametrize("text", [DEEPSEEK_V3, R1_DISTILL])
def test_arguments_that_are_read_as_text_stay_as_they_were_written(text):
    assert '\n```json\n{"city":"Bern"}\n```' in render_chat(template(text), [ASKED, call('{"city":"Bern"}')])
    assert '\n```json\n{"city": "Bern"}\n```' in render_chat(template(text), [ASKED, call({"city": "Bern"})])


@pytest.mark.parametrize("text", TEMPLATES.values())
def test_a_call_without_arguments_has_an_empty_object(text):
    texts = {render_chat(template(text), [ASKED, call(arguments)]) for arguments in (None, "", "null", "{}", {})}
    assert len(texts) == 1
    for wrong in ("[]", "3", [1]):
        with pytest.raises(ChatError, match="the arguments of call 'c' are not a JSON object"):
            render_chat(template(text), [ASKED, call(wrong)])
    with pytest.raises(ChatError, match="the arguments of call 'c' are not valid JSON: "):
        render_chat(template(text), [ASKED, call("{")])


def test_a_template_that_writes_no_calls_gets_them_as_the_text_that_the_tools_ask_for():
    rendered = render_chat(template(SMOLLM2), [ASKED, call('{"city":"Bern"}', content="Well.")], [TOOL])
    assert 'assistant\nWell.\n{"name": "weather", "arguments": {"city": "Bern"}}<|im_end|>' in rendered
    assert rendered.startswith('<|im_start|>system\nThese functions may be called:\n{"name": "weather"')


def test_tools_are_described_in_the_one_system_message_of_a_template_that_ignores_them():
    system = {"role": "developer", "content": "Be brief."}
    rendered = render_chat(template(GEMMA3), [system, ASKED], [TOOL], add_generation_prompt=True)
    assert "These functions may be called:" in rendered
    assert "and nothing else.\n\nBe brief.\n\nWeather?<end_of_turn>\n<start_of_turn>model\n" in rendered


def test_both_names_of_thoughts_and_parts_of_text_are_read():
    rendered = [
        render_chat(template(QWEN3), [ASKED, {"role": "assistant", "content": content} | thought])
        for content in ("Cold.", [{"type": "text", "text": "Co"}, {"type": "text", "text": "ld."}])
        for thought in (
            {"reasoning": "hm"},
            {"reasoning_content": "hm"},
            {"reasoning": "hm", "reasoning_content": "hm"},
        )
    ]
    assert {*rendered} == {rendered[0]}
    assert "<think>\nhm\n</think>\n\nCold.<|im_end|>" in rendered[0]


def test_a_turn_that_a_template_leaves_out_is_found():
    result = {"role": "tool", "tool_call_id": "c", "content": '9 "C"\nsunny'}
    turns = [ASKED, call("{}"), result]
    for name, text in TEMPLATES.items():
        if name != "gemma3":  # refuses results
            assert find_missing_turn(template(text), turns, render_chat(template(text), turns)) is None, name
    silent = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content ~ m.tool_calls }}{% endif %}{% endfor %}"
    missing = find_missing_turn(template(silent), turns, render_chat(template(silent), turns))
    assert missing == "turn 3 (tool): '9 \"C\"\\nsunny'"
    lossy = [ASKED, {"role": "assistant", "content": "<think>hm</think>Cold."}]
    rendered = render_chat(template(R1_DISTILL), lossy)
    assert find_missing_turn(template(R1_DISTILL), lossy, rendered) == "turn 2 (assistant): 'hm'"
    assert find_missing_turn(template(R1_DISTILL), [*lossy, ASKED], rendered + "Weather?") is None


def test_names_that_a_template_sets_itself_are_no_variables():
    text = """
    {% macro show(part) %}{{ part }}{% endmacro %}
    {% set mood = mood | default("calm") %}{% if unset is not defined %}{% set unset = 1 %}{% endif %}{{ unset }}
    {% for m in messages %}{% if m.content %}{% set part = m.content %}{% else %}{% set own = "" %}{% endif %}
    {{ show(part) }}{{ own }}{{ read }}{% endfor %}"""
    assert template(text).variables == {"mood", "unset", "read"}
    assert template(TEMPLATES["qwen3"]).variables == {"enable_thinking"}


def test_defaults_of_variables_are_part_of_the_template_and_may_be_overridden():
    tokenizer = tiny_tokenizer("  {% if true %}\n{{ enable_thinking }}/{{ word }}\n{% endif %}\n\nend\n")
    plain = render_chat(chat_template_of(tokenizer), [ASKED])
    set_variables(tokenizer, {"enable_thinking": False, "word": "a\"'\\\nö😀"}, "--chat-template-kwargs")
    rendered = render_chat(chat_template_of(tokenizer), [ASKED])
    assert rendered == plain.replace("/", "False/a\"'\\\nö😀", 1)
    overridden = render_chat(chat_template_of(tokenizer), [ASKED], variables={"enable_thinking": True})
    assert overridden == rendered.replace("False", "True")
    with pytest.raises(
        ChatError, match="--chat-template-kwargs: the chat template reads no 'nothing'; it reads enable"
    ):
        set_variables(tokenizer, {"nothing": 1}, "--chat-template-kwargs")
