"""Types of the fields of OpenAI's requests, with their checks."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 1024  # of one request, counting each choice
MAX_ENTRIES = 1 << 14  # of an object, such as logit_bias
MAX_PARTS = 4096  # messages of a request, parts of a message, calls of a message
MAX_CHOICE_TEXTS = 1 << 17  # in structured_outputs.choice
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000  # stop strings of a request, characters of each
MAX_INTEGER = 2**31 - 1  # for counts and ids

# Tags of the members of unions. Pydantic puts them into the location of an error.
TEXT_TAG, LIST_TAG, IDS_TAG, ID_LISTS_TAG, OBJECT_TAG = "<text>", "<list>", "<ids>", "<lists of ids>", "<object>"
IMAGE_TAG = "<image>"
_TAG = re.compile("<[a-z_ ]+>")


def field_path(error: Any) -> str | None:
    """Return the path of the field that an error of pydantic is about, such as "messages.0.content", or None."""
    renamed = error.get("ctx", {}).get("field")  # an error of the object that holds the field
    keys = (str(key) for key in (*error["loc"], renamed) if key not in ("body", None))
    return ".".join(key for key in keys if not _TAG.fullmatch(key)) or None


def refuse_with(advice: str) -> BeforeValidator:
    """Return a validator for a field that OpenAI has and this server refuses. `advice` says what to do instead."""

    def refuse(value: Any) -> Any:
        raise PydanticCustomError("unsupported", "{advice}", {"advice": advice})

    return BeforeValidator(refuse)


def one_of(tag_of: Callable[[Any], str | None], wanted: str) -> Discriminator:
    """Return a discriminator for a union of tagged members, so that errors are about the member that was meant.

    `tag_of` returns the tag of a value, or None where it fits no member; `wanted` is what it may be, for the error.
    """
    return Discriminator(tag_of, custom_error_type="wrong_kind", custom_error_message=f"Input should be {wanted}")


def _tag_by(kinds: Mapping[type, str]) -> Callable[[Any], str | None]:
    return lambda value: next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None)


tag_text_or_list = _tag_by({str: TEXT_TAG, list: LIST_TAG})
tag_text_or_object = _tag_by({str: TEXT_TAG, dict: OBJECT_TAG, BaseModel: OBJECT_TAG})
_tag_schema = _tag_by({dict: OBJECT_TAG, bool: TEXT_TAG})  # a JSON schema


def _tag_prompt(value: Any) -> str | None:
    tag = tag_text_or_list(value)
    if tag != LIST_TAG or not value or isinstance(value[0], str):
        return tag
    return ID_LISTS_TAG if isinstance(value[0], list) else IDS_TAG


def limit_entries(value: Any) -> Any:
    """Refuse objects of very many entries, before each wrong entry becomes an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value)} entries; at most {MAX_ENTRIES}")
    return value


# Names of fields in earlier vLLM and in other servers and protocols, and the fields here that do the same. Of several,
# the first that the request has is suggested.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "ebnf": ("structured_outputs.ebnf",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking", "reasoning.effort"),
    "grammar": ("structured_outputs.ebnf or structured_outputs.lark",),
    "guided_choice": ("structured_outputs.choice", "text.format"),
    "guided_decoding": ("structured_outputs", "text.format"),
    "guided_grammar": ("structured_outputs.ebnf or structured_outputs.lark",),
    "guided_json": ("structured_outputs.json", "text.format"),
    "guided_json_object": ("structured_outputs.json_object", "text.format"),
    "guided_regex": ("structured_outputs.regex",),
    "input": ("messages", "prompt"),
    "instructions": ("system", "messages"),
    "json_schema": ("structured_outputs.json", "text.format"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_tokens": ("max_output_tokens",),
    "max_tokens_to_sample": ("max_tokens", "max_output_tokens"),
    "messages": ("prompt", "input"),
    "min_new_tokens": ("min_tokens",),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "num_return_sequences": ("n",),
    "output_format": ("output_config.format", "response_format", "text.format"),
    "prompt": ("messages",),
    "random_seed": ("seed",),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "regex": ("structured_outputs.regex",),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": ("text.format", "output_config.format", "structured_outputs.json"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "stop_words": ("stop", "stop_sequences"),
    "system": ("messages", "instructions"),
}


class Strict(BaseModel):
    """Base of request objects: unknown fields are refused, and fields that are null count as left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in limit_entries(body).items() if value is not None}
        for name in given.keys() & OTHER_NAMES.keys() - cls.model_fields.keys():
            for field in OTHER_NAMES[name]:
                if field.partition(".")[0] in cls.model_fields:
                    raise PydanticCustomError("unsupported", "give {instead}", {"field": name, "instead": field})
        return given


Bias = Annotated[dict[str, Annotated[float, Field(strict=True, ge=-100, le=100)]], BeforeValidator(limit_entries)]
Labels = Annotated[dict[str, str], BeforeValidator(limit_entries)]
# fail_fast, here and below: a million wrong entries must not become a million errors.
Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]], Field(fail_fast=True)]


Count = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Stops = Annotated[
    Annotated[_Stop, Tag(TEXT_TAG)] | Annotated[StopList, Tag(LIST_TAG)],
    one_of(tag_text_or_list, "a text or a list of texts"),
]
Prompts = Annotated[
    Annotated[str, Tag(TEXT_TAG)]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(LIST_TAG)]
    | Annotated[Ids, Tag(IDS_TAG)]
    | Annotated[list[Ids], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(ID_LISTS_TAG)],
    one_of(_tag_prompt, "a text, a list of texts, a list of token ids or a list of such lists"),
]


class StreamOptions(Strict):
    """Options of a streamed answer.

    Attributes:
        include_usage: Whether a last chunk has the usage.
        continuous_usage_stats: Field of vLLM. Whether, with include_usage, every chunk has the usage of its choice so
            far.
        include_drafts: Field of this server. Whether each chunk's choice has `drafts`: its text as runs that accepted
            drafts wrote, and runs that the target sampled itself.
        include_obfuscation: Not supported.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_drafts: StrictBool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    """JSON schema of a `response_format`."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[
        Annotated[dict[str, Any], Tag(OBJECT_TAG)] | Annotated[StrictBool, Tag(TEXT_TAG)],
        one_of(_tag_schema, "a schema, which is an object"),
    ] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`, with llgtrt's `lark_grammar` beside it."""

    type: Literal["text", "json_object", "json_schema", "lark_grammar"]
    json_schema: JsonSchema | None = None
    lark_grammar: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponseFormat":
        for name in ("json_schema", "lark_grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is given with type {name}, and only then")
        return self


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: a grammar, given as exactly one of these fields."""

    json_: (
        Annotated[
            Annotated[dict[str, Any], Tag(OBJECT_TAG)] | Annotated[str, Tag(TEXT_TAG)],
            one_of(tag_text_or_object, "a schema, as an object or as its text"),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICE_TEXTS)] | None = None
    lark: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _check_one_given(self) -> "StructuredOutputs":
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, lark, ebnf")
        return self
