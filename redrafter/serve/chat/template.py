"""A model's chat template: which variables it reads, and what it makes of messages."""

import inspect
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from redrafter.errors import first_line
from redrafter.serve.protocol.requests import ApiError

__all__ = ["THINK", "ChatTemplate"]

THINK = ("<think>", "</think>")  # what models that think write around their thoughts
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class ChatTemplate:
    """The chat template of a tokenizer that has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        given: str | dict[str, str] = tokenizer.chat_template
        self._texts = list(given.values()) if isinstance(given, dict) else [given]

    @property
    def text(self) -> str:
        """The template; where there are several, all of them."""
        return "\n".join(self._texts)

    @cached_property
    def thinks(self) -> bool:
        """Whether it has marks for thoughts that can be seen in a text, which special tokens cannot."""
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return THINK[1] in self.text and not special.intersection(THINK)

    @property
    def knows_developer(self) -> bool:
        """Whether it has a place for messages of the role `developer`."""
        return "developer" in self.text

    @cached_property
    def variables(self) -> frozenset[str]:
        """What it reads beside messages, tools and what the tokenizer itself gives it."""
        found: set[str] = set()
        for text in self._texts:
            environment = _compile_jinja_template(text).environment
            found |= meta.find_undeclared_variables(environment.parse(text)) - set(environment.globals)
        own = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"}
        return frozenset(found - own - {"messages", *self._tokenizer.special_tokens_map})

    def check(self, variables: dict[str, Any], param: str) -> None:
        """Raise `ApiError` for a variable that the template does not read. param: the field that gave it."""
        if wrong := [name for name in variables if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none"
            raise ApiError(400, f"{param}: the chat template reads no {wrong[0]!r}; it reads {known}", param)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **variables: Any) -> str:
        """Return the text of a chat. variables: for the template, and as `apply_chat_template` has them."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except _REFUSALS as error:
            raise ApiError(400, f"the chat template refuses: {first_line(error)}", "messages") from error
        return str(text)
