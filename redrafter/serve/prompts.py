"""From what a request asks to be continued to tokens."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.serve.chat.control_tokens import ControlTokens, marker_for
from redrafter.serve.chat.template import THINK, ChatTemplate
from redrafter.serve.chat.tools import described, templated
from redrafter.serve.protocol.requests import ApiError, ChatRequest, Message, ToolCall

__all__ = ["ChatPrompt", "Prompts"]

WIDE = 16  # characters of a text, by the tokens of the longest one, that are tokenized at once to see its length


@dataclass(frozen=True)
class ChatPrompt:
    """The tokens of a chat. thinking: whether the text ends within thoughts that the template opened."""

    ids: list[int]
    thinking: bool


@dataclass
class Prompts:
    """Reads prompts, and raises `ApiError` for what cannot be written on from.

    Args:
        tokenizer: The tokenizer of the model.
        model: The name that clients know.
        vocabulary: How many ids the target has.
        context: Tokens of the longest text.
        special_tokens_in_content: Whether a control token that a message spells is one.
    """

    tokenizer: PreTrainedTokenizerBase
    model: str
    vocabulary: int
    context: int
    special_tokens_in_content: bool = False

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises `ApiError` where the model has none."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, f"{self.model} has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        return self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, self.template.text)

    def text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of one text, with or without those that the tokenizer puts around it."""
        self._check_size(text, "prompt")
        return self._checked(list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids), "prompt")

    def several(self, given: str | list[Any]) -> list[list[int]]:
        """Of `/v1/completions`: one text or many, or their tokens."""
        texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not texts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt") for text in texts]

    def talk(self, request: ChatRequest) -> ChatPrompt:
        """Of `/v1/chat/completions`."""
        tools = templated(request.callable_tools)
        messages = [_templated(message, self.template.knows_developer) for message in request.messages]
        variables = self._variables(request)
        marker = marker_for(messages, tools, variables, self.template.text)
        text = self._render(messages, None, variables, marker)
        if tools:
            told = self._render(messages, tools, variables, marker)
            if told == text:  # this template knows nothing of tools
                several = request.parallel_tool_calls is not False
                messages = [{"role": "system", "content": described(tools, several)}, *messages]
                told = self._render(messages, None, variables, marker)
            text = told
        self._check_size(text, "messages")
        text, ids = self._control.encode(text, marker)
        opened = messages[-1]["content"] if request.continue_final_message else text.rstrip()[-len(THINK[0]) :]
        return ChatPrompt(self._checked(ids, "messages"), opened.rfind(THINK[0]) > opened.rfind(THINK[1]))

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """What a request asks of the chat template."""
        self.template.check(request.chat_template_kwargs or {}, "chat_template_kwargs")
        asked = dict(request.chat_template_kwargs or {})
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(request, name)) is not None:
                self.template.check({name: value}, name)
                asked[name] = value
        begin = not request.continue_final_message and request.add_generation_prompt is not False
        return asked | {"add_generation_prompt": begin, "continue_final_message": request.continue_final_message}

    def _render(
        self, messages: Iterable[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any], marker: str
    ) -> str:
        if self.special_tokens_in_content:
            return self.template.render(list(messages), tools, **variables)
        control = self._control
        marked = [control.mark_message(message, marker) for message in messages]
        return self.template.render(marked, control.mark(tools, marker), **control.mark(variables, marker))

    def _checked(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the tokens of a prompt that has any, of which all are known and no more than may be."""
        if isinstance(prompt, str):
            self._check_size(prompt, param)
            prompt = list(self.tokenizer(prompt).input_ids)
        if not prompt:
            raise ApiError(400, "the prompt is empty", param)
        if (bad := next((token for token in prompt if token >= self.vocabulary), None)) is not None:
            raise ApiError(400, f"token id {bad} is out of range: there are {self.vocabulary} ids", param)
        if len(prompt) >= self.context:
            raise self._too_long(f"{len(prompt)}", param)
        return prompt

    def _check_size(self, text: str, param: str) -> None:
        """Read a text that is far too long only until that shows."""
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

    def _too_long(self, count: str, param: str) -> ApiError:
        message = f"the prompt has {count} tokens, and a text may come to {self.context}: shorten it"
        return ApiError(400, message, param, "context_length_exceeded")


def _templated(message: Message, knows_developer: bool) -> dict[str, Any]:
    """Return a message as chat templates read it: text alone, arguments of calls as objects."""
    role = "system" if message.role == "developer" and not knows_developer else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
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
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the arguments of call {call.id!r} are no JSON: {error}", "messages") from error
