"""Encode the prompts of requests."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve.chat.control_tokens import ControlTokens, choose_marker
from redrafter.serve.chat.template import THINK_TAGS, ChatTemplate
from redrafter.serve.chat.tools import describe_tools, template_tools
from redrafter.serve.images import ImageReader
from redrafter.serve.protocol.messages import Message, TextPart, ToolCall
from redrafter.serve.protocol.requests import ApiError, ChatRequest

__all__ = ["ChatPrompt", "Prompts"]

CHUNK_CHARACTERS = 16  # for each token of the context: a longer text is counted in chunks of so many characters


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt of a chat.

    Attributes:
        ids: Token ids.
        thinking: Whether the prompt ends within thoughts, so that the answer goes on with them.
        images: What the model takes of its images beside the ids; None for a prompt of text.
    """

    ids: list[int]
    thinking: bool
    images: dict[str, Any] | None = None


@dataclass
class Prompts:
    """Encodes prompts, and raises `ApiError` for those that are malformed, empty or too long.

    Args:
        tokenizer: The model's tokenizer.
        model: Name of the model that clients know.
        vocabulary: Number of the target's ids.
        context: Most tokens of a prompt and its answer.
        special_tokens_in_content: Whether control tokens that a message spells are encoded as such.
        images: Reads the images of chats, or says why none are read.
    """

    tokenizer: PreTrainedTokenizerBase
    model: str
    vocabulary: int
    context: int
    special_tokens_in_content: bool = False
    images: ImageReader | str = "this model takes no images"

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises `ApiError` if the model has none."""
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

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of one text, with the tokenizer's special tokens around it if `add_special_tokens`."""
        self._check_size(text, "prompt")
        return self._checked(list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids), "prompt")

    def encode_prompts(self, prompt: str | list[Any]) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request.

        Args:
            prompt: The request's `prompt`: a text or token ids, or a list of such.

        Raises:
            ApiError: If there is no prompt, or one cannot be used.
        """
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt") for text in prompts]

    def encode_chat(self, request: ChatRequest, decoder: SandboxedProcess | None = None) -> ChatPrompt:
        """Render a chat request with the chat template, and encode it.

        Args:
            request: The request.
            decoder: The process to decode its images in; None for a new one.

        Raises:
            ApiError: If there is no template, it refuses the request, or the prompt is too long.
        """
        urls = [url for message in request.messages for url in message.images]
        reader = self._image_reader(len(urls)) if urls else None
        tools = template_tools(request.callable_tools)
        messages = [_template_message(message, self.template) for message in request.messages]
        variables = self._variables(request)
        marker = choose_marker(messages, tools, variables, self.template.text)
        text = self._render(messages, None, variables, marker)
        if tools:
            with_tools = self._render(messages, tools, variables, marker)
            if with_tools == text:  # the template ignores tools
                parallel_calls = request.parallel_tool_calls is not False
                description = describe_tools(tools, parallel_calls)
                messages = [{"role": "system", "content": _content(description, self.template)}, *messages]
                with_tools = self._render(messages, None, variables, marker)
            text = with_tools
        self._check_size(text, "messages")
        placed = None if reader is None else reader.place(text, urls, decoder)
        text, ids = self._control.encode(text if placed is None else placed.text, marker)
        begin, end = THINK_TAGS
        tail = request.messages[-1].text if request.continue_final_message else text.rstrip()[-len(begin) :]
        thinking = tail.rfind(begin) > tail.rfind(end)
        ids = self._checked(ids, "messages")
        if reader is None or placed is None:
            return ChatPrompt(ids, thinking)
        return ChatPrompt(ids, thinking, placed.inputs | reader.token_types(ids))

    def _image_reader(self, count: int) -> ImageReader:
        """Return what reads a request's images, or raise `ApiError` where none or fewer are read."""
        if isinstance(self.images, str):
            raise ApiError(400, self.images, "messages", "no_images")
        self.images.check_count(count)
        return self.images

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """Return the variables that a request has for the chat template, and options of `apply_chat_template`."""
        self.template.check(request.chat_template_kwargs or {}, "chat_template_kwargs")
        variables = dict(request.chat_template_kwargs or {})
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(request, name)) is not None:
                self.template.check({name: value}, name)
                variables[name] = value
        continues = request.continue_final_message
        add_prompt = not continues and request.add_generation_prompt is not False
        return variables | {"add_generation_prompt": add_prompt, "continue_final_message": continues}

    def _render(
        self, messages: Iterable[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any], marker: str
    ) -> str:
        """Render a chat with `marker` in the control tokens that the request spells."""
        if self.special_tokens_in_content:
            return self.template.render(list(messages), tools, **variables)
        control = self._control
        marked = [control.mark_message(message, marker) for message in messages]
        return self.template.render(marked, control.mark(tools, marker), **control.mark(variables, marker))

    def _checked(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the token ids of a prompt, checked to be not empty, within the vocabulary and short enough."""
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
        """Refuse a text that is far too long without tokenizing all of it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"the prompt holds {error.object[error.start]!a}, half of a character", param
            ) from error
        size, count = CHUNK_CHARACTERS * self.context, 0
        for begin in range(0, len(text), size) if len(text) > size else ():
            count += len(self.tokenizer(text[begin : begin + size], add_special_tokens=False).input_ids)
            if count > 2 * self.context:  # not exact: the end of a chunk may cut a token
                raise self._too_long(f"more than {self.context}", param)

    def _too_long(self, count: str, param: str) -> ApiError:
        message = f"the prompt has {count} tokens, and a text may come to {self.context}: shorten it"
        return ApiError(400, message, param, "context_length_exceeded")


def _template_message(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as chat templates read it: arguments of calls as objects, content as one text or as parts."""
    role = "system" if message.role == "developer" and not template.knows_developer else message.role
    content: Any = _content(message.text, template)
    if message.images:
        content = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ]
    templated: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            templated[name] = value
    if message.tool_calls:
        templated["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _parse_arguments(call)},
            }
            for call in message.tool_calls
        ]
    return templated


def _content(text: str, template: ChatTemplate) -> str | list[dict[str, Any]]:
    """Return the content of a message of text, as one part where the template reads nothing else."""
    return [{"type": "text", "text": text}] if template.reads_parts else text


def _parse_arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the arguments of call {call.id!r} are no JSON: {error}", "messages") from error
