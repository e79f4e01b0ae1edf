"""From what a request asks to be continued to tokens."""

import json
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from redrafter.errors import first_line
from redrafter.serve.protocol import ApiError, ChatRequest, Message, ToolCall
from redrafter.serve.tools import described, templated

__all__ = ["Prompts"]

WIDE = 16  # characters of a text, by the tokens of the longest one, that are tokenized at once to see its length


@dataclass(frozen=True)
class Prompts:
    """Reads them. model: the name that clients know. vocabulary: of the target. context: the longest text. Raises
    `ApiError` for what cannot be written on from."""

    tokenizer: PreTrainedTokenizerBase
    model: str
    vocabulary: int
    context: int

    def several(self, given: str | list[Any]) -> list[list[int]]:
        """Of `/v1/completions`: one text or many, or their tokens."""
        texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not texts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt") for text in texts]

    def talk(self, request: ChatRequest) -> list[int]:
        """Of `/v1/chat/completions`."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, f"{self.model} has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        messages = [_templated(message) for message in request.messages]
        text = self._render(messages, None)
        if request.tools and request.tool_choice != "none":
            tools = templated(request.tools)
            told = self._render(messages, tools)
            if told == text:  # this template knows nothing of tools
                told = self._render([{"role": "system", "content": described(tools)}, *messages], None)
            text = told
        return self._checked(text, "messages", add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(400, f"the chat template refuses: {first_line(error)}", "messages") from error
        return str(text)

    def _checked(self, prompt: str | list[int], param: str, **how: bool) -> list[int]:
        """Its tokens. how: of the tokenizer."""
        ids = self._tokens(prompt, param, **how) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "the prompt is empty", param)
        if (bad := next((token for token in ids if token >= self.vocabulary), None)) is not None:
            raise ApiError(400, f"token id {bad} is out of range: there are {self.vocabulary} ids", param)
        if len(ids) >= self.context:
            raise self._too_long(f"{len(ids)}", param)
        return ids

    def _tokens(self, text: str, param: str, **how: bool) -> list[int]:
        """A text that is far too long is read only until that shows."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"the prompt holds {error.object[error.start]!a}, half of a character", param
            ) from error
        size, count = WIDE * self.context, 0
        for begin in range(0, len(text), size) if len(text) > size else ():
            count += len(self.tokenizer(text[begin : begin + size], add_special_tokens=False).input_ids)
            if count > 2 * self.context:  # not exact: where a piece ends, a token may be cut
                raise self._too_long(f"more than {self.context}", param)
        return list(self.tokenizer(text, **how).input_ids)

    def _too_long(self, count: str, param: str) -> ApiError:
        message = f"the prompt has {count} tokens, and a text may come to {self.context}: shorten it"
        return ApiError(400, message, param, "context_length_exceeded")


def _templated(message: Message) -> dict[str, Any]:
    """As chat templates read it: text alone, arguments of calls as objects."""
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _object(call)}}
            for call in message.tool_calls
        ]
    return found


def _object(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the arguments of call {call.id!r} are no JSON: {error}", "messages") from error
