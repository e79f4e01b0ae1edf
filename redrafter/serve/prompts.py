"""Encode the prompts of requests; chats are rendered with the model's chat template."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.chat.messages import prepare_chat
from redrafter.chat.template import ChatError, ChatTemplate, chat_template_of, opens_with_bos
from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve.control_tokens import ControlTokens, choose_marker
from redrafter.serve.encoding import TextEncoder
from redrafter.serve.images import ChatImageReader
from redrafter.serve.protocol.requests import ApiError, ChatRequest

_NOT_RENDERED = {"parsed", "annotations", "refusal", "function_call"}  # fields of a message
CHUNK_CHARACTERS = 16  # per token of context; longer texts are counted in chunks of this size


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
        return chat_template_of(self.tokenizer)

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """Marks around the model's thoughts; None for a model without thoughts."""
        return self.template.thoughts(self.reasoning_parser)

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

    def encode_prompts(self, prompt: str | list[Any], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request: a string or token ids, or a list of either.

        `add_special_tokens` adds the tokenizer's special tokens to strings; None adds them unless a string opens with
        the BOS token.
        """
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt", add_special_tokens) for text in prompts]

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
        text, marker = self._render(request)
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

    def _render(self, request: ChatRequest) -> tuple[str, str]:
        """Render a chat, and return it with the marker in the control tokens that the request spells."""
        try:
            messages, tools = prepare_chat(
                self.template,
                [message.model_dump(exclude=_NOT_RENDERED, exclude_none=True) for message in request.messages],
                [{"type": tool.type, "function": dict(tool.function)} for tool in request.callable_tools],
                parallel_calls=request.parallel_tool_calls is not False,
            )
            variables = self._variables(request)
            marker = choose_marker(messages, tools, variables, self.template.text)
            if not self.special_tokens_in_content:
                messages = [self._control.mark_message(message, marker) for message in messages]
                tools, variables = self._control.mark(tools, marker), self._control.mark(variables, marker)
            return self.template.render(messages, tools, **variables), marker
        except ChatError as error:
            raise ApiError(400, str(error), error.param) from error

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        self.template.check(request.chat_template_kwargs or {})
        variables = dict(request.chat_template_kwargs or {})
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(request, name)) is not None:
                self.template.check({name: value}, name)
                variables[name] = value
        continues = request.continue_final_message
        add_prompt = not continues and request.add_generation_prompt is not False
        return variables | {"add_generation_prompt": add_prompt, "continue_final_message": continues}

    def _checked(self, prompt: str | list[int], param: str, add_special_tokens: bool | None = None) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(prompt, param)
            if add_special_tokens is None:
                add_special_tokens = not opens_with_bos(prompt, self.tokenizer)
            prompt = self._encoder.encode(prompt, param, add_special_tokens=add_special_tokens)
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
