"""Conversations in the columns of a row, parsed into OpenAI's form.

Read are OpenAI's files for fine-tuning, TRL's columns (`prompt` with `completion` or `chosen`, as lists of turns),
ShareGPT (`from` and `value`, with LLaMA-Factory's speakers), and Alpaca's columns next to `system`, `history` or
`tools`. Lists and objects may be JSON text, which columns of differing forms are stored as.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from redrafter.errors import CheckpointError, check_characters, first_line

TURN_KEYS = ("messages", "conversations", "conversation")
SYSTEM_KEYS = ("system", "system_prompt")
# Next to one of these a prompt and its answer are turns of a conversation, and not plain text.
VARIABLE_KEYS = ("enable_thinking", "reasoning_effort", "documents")  # variables of templates, as columns
CONVERSATION_KEYS = (*SYSTEM_KEYS, "history", "tools", "functions", "chat_template_kwargs", *VARIABLE_KEYS)
# Of a prompt, and of an instruction, the columns that may hold its answer.
PROMPT_ANSWERS, INSTRUCTION_ANSWERS = ("completion", "response", "chosen"), ("output", "response", "chosen")
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Of a turn. Some templates read them, but no request to the server can have them.
UNREAD_TURN_KEYS = (*MEDIA_KEYS, "tools", "functions", "function_calls", "documents", "refusal")
SCHEMA_VALUES = ("default", "const")  # keys of a JSON schema whose value may be null
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
SPEAKER_ROLES = {
    **{"system": "system", "developer": "developer", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # an assistant's turn of nothing but calls, as JSON
}
MAX_SHOWN_CHARACTERS = 80  # of a malformed value in an error

Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation, the tools that its assistant may call, and the variables of the chat template.

    Each message has a `role` and a `content` that are strings. Calls are in `tool_calls` (with the arguments as an
    object or as JSON text), thoughts in `reasoning_content`. An answer that is not to be learnt has `weight` 0.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None


def is_conversation(entry: dict[str, Any]) -> bool:
    """Return whether a row, which may have null values, is a conversation rather than plain text or token ids."""
    if any(entry.get(name) is not None for name in (*TURN_KEYS, "turns")):
        return True
    if any(isinstance(entry.get(name), list) for name in ("prompt", "input", *PROMPT_ANSWERS, *INSTRUCTION_ANSWERS)):
        return True
    # A column that is null in this row is not null in others: all rows of a data set are read alike.
    return any(name in entry for name in CONVERSATION_KEYS)


def parse_conversation(entry: dict[str, Any], where: str) -> Conversation:
    """Return the conversation of a row without null values; raise `CheckpointError` where it is malformed.

    `where` is the row's place, for messages.
    """
    messages = _with_system(list(_turns(entry, where)), entry, where)
    tools = _parse_tools(entry, where)
    variables = _parse_json(entry.get("chat_template_kwargs") or {}, (dict,), '"chat_template_kwargs"', where)
    variables = {name: entry[name] for name in VARIABLE_KEYS if entry.get(name, "") not in ("", [])} | variables
    if "documents" in variables:
        variables |= {"documents": _parse_json(variables["documents"], (list,), '"documents"', where)}
    return Conversation(messages, tools or None, variables or None)


def check_string(value: Any, where: str, name: str) -> str:
    """Return a string; raise `CheckpointError` for another type, and for a string that has no UTF-8."""
    if not isinstance(value, str):
        raise _malformed(where, f"{name} must be a string", value)
    check_characters(value, f"{where}: {name}", CheckpointError)
    return value


def drop_nulls(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return a value without the entries of objects that are null, except those in `keep`; lists keep theirs.

    Arrow has one form for all objects of a column, so each of them gets the keys of all others, as null.
    """
    if isinstance(value, dict):
        kept = ((key, one) for key, one in value.items() if one is not None or key in keep)
        return {key: drop_nulls(one, keep) if isinstance(one, dict | list) else one for key, one in kept}
    if isinstance(value, list):
        return [drop_nulls(one, keep) if isinstance(one, dict | list) else one for one in value]
    return value


