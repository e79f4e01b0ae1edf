"""Render messages and tools in OpenAI's form with a chat template, for every command and the server alike.

Templates differ in what they read. `prepare_chat` gives a template its own form of roles, content, calls and tools, and
`render_chat` does that and renders; `encode_chat` also encodes. `find_missing_turn` finds a turn that a template has
left out.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from redrafter.chat.control_tokens import choose_marker, control_tokens_of
from redrafter.chat.schemas import read_parameters
from redrafter.chat.template import CallForm, ChatError, ChatTemplate
from redrafter.chat.thoughts import ThoughtMarks

Messages: TypeAlias = Sequence[dict[str, Any]]  # or tools, in OpenAI's form

_TRANSLATED = ("role", "content", "reasoning", "reasoning_content", "tool_calls", "weight")  # fields of a message
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")  # in the order in which templates write them


def render_chat(
    template: ChatTemplate,
    messages: Messages,
    tools: Messages | None = None,
    variables: dict[str, Any] | None = None,
    *,
    marker: str = "",
    parallel_calls: bool = True,
    **ending: bool,
) -> str:
    """Render a chat in OpenAI's form; raise `ChatError` if that is impossible.

    Args:
        template: The chat template.
        messages: The messages.
        tools: The tools that may be called.
        variables: Variables of the template.
        marker: Character to insert into control tokens that messages, tools and variables spell; empty for none.
        parallel_calls: Whether several calls at a time are allowed.
        ending: `add_generation_prompt` and `continue_final_message`, as transformers defines them.
    """
    variables = variables or {}
    template.check(variables)
    prepared, described = prepare_chat(template, messages, tools, parallel_calls=parallel_calls)
    if marker:
        control = control_tokens_of(template)
        prepared = [control.mark_message(message, marker) for message in prepared]
        described, variables = control.mark(described, marker), control.mark(variables, marker)
    return template.render(prepared, described, **variables, **ending)


def encode_chat(
    template: ChatTemplate, messages: Messages, tools: Messages | None = None, variables: dict[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a chat up to where the next answer begins; spelled control tokens are text."""
    marker = choose_marker(messages, tools, variables, template.text)
    text = render_chat(template, messages, tools, variables, marker=marker, add_generation_prompt=True)
    return control_tokens_of(template).encode(text, marker)


