"""Encode the prompts of requests; chats are rendered with the model's chat template."""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from redrafter.errors import first_line
from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve.answers.thoughts import Thinking, ThoughtMarks, thought_marks
from redrafter.serve.control_tokens import ControlTokens, choose_marker
from redrafter.serve.encoding import TextEncoder
from redrafter.serve.images import ChatImageReader
from redrafter.serve.protocol.requests import ApiError, ChatRequest, Message, TextPart, ToolCall
from redrafter.serve.tools import describe_tools, template_tools

CHUNK_CHARACTERS = 16  # per token of context; longer texts are counted in chunks of this size
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class ChatTemplate:
    """The chat template of a tokenizer that has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        template: str | dict[str, str] = tokenizer.chat_template
        self._texts = list(template.values()) if isinstance(template, dict) else [template]

    @property
    def text(self) -> str:
        """Source of the template; several templates of a tokenizer are joined."""
        return "\n".join(self._texts)

    @cached_property
    def special(self) -> dict[int, str]:
        """Special tokens by id."""
        added = self._tokenizer.added_tokens_decoder
        return {number: token.content for number, token in added.items() if token.special}

    @cached_property
    def unspelled(self) -> dict[str, int]:
        """Ids of added tokens that literal text in a grammar cannot produce, as llguidance decodes them."""
        added = {
            token.content: number for number, token in self._tokenizer.added_tokens_decoder.items() if token.content
        }
        special = {*self.special.values()}
        return {text: number for text, number in added.items() if text in special or re.fullmatch("<.*>", text)}

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether the template reads content only as a list of parts, and drops a plain string."""
        probe = "a text to look for"
        try:
            return probe not in self.render([{"role": "user", "content": probe}], None, add_generation_prompt=True)
        except ApiError:
            return False

    @cached_property
    def reads_tools(self) -> bool:
        """Return whether the template describes tools to the model, and so determines the tool-call format."""
        talk = [{"role": "user", "content": "a text"}]
        tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
        try:
            return self.render(talk, [tool]) != self.render(talk, None)
        except ApiError:  # the template rejects this minimal chat: assume that it reads tools
            return True

    @cached_property
    def places_system_messages(self) -> bool:
        """Return whether the template renders a later system message at its position."""
        roles = ("system", "user", "assistant", "system", "user")
        texts = [f"the text number {number} to look for" for number in range(len(roles))]
        # Some templates move or drop system messages after the first, which only rendering shows.
        talk = [{"role": role, "content": _content(text, self)} for role, text in zip(roles, texts, strict=True)]
        try:
            written = self.render(talk, None)
        except ApiError:
            return False
        places = [written.find(text) for text in texts]  # -1 for a message that was dropped
        return places == sorted(places)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads, except messages, tools and variables that the tokenizer supplies."""
        undeclared: set[str] = set()
        for text in self._texts:
            environment = _compile_jinja_template(text).environment
            undeclared |= meta.find_undeclared_variables(environment.parse(text)) - set(environment.globals)
        supplied = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"}
        return frozenset(undeclared - supplied - {"messages", *self._tokenizer.special_tokens_map})

    def check(self, variables: dict[str, Any], param: str) -> None:
        """Raise `ApiError` for the field `param` if the template does not read all of the variables."""
        if unknown := [name for name in variables if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none"
            raise ApiError(400, f"{param}: the chat template reads no {unknown[0]!r}; it reads {known}", param)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **variables: Any) -> str:
        """Render a chat with `apply_chat_template`, or raise `ApiError` if the template rejects it."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except _TEMPLATE_ERRORS as error:
            raise ApiError(400, f"the chat template refuses: {first_line(error)}", "messages") from error
        return str(text)


