"""Fields that OpenAI's requests are made of, and how each of them is checked."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "LIST",
    "MOST",
    "MOST_PARTS",
    "MOST_PROMPTS",
    "OBJECT",
    "TEXT",
    "Bias",
    "Count",
    "Ids",
    "Prompts",
    "ResponseFormat",
    "Stops",
    "StreamOptions",
    "Strict",
    "StructuredOutputs",
    "one_of",
    "place_of",
    "refused",
    "text_or_list",
    "text_or_object",
]

MOST_PROMPTS = 1024  # of one request, choices counted
MOST_BIASES = 1 << 14
MOST_PARTS = 4096  # messages of a request, parts of a message, calls in it
MOST_TEXTS = 1 << 17  # that a choice is among
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST = 2**31 - 1  # of a count or an id

# What a value of several kinds was read as; pydantic puts it into the place of an error.
TEXT, LIST, IDS, ID_LISTS, OBJECT = "<text>", "<list>", "<ids>", "<lists of ids>", "<object>"
_KIND = re.compile("<[a-z_ ]+>")


def place_of(error: Any) -> str | None:
    """Name the field that one of pydantic's errors is about, such as "messages.0.content"; None for the whole body."""
    places = (str(each) for each in error["loc"] if each != "body")
    return ".".join(each for each in places if not _KIND.fullmatch(each)) or None


def refused(advice: str) -> BeforeValidator:
    """Refuse any value of a field that OpenAI has and this server does not support. advice: what to do instead."""

    def refuse(value: Any) -> Any:
        raise PydanticCustomError("unsupported", "{advice}", {"advice": advice})

    return BeforeValidator(refuse)


def one_of(kinds: Callable[[Any], str | None], wanted: str) -> Discriminator:
    """Choose among the tagged members of a union, so that an error is about the one that was meant.

    Args:
        kinds: Returns a value's tag, or None where it fits no member.
        wanted: What the value may be, for the error.
    """
    return Discriminator(kinds, custom_error_type="wrong_kind", custom_error_message=f"Input should be {wanted}")


def text_or_list(value: Any) -> str | None:
    """Return the tag of a text or a list."""
    return TEXT if isinstance(value, str) else LIST if isinstance(value, list) else None


def text_or_object(value: Any) -> str | None:
    """Return the tag of a text or an object; what is of a model's class already is an object."""
    return TEXT if isinstance(value, str) else OBJECT if isinstance(value, dict | BaseModel) else None


def _prompt_kind(value: Any) -> str | None:
    """Return the tag of a prompt, which its first entry tells."""
    kind = text_or_list(value)
    if kind != LIST or not value or isinstance(value[0], str):
        return kind
    return ID_LISTS if isinstance(value[0], list) else IDS


def _few(given: Any) -> Any:
    """Else each of a million wrong entries would become an error of its own, and errors are large."""
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"{len(given)} entries; at most {MOST_BIASES}")
    return given


class Strict(BaseModel):
    """An object whose fields are all known. A field that is null is taken as left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in _few(given).items() if value is not None}


Bias = Annotated[dict[str, Annotated[float, Field(strict=True, ge=-100, le=100)]], BeforeValidator(_few)]
# fail_fast, here and below: for the same reason.
Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=MOST)]], Field(fail_fast=True)]


Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
_Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[
    Annotated[_Stop, Tag(TEXT)] | Annotated[list[_Stop], Field(fail_fast=True, max_length=MOST_STOPS), Tag(LIST)],
    one_of(text_or_list, "a text or a list of texts"),
]
Prompts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS), Tag(LIST)]
    | Annotated[Ids, Tag(IDS)]
    | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS), Tag(ID_LISTS)],
    one_of(_prompt_kind, "a text, a list of texts, a list of token ids or a list of such lists"),
]


def _schema_kind(value: Any) -> str | None:
    """Return the tag of a schema; true and false are schemas too."""
    return OBJECT if isinstance(value, dict) else TEXT if isinstance(value, bool) else None


class StreamOptions(Strict):
    """continuous_usage_stats: vLLM's. With include_usage, every part tells what its choice has come to. include_drafts:
    this server's own. Each part's choice then has `drafts`, its text in runs that accepted drafts wrote and others that
    the target drew itself."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_drafts: StrictBool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: Annotated[
        Annotated[dict[str, Any], Tag(OBJECT)] | Annotated[StrictBool, Tag(TEXT)],
        one_of(_schema_kind, "a schema, which is an object"),
    ] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """OpenAI's, and llgtrt's grammars in Lark."""

    type: Literal["text", "json_object", "json_schema", "lark_grammar"]
    json_schema: JsonSchema | None = None
    lark_grammar: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        for name in ("json_schema", "lark_grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is given with type {name}, and only then")
        return self


class StructuredOutputs(Strict):
    """A grammar; exactly one of these."""

    json_: (
        Annotated[
            Annotated[dict[str, Any], Tag(OBJECT)] | Annotated[str, Tag(TEXT)],
            one_of(text_or_object, "a schema, as an object or as its text"),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_TEXTS)] | None = None
    lark: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, lark, ebnf")
        return self