@lru_cache(maxsize=8)
def text_after_answer(template: ChatTemplate, has_calls: bool) -> str:
    """Return what the template writes between an answer and the next turn's text, which a tool writes after calls."""
    call = {"id": "probe0001", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer: dict[str, Any] = {"role": "assistant", "content": "a text"} | ({"tool_calls": [call]} if has_calls else {})
    following = {"role": "tool", "tool_call_id": call["id"]} if has_calls else {"role": "user"}
    probe = "a text to look for"
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a question"}, answer, following | {"content": probe}]
    try:
        before, text = render_chat(template, turns[:2]), render_chat(template, turns)
    except ChatError:
        return ""
    return text[len(before) :].partition(probe)[0] if text.startswith(before) else ""


def prepare_chat(
    template: ChatTemplate, messages: Messages, tools: Messages | None = None, *, parallel_calls: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools in OpenAI's form as a template reads them.

    A system message describes the tools where the template ignores them, and asks for one call at a time unless
    `parallel_calls`. Raises `ChatError` for a message that no template can render.
    """
    described = [_template_tool(tool) for tool in tools or ()]
    if described and not template.reads_tools:
        description, messages = describe_tools(described, parallel_calls), list(messages)
        if messages and messages[0]["role"] in ("system", "developer"):
            # Some templates refuse a second system message.
            description += f"\n\n{text_of(messages.pop(0).get('content'))}"
        messages = [{"role": "system", "content": description}, *messages]
        described = []
    return [_template_message(message, template) for message in messages], described or None


def describe_tools(tools: Messages, parallel_calls: bool = True) -> str:
    """Return a system message that describes tools to a model whose chat template ignores them."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    one_call = "" if parallel_calls else " Call no more than one at a time."
    return (
        "These functions may be called:\n" + "\n".join(lines) + "\nTo call one, answer with a JSON object of its "
        f'"name" and its "arguments", and nothing else.{one_call}'
    )


def text_of(content: Any) -> str:
    """Return a message's content as one string: text parts joined, without images; empty for no content."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return content or ""


def split_thought(message: dict[str, Any], marks: ThoughtMarks | None) -> tuple[str, str]:
    """Return the thought and the text of a message, without the space around them and the marks.

    The thought is `reasoning_content`, which is also called `reasoning`, or the text before the last end mark.
    """
    text, thought = text_of(message.get("content")), _thought(message) or ""
    if message["role"] == "assistant" and marks is not None and marks.end in text:
        thought, _, text = text.rpartition(marks.end)
        thought = thought.strip().removeprefix(marks.begin.strip())
    return thought.strip(), text.strip()


def find_missing_turn(template: ChatTemplate, messages: Messages, text: str) -> str | None:
    """Return a description of the first turn whose text or calls a rendered chat does not have; None if it has all.

    Thoughts may be missing in all turns but the last, since templates drop earlier ones.
    """
    marks = template.thoughts()
    for number, message in enumerate(messages, start=1):
        thought, own = split_thought(message, marks)
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        for part in (own, *names, *([thought] if number == len(messages) else [])):
            # A template may write a text as JSON.
            spellings = (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
            if not any(spelling in text for spelling in spellings):
                shown = part if len(part) <= 60 else part[:57] + "..."
                return f"turn {number} ({message['role']}): {shown!r}"
    return None


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates read it, without null fields and keywords, and in one order."""
    function = tool.get("function", tool)
    function = function | {"parameters": read_parameters(function.get("parameters"))}
    fields = dict.fromkeys((*_FUNCTION_FIELDS, *function))
    return {"type": "function", "function": {name: function[name] for name in fields if function.get(name) is not None}}


def _template_message(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """Return a message as a template reads it: content as a string or as parts, arguments in the form of its calls."""
    role, content = message["role"], message.get("content")
    # OpenAI renamed the system role; most templates know only the old name.
    if role == "developer" and "developer" not in template.text:
        role = "system"
    text, calls = text_of(content), message.get("tool_calls") or []
    templated: dict[str, Any] = {"role": role, "content": template.content(text)}
    templated |= {name: value for name, value in message.items() if name not in _TRANSLATED and value is not None}
    if isinstance(content, list) and any(part.get("type") != "text" for part in content):
        templated["content"] = [
            {"type": "text", "text": part.get("text") or ""} if part.get("type") == "text" else {"type": "image"}
            for part in content
        ]
    if (thought := _thought(message)) is not None:
        templated["reasoning_content"] = thought
    if calls and (form := template.call_form) is not None:
        if not text:
            templated["content"] = form.no_text
        templated["tool_calls"] = [_template_call(call, form) for call in calls]
    elif calls:
        # The template writes no calls: they are written as `describe_tools` asks the model to.
        named = ({"name": call["function"]["name"], "arguments": _arguments(call)} for call in calls)
        written = (json.dumps(call, ensure_ascii=False) for call in named)
        templated["content"] = template.content("\n".join(filter(None, (text, *written))))
    return templated


def _thought(message: dict[str, Any]) -> str | None:
    return message.get("reasoning_content") or message.get("reasoning")


def _template_call(call: dict[str, Any], form: CallForm) -> dict[str, Any]:
    arguments = _arguments(call) if form.as_objects else _arguments_text(call)
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {key: call[key] for key in ("id",) if call.get(key)} | {"type": "function", "function": function}


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as an object; raise `ChatError` for anything else."""
    arguments, name = call["function"].get("arguments"), f"call {call.get('id')!r}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "null")
        except (ValueError, RecursionError) as error:
            raise ChatError(f"the arguments of {name} are not valid JSON: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ChatError(f"the arguments of {name} are not a JSON object: {json.dumps(arguments)[:80]}")
    return arguments


def _arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments of a call as JSON text: as it was written, if it is a text."""
    parsed, arguments = _arguments(call), call["function"].get("arguments")
    return arguments if parsed and isinstance(arguments, str) else json.dumps(parsed, ensure_ascii=False)
