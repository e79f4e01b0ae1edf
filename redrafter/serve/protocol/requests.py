"""Models of OpenAI's completion and chat requests, with fields of vLLM and this server. Others are rejected by name.

https://platform.openai.com/docs/api-reference
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from redrafter.chat.schemas import read_parameters
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.serve.protocol import fields

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
MAX_CHOICES = 128  # choices per prompt
MAX_TOOLS = 128
MAX_SALT_CHARACTERS = 512
MAX_MESSAGE_CHARACTERS, MAX_PARAM_CHARACTERS = 1000, 100  # in the body of an error


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]  # OpenAI's end at 64; other protocols' are longer


class Function(fields.Strict):
    """Definition of a function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(read_parameters)] | None = None
    strict: StrictBool | None = None


class Tool(fields.Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(fields.Strict):
    """Name of the function that must be called."""

    name: str


class ToolChoice(fields.Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoices = Annotated[
    Literal["none", "auto", "required"] | ToolChoice,
    fields.OneOf("'none', 'auto', 'required' or the name of a function as an object"),
]


class TextPart(fields.Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


def _check_url(url: object) -> object:
    if isinstance(url, str) and not DATA_URL.match(url):
        message = "this server fetches nothing: send the image itself, as data:image/png;base64,..."
        raise PydanticCustomError("unsupported", message)
    return url


DataUrl = Annotated[str, BeforeValidator(_check_url)]  # an image in base64


class ImageUrl(fields.Strict):
    """An image within a URL.

    Attributes:
        url: A `data:` URL in base64.
        detail: Requested resolution; ignored, since the model's processor determines it.
    """

    url: DataUrl
    detail: Literal["auto"] = "auto"


class ImagePart(fields.Strict):
    """An image as a part of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(fields.Strict):
    """A function that the model has called.

    Attributes:
        name: Name of the function.
        arguments: Arguments as JSON.
        parsed_arguments: Arguments as parsed by OpenAI's client; ignored.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(fields.Strict):
    """A call that the model has made.

    Attributes:
        id: Id of the call, which its result refers to.
        index: Index of a streamed call; ignored in favour of the order of the list.
        type: Kind of tool.
        function: The function and its arguments.
    """

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


_Part = Annotated[TextPart | ImagePart, fields.OneOf("a part of text or an image")]


class Message(fields.Strict):
    """One message of a chat. Messages returned by this server or by OpenAI may be sent back unchanged.

    `parsed`, which OpenAI's client derives from the content, is ignored. `reasoning` is vLLM's newer name of
    `reasoning_content`, which has the text of either after validation.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | fields.Parts[_Part], fields.OneOf("a text or a list of parts")] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: fields.Parts[ToolCall] | None = None
    tool_call_id: str | None = None
    parsed: Any = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _merge_thoughts(self) -> "Message":
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            what = "it differs from reasoning_content, which is another name of it: give one of the two"
            raise PydanticCustomError("two_thoughts", what, {"field": "reasoning"})
        if self.reasoning and not self.reasoning_content:
            self.reasoning_content = self.reasoning
        return self

    @model_validator(mode="after")
    def _check_images(self) -> "Message":
        if self.images and self.role != "user":
            raise PydanticCustomError("image", "images are read in messages of the user alone")
        return self

    @property
    def text(self) -> str:
        """The content as one string: text parts joined, without images; empty if there is no content."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def parts(self) -> "list[TextPart | ImagePart]":
        """The content as parts; empty if there is no content."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or []

    @property
    def images(self) -> list[str]:
        """The `data:` URLs of its images, in their order."""
        return [part.image_url.url for part in self.parts if isinstance(part, ImagePart)]


TOO_LONG = "context_length_exceeded"  # code of an error about too many tokens


class ApiError(ReDrafterError, HTTPException):
    """An error to return to the client: HTTP status, message, path of the invalid field, code, and headers.

    It is an `HTTPException` because FastAPI replaces any other exception raised while a body is read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        HTTPException.__init__(self, status, message, headers)
        self.status, self.param, self.code = status, param, code

    def __str__(self) -> str:
        return self.detail


@contextmanager
def blaming(param: str, code: str | None = None) -> Iterator[None]:
    """Raise an `ArgumentError` of the context as an `ApiError` about a field of the request."""
    try:
        yield
    except ArgumentError as error:
        raise ApiError(400, str(error), param, code) from error


class TooManyTokensError(ApiError):
    """The prompt and the requested tokens exceed the context. The message has vLLM's wording.

    Attributes:
        prompt, asked, context: Numbers of tokens of the prompt, of the requested output and of the context.
    """

    def __init__(self, prompt: int, asked: int, context: int, param: str):
        self.prompt, self.asked, self.context = prompt, asked, context
        lengths = f"maximum context length is {context} tokens and your request has {prompt} input tokens"
        message = f"'{param}' is too large: {asked}. This model's {lengths} ({asked} > {context} - {prompt})."
        super().__init__(400, f"{message} Ask for {context - prompt} at most.", param, TOO_LONG)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format. Takes the arguments of `ApiError`."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    # Truncate client text, and replace lone surrogates, which cannot be encoded.
    message = message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
    param = param and param[:MAX_PARAM_CHARACTERS].encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class SharedFields(fields.Strict):
    """Fields that all generation requests share: first OpenAI's, then vLLM's and this server's."""

    model: str | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 62)] | None = None
    stream: StrictBool | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    user: str | None = None

    top_k: Annotated[int, Field(strict=True, ge=-1, le=fields.MAX_INTEGER)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    ignore_eos: StrictBool = False
    speculate: StrictBool = True
    num_speculative_tokens: Annotated[int, Field(strict=True)] | None = Field(
        None,
        validation_alias=AliasChoices("num_speculative_tokens", "speculative.n_max"),  # the latter is llama.cpp's
    )
    priority: Annotated[int, Field(strict=True, ge=-fields.MAX_INTEGER, le=fields.MAX_INTEGER)] = 0

    @model_validator(mode="after")
    def _check_drafts(self) -> "SharedFields":
        if not self.speculate and self.num_speculative_tokens:
            raise ValueError("speculate=false takes no drafts: leave it out, or give num_speculative_tokens 0")
        return self


class _Request(SharedFields):
    """Fields that completion and chat requests share: first OpenAI's, then vLLM's and this server's."""

    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    logit_bias: fields.Bias | None = None
    max_tokens: fields.Count | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: fields.Stops | None = None
    stream_options: fields.StreamOptions | None = None

    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=fields.MAX_INTEGER)] | None = None
    stop_token_ids: fields.Ids | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    structured_outputs: fields.StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> "_Request":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`. With `max_tokens` 0, only the prompt is echoed."""

    max_tokens: Annotated[int, Field(strict=True, ge=0, le=fields.MAX_INTEGER)] | None = None
    prompt: fields.Prompts
    add_special_tokens: StrictBool | None = None
    echo: StrictBool = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 is for echo=true; else ask for 1 or more")
        return self


class ChatRequest(_Request):
    """Body of `POST /v1/chat/completions`: fields of OpenAI, then of vLLM."""

    messages: Annotated[fields.Parts[Message], Field(min_length=1)]
    max_completion_tokens: fields.Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    response_format: fields.ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoices | None = None
    parallel_tool_calls: StrictBool | None = None
    thinking_token_budget: Annotated[int, Field(strict=True, ge=0, le=fields.MAX_INTEGER)] | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    verbosity: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    metadata: fields.Labels | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tools have the name {twice[0]!r} twice: give each another name")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}; the tools are {names}")
        # Each constrains the whole answer, so two could contradict each other.
        grammars = (
            self.structured_outputs is not None,
            self.response_format is not None and self.response_format.type != "text",
            self.tool_choice not in (None, "none", "auto"),
        )
        if sum(grammars) > 1:
            raise ValueError("give one of response_format, structured_outputs and tool_choice")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message continues a message: leave out add_generation_prompt")
        if self.continue_final_message and (self.messages[-1].role != "assistant" or not self.messages[-1].text):
            raise ValueError("continue_final_message needs a last message of the assistant that has a text")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the model may call; empty with `tool_choice` 'none'."""
        return [] if self.tool_choice == "none" else self.tools or []