def instruction_of(entry: dict[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Return the texts of a row's inputs, which Dolly calls context, and of its instruction, without empty ones."""
    names = (("context", "input"), ("instruction",))
    given, instruction = ([check_string(entry.get(name, ""), where, f'"{name}"') for name in some] for some in names)
    return list(filter(None, given)), list(filter(None, instruction))


def answer_of(entry: dict[str, Any], names: tuple[str, ...], where: str) -> tuple[str, Any]:
    """Return the name and the value of the one column that answers a row's prompt; None where there is none."""
    found = [name for name in names if name in entry]
    if len(found) > 1:
        raise CheckpointError(f"{where}: a prompt has one answer, here both {' and '.join(found)}; leave one out")
    return (found[0], entry[found[0]]) if found else ("", None)


def _malformed(where: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{where}: {expected}, found {str(value)[:MAX_SHOWN_CHARACTERS]}")


def _parse_json(value: Any, kinds: tuple[type, ...], name: str, where: str, keep: tuple[str, ...] = ()) -> Any:
    """Return a value of one of some types, which may be JSON text. Nulls in objects are kept in JSON text alone."""
    parsed = drop_nulls(value, keep)
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _malformed(where, f"{name} is not JSON ({first_line(error)})", value) from error
    if not isinstance(parsed, kinds):
        named = " or ".join("a list" if kind is list else "an object" for kind in kinds)
        raise _malformed(where, f"{name} must be {named}, or its JSON text", value)
    return parsed


# The turns


def _turns(entry: dict[str, Any], where: str) -> Iterator[Message]:
    for name in TURN_KEYS:
        if name in entry:
            if entry.get("history"):
                raise CheckpointError(f'{where}: "history" comes before an instruction, not before "{name}"')
            yield from _parse_turns(entry[name], name, where)
            return
    if "turns" in entry:
        texts = entry["turns"] if isinstance(entry["turns"], list) else [entry["turns"]]
        yield from (_parse_turn({"role": "user", "content": text}, where) for text in texts)
    elif "prompt" in entry:
        yield from _answered(entry["prompt"], "prompt", PROMPT_ANSWERS, entry, where)
    elif isinstance(entry.get("input"), list):
        yield from _answered(entry["input"], "input", INSTRUCTION_ANSWERS, entry, where)
    elif "instruction" in entry or "input" in entry:
        given, instruction = instruction_of(entry, where)
        yield from _answered("\n".join(instruction + given), "instruction", INSTRUCTION_ANSWERS, entry, where)
    else:
        name, answer = answer_of(entry, PROMPT_ANSWERS, where)
        yield from _parse_turns(answer, name, where)


def _answered(prompt: Any, key: str, names: tuple[str, ...], entry: dict[str, Any], where: str) -> Iterator[Message]:
    """Yield the turns of a prompt, which are not learnt, and of its answer; each is a text or a list of turns."""
    name, answer = answer_of(entry, names, where)
    answer_turns = _parse_turns(answer, name, where) if isinstance(answer, list) else []
    if isinstance(prompt, str):
        asked = [turn["content"] for turn in answer_turns if turn["role"] == "user"]
        if asked and prompt not in asked:
            raise CheckpointError(f'{where}: "{name}" has turns of a user, but "{key}" is not among them')
        yield from _parse_history(entry.get("history"), where)
        if not asked:
            if not prompt:
                raise CheckpointError(f"{where}: the prompt is empty")
            yield {"role": "user", "content": check_string(prompt, where, f'"{key}"')}
    else:
        if entry.get("history"):
            raise CheckpointError(f'{where}: "history" comes before an instruction, not before a list of turns')
        for turn in _parse_turns(prompt, key, where):
            yield turn | {"weight": 0} if turn["role"] == "assistant" else turn
    if answer is not None and not isinstance(answer, list):
        answer_turns = [{"role": "assistant", "content": check_string(answer, where, f'"{name}"')}]
    yield from answer_turns


def _parse_history(history: Any, where: str) -> Iterator[Message]:
    """Yield the turns of earlier questions and answers, which are pairs of texts."""
    for pair in _parse_json(history or [], (list,), '"history"', where):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _malformed(where, '"history" must be a list of pairs, each of a question and an answer', pair)
        for role, text in zip(("user", "assistant"), pair, strict=True):
            yield {"role": role, "content": check_string(text, where, '"history"')}


def _with_system(messages: list[Message], entry: dict[str, Any], where: str) -> list[Message]:
    """Return the messages after the system's, which a column of the row may hold."""
    texts = {name: check_string(entry[name], where, f'"{name}"') for name in SYSTEM_KEYS if entry.get(name)}
    first = messages[0]["content"] if messages and messages[0]["role"] in ("system", "developer") else None
    if len({*texts.values(), *([] if first is None else [first])}) > 1:
        named = " and ".join(f'"{name}"' for name in texts)
        raise CheckpointError(f"{where}: there is one system message, here {named} and others differ; leave one out")
    return (
        messages if first is not None or not texts else [{"role": "system", "content": texts.popitem()[1]}, *messages]
    )


def _parse_turns(turns: Any, name: str, where: str) -> list[Message]:
    if isinstance(turns, dict):
        turns = [turns]
    return [_parse_turn(turn, where) for turn in _parse_json(turns, (list,), f'"{name}"', where)]


def _parse_turn(turn: Any, where: str) -> Message:
    """Return a turn as a message. Keys that chat templates do not read, such as an id, are kept."""
    message = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
    unread = [key for key in UNREAD_TURN_KEYS if message.get(key)]
    if unread:
        raise CheckpointError(f'{where}: a turn has "{unread[0]}", which is not read; leave such rows out')
    speaker, content = message.pop("from", None), message.pop("value", None)
    role, content = message.get("role", speaker), message.get("content", content)
    if not isinstance(role, str) or (role not in SPEAKER_ROLES and "role" not in message):
        known = f'a turn has a "role", or a "from" that is one of {", ".join(SPEAKER_ROLES)}'
        raise _malformed(where, known, turn)
    role = SPEAKER_ROLES.get(role, role)  # a template may know more roles
    calls = message.pop("tool_calls", None) or message.pop("function_call", None)
    message.pop("function_call", None)
    if role == "call":
        role, calls, content = "assistant", content, None
    message |= {"role": role} | _parse_thoughts(message, where)
    if calls:
        message["tool_calls"] = _parse_calls(calls, where)
    if message.pop("loss", True) is False:  # as ms-swift writes it
        message["weight"] = 0
    optional = role == "tool" or "tool_calls" in message or "reasoning_content" in message
    if content is None and not optional:
        raise _malformed(where, f'a turn of role "{role}" needs a "content"', turn)
    return message | {"content": _parse_content(content, where)}


def _parse_content(content: Any, where: str) -> str:
    """Return content as a string; parts are joined, as in a request to the server."""
    if not isinstance(content, list):
        return "" if content is None else check_string(content, where, '"content"')
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS:
            raise CheckpointError(f"{where}: a part of content is of type {part['type']!r}; only text is read")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(check_string(text, where, 'a part of "content"') for text in texts)


def _parse_thoughts(message: Message, where: str) -> dict[str, str]:
    """Return `reasoning_content`, of which other names are removed from the message."""
    thoughts = [check_string(message.pop(key), where, f'"{key}"') for key in THOUGHT_KEYS if key in message]
    if len({*thoughts}) > 1:
        raise CheckpointError(f"{where}: a turn has several of {', '.join(THOUGHT_KEYS)}, which differ; leave one out")
    return {"reasoning_content": thoughts[0]} if thoughts and thoughts[0] else {}


# Calls and tools


def _parse_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a turn, given as a list or as one call, in OpenAI's form or as a name and its arguments."""
    parsed = _parse_json(calls, (list, dict), '"tool_calls"', where)
    return [_parse_call(call, where) for call in (parsed if isinstance(parsed, list) else [parsed])]


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _malformed(where, 'a call needs a "name" and its "arguments"', call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict | str):
        raise _malformed(where, 'the "arguments" of a call must be an object, or its JSON text', arguments)
    named = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return named | ({"id": str(call["id"])} if call.get("id") is not None else {})


def _parse_tools(entry: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tools of a row; none where its `tool_choice` forbids calls, as in a request to the server."""
    given = [entry[name] for name in ("tools", "functions") if entry.get(name)]
    if len(given) > 1:
        raise CheckpointError(f'{where}: a row has "tools" or "functions"; leave one out')
    if not given or "none" in (entry.get("tool_choice"), entry.get("function_call")):
        return []
    tools = _parse_json(given[0], (list,), '"tools"', where, SCHEMA_VALUES)
    return [_parse_tool(_parse_json(tool, (dict,), "a tool", where, SCHEMA_VALUES), where) for tool in tools]


def _parse_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form; it may be the function alone."""
    function = tool.get("function") or {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _malformed(where, 'a tool needs a function with a "name"', tool)
    return {"type": "function", "function": function}
