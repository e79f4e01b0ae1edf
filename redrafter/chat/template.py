"""The chat template of a tokenizer: the fields it reads, learnt by rendering short chats, and how it renders a chat."""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from redrafter.chat.thoughts import SWITCHES, ThoughtMarks, thought_marks
from redrafter.errors import ArgumentError, first_line

if TYPE_CHECKING:
    from jinja2.nodes import Template
    from transformers import PreTrainedTokenizerBase

HOW_TO_GIVE_ONE = "give one with --chat-template FILE, or --plain-chat-template"
_PROBE = "a text to look for"
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}


class ChatError(ArgumentError):
    """A chat cannot be rendered: the template refuses it, or does not read one of its fields.

    Attributes:
        param: The field at fault: `messages`, `tools` or `chat_template_kwargs`.
    """

    def __init__(self, message: str, param: str = "messages"):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class CallForm:
    """The form in which a template reads a message with calls.

    Attributes:
        as_objects: Whether the arguments are an object; else they are JSON text.
        no_text: Content of a message that has calls and no text.
    """

    as_objects: bool
    no_text: str | None


class ChatTemplate:
    """The chat template of a tokenizer that has one; `chat_template_of` returns it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        template: str | dict[str, str] = tokenizer.chat_template
        self._texts = list(template.values()) if isinstance(template, dict) else [template]
        self._prompts: dict[str, list[str]] = {}  # results of `generation_prompts`
        self.warned = False  # whether a warning has named a turn that this template leaves out

    @property
    def text(self) -> str:
        """Source of the template; several templates of a tokenizer are joined."""
        return "\n".join(self._texts)

    @cached_property
    def special(self) -> dict[int, str]:
        """Special tokens by id."""
        added = self.tokenizer.added_tokens_decoder
        return {number: token.content for number, token in added.items() if token.special}

    @cached_property
    def unspelled(self) -> dict[str, int]:
        """Ids of added tokens that literal text in a grammar cannot produce, as llguidance decodes them."""
        added = {token.content: n for n, token in self.tokenizer.added_tokens_decoder.items() if token.content}
        special = {*self.special.values()}
        return {text: number for text, number in added.items() if text in special or re.fullmatch("<.*>", text)}

    def thoughts(self, parser: str = "auto") -> ThoughtMarks | None:
        """Return the marks around the model's thoughts by vLLM's name of their parser; None without thoughts."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return thought_marks(parser, self.text, added)

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether the template reads content only as a list of parts, and drops a plain string."""
        written = self._try([{"role": "user", "content": _PROBE}], add_generation_prompt=True)
        return written is not None and _PROBE not in written

    @cached_property
    def reads_tools(self) -> bool:
        """Return whether the template describes tools to the model, and so determines the format of calls."""
        talk = [{"role": role, "content": self.content("a text")} for role in ("system", "user")]
        for messages in (talk[1:], talk):
            with_tools, without = self._try(messages, [_TOOL]), self._try(messages)
            if with_tools is not None and without is not None:
                return with_tools != without
        return True  # the template rejects these minimal chats

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form in which the template reads calls: name and arguments appear. None if it writes no calls."""
        key, value, asked = "probe_key", "probe_value", [{"role": "user", "content": self.content("a text")}]
        forms = product((asked, []), ([_TOOL], None), (True, False), (self.content(""), None))
        for before, tools, as_objects, no_text in forms:
            arguments = {key: value} if as_objects else json.dumps({key: value})
            call = {"name": "probe_name", "arguments": arguments}
            calls = [{"id": "probe0001", "type": "function", "function": call}]
            talk = [*before, {"role": "assistant", "content": no_text, "tool_calls": calls}]
            written = self._try(talk, tools) or ""
            # Text that is quoted again, or an object in Python's spelling, is in another form than the model's calls.
            wrong = f'\\"{key}' in written or f"'{key}'" in written
            if not wrong and all(word in written for word in ("probe_name", key, value)):
                return CallForm(as_objects, no_text)
        return None

    @cached_property
    def places_system_messages(self) -> bool:
        """Return whether the template renders a later system message at its position."""
        roles = ("system", "user", "assistant", "system", "user")
        texts = [f"the text number {number} to look for" for number in range(len(roles))]
        # Some templates move or drop system messages after the first, which only rendering shows.
        written = self._try(
            [{"role": role, "content": self.content(text)} for role, text in zip(roles, texts, strict=True)]
        )
        places = [-1 if written is None else written.find(text) for text in texts]  # -1 for a message that was dropped
        return written is not None and places == sorted(places)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads, except messages, tools and variables that the tokenizer supplies."""
        # Imported late: commands check paths of data before they import libraries.
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        undeclared: set[str] = set()
        for text in self._texts:
            environment = _compile_jinja_template(text).environment
            tree = environment.parse(text)
            undeclared |= meta.find_undeclared_variables(tree) - set(environment.globals) - _set_before_read(tree)
        supplied = set(inspect.signature(self.tokenizer.apply_chat_template).parameters) - {"documents"}
        return frozenset(undeclared - supplied - {"messages", *self.tokenizer.special_tokens_map})

    @property
    def thought_switch(self) -> str | None:
        """Variable that turns thoughts on and off; None if there is none."""
        return next((name for name in SWITCHES if name in self.variables), None)

    def content(self, text: str) -> str | list[dict[str, Any]]:
        """Return text as content that the template reads: a string, or one part if it reads only parts."""
        return [{"type": "text", "text": text}] if self.reads_parts else text

    def check(self, variables: Mapping[str, Any], param: str = "chat_template_kwargs") -> None:
        """Raise `ChatError` for the field `param` if the template does not read all of the variables."""
        if unknown := [name for name in variables if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none"
            raise ChatError(f"{param}: the chat template reads no {unknown[0]!r}; it reads {known}", param)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **variables: Any) -> str:
        """Render messages that `prepare_chat` has returned; raise `ChatError` if the template rejects them."""
        # Imported late, as above.
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self.tokenizer
        try:
            if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
                return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables))
            # `apply_chat_template` would drop null content, without which some templates write no calls.
            template = tokenizer.get_chat_template(None, tools)
            rendered: Any = render_jinja_template(
                [messages], tools=tools, chat_template=template, **(tokenizer.special_tokens_map | variables)
            )
            return str(rendered[0][0])
        except Exception as error:  # a template is a program and may raise anything
            raise ChatError(f"the chat template refuses: {first_line(error)}") from error

    def generation_prompts(self, variables: dict[str, Any]) -> list[str]:
        """Return what the template writes after a user's turn for the model to answer.

        The first is written with these variables; a second with thoughts turned off, if a variable does that.
        """
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._prompts:
            switch, prompts = self.thought_switch, list[str]()
            talk = [{"role": "user", "content": self.content("a text")}]
            for more in ({}, {} if switch is None else {switch: False}):
                with_prompt = self._try(talk, add_generation_prompt=True, **(variables | more)) or ""
                without = self._try(talk, **(variables | more)) or ""
                prompts.append(with_prompt.removeprefix(without) if with_prompt.startswith(without) else "")
            self._prompts[key] = list(dict.fromkeys(prompts))
        return self._prompts[key]

    def _try(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **variables: Any) -> str | None:
        try:
            return self.render(messages, tools, **variables)
        except ChatError:
            return None


def chat_template_of(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Return the chat template of a tokenizer; raise `ChatError` if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise ChatError(f"the tokenizer of {name} has no chat template: {HOW_TO_GIVE_ONE}")
    return _template_of(tokenizer, str(tokenizer.chat_template))


def set_variables(tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, Any], param: str) -> None:
    """Set defaults of a chat template's variables, which a row of data or a request may override.

    They are written into the template, so that everything that renders it reads them. Raises `ChatError` for the field
    `param` if the template does not read one of them.
    """
    chat_template_of(tokenizer).check(variables, param)
    # On a line of their own, of which Jinja writes nothing. The `repr` of a JSON value is an expression of Jinja's.
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in variables.items()
    )
    template: str | dict[str, str] = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: f"{defaults}\n{text}" for name, text in template.items()}
    else:
        tokenizer.chat_template = f"{defaults}\n{template}"


def _set_before_read(tree: "Template") -> set[str]:
    """Return the names that a template sets itself, in some branch at least, before it first reads them."""
    from jinja2 import nodes

    first: dict[str, str] = {}
    for node in tree.find_all((nodes.Assign, nodes.Name)):
        # An assignment reads its value before it sets its target, which is the first of its names.
        for name in [node] if isinstance(node, nodes.Name) else reversed([*node.find_all(nodes.Name)]):
            first.setdefault(name.name, name.ctx)
    return {name for name, use in first.items() if use != "load"}


@lru_cache(maxsize=4)
def _template_of(tokenizer: "PreTrainedTokenizerBase", text: str) -> ChatTemplate:
    # `text` separates a tokenizer's templates before and after another one was set.
    return ChatTemplate(tokenizer)


def opens_with_bos(text: str, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a text begins with the BOS token itself, so that no special tokens are added to it.

    A second BOS would change the text's meaning.
    """
    bos = tokenizer.bos_token
    return isinstance(bos, str) and text.startswith(bos)
