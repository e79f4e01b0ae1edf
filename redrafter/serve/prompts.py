"""Encode the prompts of requests; chats are rendered with the model's chat template."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from redrafter.chat.control_tokens import choose_marker, control_tokens_of, remove_markers
from redrafter.chat.messages import render_chat
from redrafter.chat.template import ChatError, ChatTemplate, chat_template_of, opens_with_bos
from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.errors import check_characters
from redrafter.sandbox.process import SandboxedProcess
from redrafter.scheduler.request import RequestBounds, check_prompt, too_long
from redrafter.serve.encoding import TextEncoder
from redrafter.serve.images import ChatImageReader
from redrafter.serve.protocol.requests import TOO_LONG, ApiError, ChatRequest, blaming

_NOT_RENDERED = {"parsed", "annotations"}  # fields of a message
CHUNK_CHARACTERS = 16  # per token of context; longer texts are counted in chunks of this size


class EncodedChat(NamedTuple):
    """A chat as the engine reads it.

    Attributes:
        ids: Token ids of the prompt.
        thinking: Whether they end within a thought that the answer continues.
        images: The model's image inputs; None for a prompt without images.
    """

    ids: list[int]
    thinking: Thinking
    images: dict[str, Any] | None


@dataclass
class PromptEncoder:
    """Encodes prompts, and raises `ApiError` for malformed, empty or too long ones."""

    tokenizer: PreTrainedTokenizerBase
    model: str  # name of the model for clients
    bounds: RequestBounds  # of the engine
    special_tokens_in_content: bool = False  # whether control tokens spelt in messages are encoded as such
    reasoning_parser: str = "auto"  # vLLM's name of the reasoning parser
    images: ChatImageReader | str = "this model takes no images"  # the reason, where there is no reader of images
    # By the `id` of the tokenizer, and of its copy that reads control tokens as text.
    encoders: dict[int, TextEncoder] = field(default_factory=dict, repr=False)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises `ApiError` if there is none."""
        if not self.tokenizer.chat_template:
            what = f"{self.model} has no chat template; use /v1/completions"
            raise ApiError(400, what, "messages", "no_chat_template")
        return chat_template_of(self.tokenizer)

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """Marks around the model's thoughts; None for a model without thoughts."""
        return self.template.thoughts(self.reasoning_parser)

    def with_context(self, context: int) -> "PromptEncoder":
        """Return a copy with another context length, which shares the encoders of this one."""
        return replace(self, bounds=replace(self.bounds, max_seq_len=context, max_input_len=None))

    def encode_prompts(self, prompt: str | list[Any], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request: a string or token ids, or a list of either.

        `add_special_tokens` adds the tokenizer's special tokens to strings; None adds them unless a string opens with
        the BOS token.
        """
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise ApiError(400, "there is no prompt", "prompt")
        return [self._checked(text, "prompt", add_special_tokens) for text in prompts]

    def encode_chat(self, request: ChatRequest, decoder: SandboxedProcess | None = None) -> EncodedChat:
        """Render a chat request with the chat template, and encode it.

        Images are decoded in the process `decoder`, or in a new one. Raises `ApiError` also if there is no template, or
        if it rejects the request.
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
        try:
            ids = control_tokens_of(self.template).encode(text, marker, self._encode)
        except ChatError as error:
            raise ApiError(400, str(error), error.param) from error
        text = remove_markers(text, marker)
        thinking: Thinking = "over"
        # The template may have opened a thought at the end of the prompt, so the answer begins inside it.
        if (marks := self.thoughts) is not None and request.continue_final_message:
            thinking = "open" if marks.after(request.messages[-1].text) == "open" else "over"
        elif marks is not None:
            thinking = marks.after(text.rstrip()[-max(len(marks.begin), len(marks.end)) :])
        ids = self._checked(ids, "messages")
        if reader is not None and inputs is not None:
            inputs |= reader.token_types(ids)
        return EncodedChat(ids, thinking, inputs)

    def _render(self, request: ChatRequest) -> tuple[str, str]:
        """Render a chat, and return it with the marker in the control tokens that the request spells."""
        try:
            messages = [message.model_dump(exclude=_NOT_RENDERED, exclude_none=True) for message in request.messages]
            tools = [{"type": tool.type, "function": dict(tool.function)} for tool in request.callable_tools]
            variables = self._variables(request)
            marker = ""
            if not self.special_tokens_in_content:
                marker = choose_marker(messages, tools, variables, self.template.text)
            text = render_chat(
                self.template,
                messages,
                tools,
                variables,
                marker=marker,
                parallel_calls=request.parallel_tool_calls is not False,
                add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
            )
        except ChatError as error:
            raise ApiError(400, str(error), error.param) from error
        return text, marker

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        variables = dict(request.chat_template_kwargs or {})
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(request, name)) is not None:
                self.template.check({name: value}, name)
                variables[name] = value
        return variables

    def _encode(
        self, tokenizer: PreTrainedTokenizerBase | Tokenizer, text: str, add_special_tokens: bool = False
    ) -> list[int]:
        encoder = self.encoders.get(id(tokenizer)) or self.encoders.setdefault(id(tokenizer), TextEncoder(tokenizer))
        return encoder.encode(text, add_special_tokens=add_special_tokens)

    def _checked(self, prompt: str | list[int], param: str, add_special_tokens: bool | None = None) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(prompt, param)
            if add_special_tokens is None:
                add_special_tokens = not opens_with_bos(prompt, self.tokenizer)
            prompt = self._encode(self.tokenizer, prompt, add_special_tokens)
        with blaming(param, TOO_LONG if len(prompt) > self.bounds.longest_prompt else None):
            check_prompt(prompt, self.bounds)
        return prompt

    def _check_size(self, text: str, param: str) -> None:
        with blaming(param):
            check_characters(text, "the prompt")
        # A long text is encoded in chunks until it is clearly too long, instead of as a whole.
        most = self.bounds.longest_prompt
        size, count = CHUNK_CHARACTERS * (most + 1), 0
        for begin in range(0, len(text), size) if len(text) > size else ():
            count += len(self._encode(self.tokenizer, text[begin : begin + size]))
            if count > 2 * (most + 1):  # with a margin, since a chunk may end within a token
                with blaming(param, TOO_LONG):
                    raise too_long(f"more than {most}", self.bounds)
