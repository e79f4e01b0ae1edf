"""Text of users never becomes a control token; those that the chat template writes do.

A marker, a character that stands nowhere else, is put into every place of a user's text where a control token is
spelt, or where one might come about beside the template's own text. It survives the template. What is still spelt
whole in the rendered text was written by the template. It is renamed to what nobody can guess, the markers are taken
out, and a tokenizer that knows control tokens by those names alone reads the rest as it reads any text.
"""

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from redrafter.serve.protocol.requests import ApiError

__all__ = ["ControlTokens", "marker_for"]

_MARKERS = range(0xE000, 0xF8FF)  # characters of private use
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})")
_TEXTS = ("content", "reasoning_content", "name", "tool_call_id")  # of a message


def marker_for(*given: Any) -> str:
    """Return a character that occurs in none of these values, neither as it is nor as JSON escapes it."""
    text = json.dumps(given, ensure_ascii=False).lower()
    used = set(text) | {chr(int(code, 16)) for code in _ESCAPED.findall(text)}
    if (free := next((chr(code) for code in _MARKERS if chr(code) not in used), None)) is None:
        raise ApiError(400, "the messages hold every character of private use, and one must be left", "messages")
    return free


def _unmarked(text: str, marker: str) -> str:
    return text.replace(marker, "").replace(f"\\u{ord(marker):04x}", "")  # as a template's `tojson` may escape it


class ControlTokens:
    """The control tokens of a tokenizer.

    Control tokens are its special tokens and, of its other added tokens, those that stand in the chat template, such
    as `<tool_call>`. The latter stay what they are in an assistant's messages: the model writes them itself.

    Args:
        tokenizer: The tokenizer of the model.
        template: The text of its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        self._tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content.strip()) > 1]
        self._special = {token.content for token in added if token.special}
        self._all = self._special | {token.content for token in added if token.content in template}
        self._any, self._any_special = _pattern(self._all), _pattern(self._special)
        self._longest = max(map(len, self._all), default=0)
        self._beginnings = {name[:size] for name in self._all for size in range(1, len(name))}
        self._ends = {name[size:] for name in self._all for size in range(1, len(name))}
        self._suffix = secrets.token_hex(8)

    def mark_message(self, message: Mapping[str, Any], marker: str) -> dict[str, Any]:
        """Return a message, as a template reads it, with markers."""
        pattern = self._any_special if message["role"] == "assistant" else self._any
        marked: dict[str, Any] = {}
        for name, value in message.items():
            if name in _TEXTS:
                marked[name] = self._mark_edges(_broken(value, marker, pattern), marker)
            else:
                marked[name] = value if name == "role" else self.mark(value, marker)
        return marked

    def mark(self, value: Any, marker: str) -> Any:
        """Return any value of JSON with markers in its texts and keys."""
        if isinstance(value, str):
            return _broken(value, marker, self._any)
        if isinstance(value, dict):
            return {self.mark(key, marker): self.mark(each, marker) for key, each in value.items()}
        return [self.mark(each, marker) for each in value] if isinstance(value, list) else value

    def encode(self, text: str, marker: str) -> tuple[str, list[int]]:
        """Return a rendered text without its markers, and its tokens."""
        plain = _unmarked(text, marker)
        if plain == text:
            return plain, list(self._tokenizer(text, add_special_tokens=False).input_ids)
        renamed = self._any.sub(lambda found: found[0] + self._suffix, text)
        reader, ids = self._reader
        tokens = reader.encode(_unmarked(renamed, marker), add_special_tokens=False).ids
        return plain, [ids.get(token, token) for token in tokens]

    def _mark_edges(self, text: str, marker: str) -> str:
        """Put a marker where a token might come about of this text's first or last characters and a template's."""
        middle = text.strip()
        if not middle:
            return text
        sizes = range(1, min(self._longest, len(middle)) + 1)
        inner = len(middle) < self._longest and any(middle in name[1:] for name in self._all)
        before = marker if inner or any(middle[:size] in self._ends for size in sizes) else ""
        after = marker if inner or any(middle[-size:] in self._beginnings for size in sizes) else ""
        begin = len(text) - len(text.lstrip())
        return text[:begin] + before + middle + after + text[begin + len(middle) :]

    @cached_property
    def _reader(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer with its control tokens renamed, and of its added tokens their ids in the tokenizer itself."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ApiError(400, "a message spells a control token, which this model's tokenizer cannot read as text")
        spec = json.loads(backend.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        names = {name: name + self._suffix for name in self._all}
        added = spec["added_tokens"]
        old = {names.get(token["content"], token["content"]): token["id"] for token in added}
        for token in added:
            token["content"] = names.get(token["content"], token["content"])
        _rename(spec["model"], names)
        reader = Tokenizer.from_str(json.dumps(spec))
        new = {name: reader.token_to_id(name) for name in old}
        return reader, {token: old[name] for name, token in new.items() if token is not None}


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename entries of a model's vocabulary, so that no text is read as one of them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _joined(pair) not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _joined(pair: str | list[str]) -> str:
    return pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)


def _pattern(names: set[str]) -> re.Pattern[str]:
    """Match any of the names, the longest that fits; nothing where there are none."""
    return re.compile(_branches(names) if names else "(?!)")


def _branches(names: set[str]) -> str:
    """Write names as a tree of what they begin with alike: a text of many beginnings would take minutes otherwise."""
    ends: dict[str, set[str]] = {}
    for name in names - {""}:
        ends.setdefault(name[0], set()).add(name[1:])
    parts = [re.escape(first) + _branches(rest) for first, rest in sorted(ends.items())]
    if len(parts) == 1 and "" not in names:
        return parts[0]
    return f"(?:{'|'.join(parts)})" + ("?" if "" in names else "") if parts else ""


def _broken(text: str, marker: str, pattern: re.Pattern[str]) -> str:
    """Return a text with a marker behind the first character of every match, those that overlap too."""
    while (found := pattern.sub(lambda match: match[0][0] + marker + match[0][1:], text)) != text:
        text = found
    return text
