"""Types and validators of the fields of OpenAI's requests."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    StrictBool,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from redrafter.chat.schemas import without_nulls

SMALL_BODY_BYTES = 1 << 16  # a body of this size parses in a few milliseconds, without waiting for others
MAX_PROMPTS = 1024  # of one request, counting every choice
MAX_ENTRIES = 1 << 14  # of an object, such as logit_bias
MAX_PARTS = 4096  # messages of a request, parts of a message, calls of a message
MAX_CHOICE_TEXTS = 1 << 17  # in structured_outputs.choice
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000  # stop strings of a request, characters of each
MAX_INTEGER = 2**31 - 1  # for counts and ids

# Tags of the members of unions, by the types of their values. Pydantic puts them into the location of an error.
_TAGS: dict[type, str] = {str: "<text>", list: "<list>", bool: "<bool>", dict: "<object>", BaseModel: "<object>"}
_TAG = re.compile("<[a-z_ ]+>")
T = TypeVar("T")
# fail_fast, here and below: a list of a million invalid entries must not produce a million errors.
Parts = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PARTS)]


def field_path(error: ErrorDetails) -> str | None:
    """Return the path of the field that an error of pydantic is about, such as "messages.0.content", or None."""
    renamed = error.get("ctx", {}).get("field")  # an error of the object that contains the field
    keys = (str(key) for key in (*error["loc"], renamed) if key not in ("body", None))
    return ".".join(key for key in keys if not _TAG.fullmatch(key)) or None


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union that makes errors refer to the intended member rather than to each member.

    The type of the value selects the member; if all members are models, the value's field `type` does.

    Attributes:
        wanted: Description of valid values, for the error if no member matches.
    """

    wanted: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a union that pydantic validates by tags."""
        members = {member: _member_type(member) for member in get_args(source)}
        by_type = all(issubclass(kind, BaseModel) for kind in members.values())
        choices: dict[str, CoreSchema] = {}
        default = None
        for member, kind in members.items():
            tags = [f"{_tag_of(kind)}"]
            if by_type:
                field = kind.model_fields["type"]
                tags = [f"<{name}>" for name in get_args(field.annotation)]
                default = default if field.is_required() else field.default
            choices |= dict.fromkeys(tags, handler.generate_schema(member))

        def choose(value: object) -> str | None:
            if not by_type:
                return _tag_of(type(value))
            kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
            return f"<{kind}>" if isinstance(kind, str) else None

        message = f"Input should be {self.wanted}"
        return core_schema.tagged_union_schema(
            choices, choose, custom_error_type="wrong_kind", custom_error_message=message
        )


def _member_type(member: Any) -> Any:
    """Return the Python type of the values of a member of a union."""
    while get_origin(member) is Annotated:
        member = get_args(member)[0]
    return type(get_args(member)[0]) if get_origin(member) is Literal else get_origin(member) or member


def _tag_of(kind: type) -> str | None:
    return next((tag for base, tag in _TAGS.items() if issubclass(kind, base)), None)


def limit_entries(value: T) -> T:
    """Reject objects with very many entries, before each invalid entry produces an error."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value)} entries; at most {MAX_ENTRIES}")
    return value


class Strict(BaseModel):
    """Base of request objects: unknown fields are rejected, and null fields count as absent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        # Clients send null for fields that they do not set; OpenAI treats both alike.
        return {name: value for name, value in limit_entries(body).items() if value is not None}


Bias = Annotated[dict[str, Annotated[float, Field(strict=True, ge=-100, le=100)]], BeforeValidator(limit_entries)]
Labels = Annotated[dict[str, str], BeforeValidator(limit_entries)]
Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]], Field(fail_fast=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Stops = Annotated[_Stop | StopList, OneOf("a text or a list of texts")]


def _tag_prompt(value: object) -> str:
    if not isinstance(value, list):
        return "<text>" if isinstance(value, str) else ""
    first = value[0] if value else ""
    return "<list>" if isinstance(first, str) else "<lists of ids>" if isinstance(first, list) else "<ids>"


Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("<list>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("<lists of ids>")],
    Discriminator(
        _tag_prompt,
        custom_error_type="wrong_kind",
        custom_error_message="Input should be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


class StreamOptions(Strict):
    """Options of a streamed answer.

    Attributes:
        include_usage: Whether to send the usage in a last chunk.
        continuous_usage_stats: Field of vLLM. With include_usage, whether every chunk has its choice's usage so far.
        include_drafts: Field of this server. Whether each chunk's choice has `drafts`: its text split into runs written
            by accepted drafts and runs sampled by the target.
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
        dict[str, Any] | StrictBool, OneOf("a schema, which is an object"), BeforeValidator(without_nulls)
    ] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`, extended by llgtrt's `lark_grammar`."""

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
        Annotated[dict[str, Any] | str, OneOf("a schema, as an object or as its text"), BeforeValidator(without_nulls)]
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