@dataclass
class PromptEncoder:
    """Encodes prompts, and raises `ApiError` for malformed, empty or too long ones."""

    tokenizer: PreTrainedTokenizerBase
    model: str  # name of the model for clients
    vocabulary: int  # size of the target's vocabulary
    context: int  # most tokens of a prompt and its answer
    special_tokens_in_content: bool = False  # whether control tokens spelt in messages are encoded as such
    reasoning_parser: str = "auto"  # vLLM's name of the reasoning parser
    images: ChatImageReader | str = "this model takes no images"  # the reason, where there is no reader of images
    control: ControlTokens | None = None  # of the tokenizer and template; None: created on first use

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises `ApiError` if there is none."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, f"{self.model} has no chat template; use /v1/completions", "messages", "no_chat_template"
            )
        return self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """Marks around the model's thoughts; None for a model without thoughts."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return thought_marks(self.reasoning_parser, self.template.text, added)

    def with_context(self, context: int) -> "PromptEncoder":
        """Return a copy with another context length, which shares the processes of this one."""
        other = replace(self, context=context)
        other.__dict__["_encoder"] = self._encoder
        if self.tokenizer.chat_template:
            other.__dict__["_control"] = self._control
        return other

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer) if self.control is None else self.control.encoder

    @cached_property
    def _control(self) -> ControlTokens:
        return self.control or ControlTokens(self.tokenizer, self.template.text, self._encoder)

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, including the tokenizer's special tokens if `add_special_tokens`."""
        self._check_size(text, "prompt")
        return self._checked(self._encoder.encode(text, "prompt", add_special_tokens=add_special_tokens), "prompt")

    def encode_prompts(self, prompt: str | list[Any]) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request: a string or token ids, or a list of either."""
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt") for text in prompts]

    def encode_chat(
        self, request: ChatRequest, decoder: SandboxedProcess | None = None
    ) -> tuple[list[int], Thinking, dict[str, Any] | None]:
        """Render a chat request with the chat template, and encode it.

        Images are decoded in the process `decoder`, or in a new one. Raises `ApiError` also if there is no template, or
        if it rejects the request.

        Returns:
            Token ids, whether they end within a thought that the answer continues, and the model's image inputs (None
            for a prompt without images).
        """
        urls = [url for message in request.messages for url in message.images]
        reader = None
        if urls:
            if isinstance(self.images, str):
                raise ApiError(400, self.images, "messages", "no_images")
            reader = self.images
            if len(urls) > (most := reader.options.max_images):
                raise ApiError(400, f"{len(urls)} images in one request; at most {most}", "messages")
        template = self.template
        tools = template_tools(request.callable_tools)
        messages = [_template_message(message, template) for message in request.messages]
        variables = self._variables(request)
        marker = choose_marker(messages, tools, variables, template.text)
        text = self._render(messages, None, variables, marker)
        if tools:
            with_tools = self._render(messages, tools, variables, marker)
            if with_tools == text:  # the template ignores tools
                description = describe_tools(tools, request.parallel_tool_calls is not False)
                messages = [{"role": "system", "content": _content(description, template)}, *messages]
                with_tools = self._render(messages, None, variables, marker)
            text = with_tools
        # Checked before encoding, which takes time and memory in proportion to the text.
        self._check_size(text, "messages")
        inputs: dict[str, Any] | None = None
        if reader is not None:
            text, inputs = reader.place(text, urls, decoder)
        text, ids = self._control.encode(text, marker)
        thinking: Thinking = "over"
        # The template may have opened a thought at the end of the prompt, so the answer begins inside it.
        if (marks := self.thoughts) is not None and request.continue_final_message:
            thinking = "open" if marks.after(request.messages[-1].text) == "open" else "over"
        elif marks is not None:
            thinking = marks.after(text.rstrip()[-max(len(marks.begin), len(marks.end)) :])
        ids = self._checked(ids, "messages")
        if reader is not None and inputs is not None:
            inputs |= reader.token_types(ids)
        return ids, thinking, inputs

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
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
        """Render a chat with `marker` inserted into the control tokens that the request spells."""
        if self.special_tokens_in_content:
            return self.template.render(list(messages), tools, **variables)
        control = self._control
        marked = [control.mark_message(message, marker) for message in messages]
        return self.template.render(marked, control.mark(tools, marker), **control.mark(variables, marker))

    def _checked(self, prompt: str | list[int], param: str) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(prompt, param)
            prompt = self._encoder.encode(prompt, param, add_special_tokens=True)
        if not prompt:
            raise ApiError(400, "the prompt is empty", param)
        # Out-of-range ids would read past the embedding table on the device.
        if (bad := next((token for token in prompt if token >= self.vocabulary), None)) is not None:
            raise ApiError(400, f"token id {bad} is out of range: there are {self.vocabulary} ids", param)
        if len(prompt) >= self.context:
            raise self._too_long(f"{len(prompt)}", param)
        return prompt

    def _check_size(self, text: str, param: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, f"the prompt holds {error.object[error.start]!a}, half of a character", param
            ) from error
        # A long text is encoded in chunks until it is clearly too long, instead of as a whole.
        size, count = CHUNK_CHARACTERS * self.context, 0
        for begin in range(0, len(text), size) if len(text) > size else ():
            count += len(self._encoder.encode(text[begin : begin + size], param))
            if count > 2 * self.context:  # with a margin, since a chunk may end within a token
                raise self._too_long(f"more than {self.context}", param)

    def _too_long(self, count: str, param: str) -> ApiError:
        message = f"the prompt has {count} tokens, and a text may come to {self.context}: shorten it"
        return ApiError(400, message, param, "context_length_exceeded")


def _template_message(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as chat templates read it: call arguments as objects, content as a string or as parts."""
    # OpenAI renamed the system role; most templates know only the old name.
    role = "system" if message.role == "developer" and "developer" not in template.text else message.role
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
    """Return text content as a string, or as a list of one part if the template reads only parts."""
    return [{"type": "text", "text": text}] if template.reads_parts else text


def _parse_arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the arguments of call {call.id!r} are no JSON: {error}", "messages") from error
