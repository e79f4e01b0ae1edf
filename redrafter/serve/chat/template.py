"""A model's chat template: the variables that it reads, and the text that it renders."""

import inspect
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from redrafter.errors import first_line
from redrafter.serve.protocol.requests import ApiError

__all__ = ["THINK_TAGS", "ChatTemplate"]

THINK_TAGS = ("<think>", "</think>")  # what reasoning models write around their thoughts
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer that has a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        template: str | dict[str, str] = tokenizer.chat_template
        self._texts = list(template.values()) if isinstance(template, dict) else [template]

    @property
    def text(self) -> str:
        """Source of the template; where the tokenizer has several, all of them joined."""
        return "\n".join(self._texts)

    @cached_property
    def has_think_tags(self) -> bool:
        """Tell whether the template has think tags that show up in decoded text, as special tokens do not."""
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return THINK_TAGS[1] in self.text and not special.intersection(THINK_TAGS)

    @cached_property
    def reads_parts(self) -> bool:
        """Tell whether the template reads content as a list of parts alone, and leaves out a plain text."""
        probe = "a text to look for"
        try:
            return probe not in self.render([{"role": "user", "content": probe}], None, add_generation_prompt=True)
        except ApiError:
            return False

    @property
    def knows_developer(self) -> bool:
        """Tell whether the template mentions the role `developer`."""
        return "developer" in self.text

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads, without messages, tools and what the tokenizer itself supplies."""
        undeclared: set[str] = set()
        for text in self._texts:
            environment = _compile_jinja_template(text).environment
            undeclared |= meta.find_undeclared_variables(environment.parse(text)) - set(environment.globals)
        supplied = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"documents"}
        return frozenset(undeclared - supplied - {"messages", *self._tokenizer.special_tokens_map})

    def check(self, variables: dict[str, Any], param: str) -> None:
        """Check that the template reads all of some variables.

        Args:
            variables: The variables with their values.
            param: Field of the request that has them, for the error.

        Raises:
            ApiError: If the template does not read one of them.
        """
        if unknown := [name for name in variables if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none"
            raise ApiError(400, f"{param}: the chat template reads no {unknown[0]!r}; it reads {known}", param)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **variables: Any) -> str:
        """Render a chat.

        Args:
            messages: Messages as `apply_chat_template` reads them.
            tools: Tools as `apply_chat_template` reads them.
            variables: Variables of the template, and options of `apply_chat_template`.

        Raises:
            ApiError: If the template refuses them.
        """
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)
        except _TEMPLATE_ERRORS as error:
            raise ApiError(400, f"the chat template refuses: {first_line(error)}", "messages") from error
        return str(text)
