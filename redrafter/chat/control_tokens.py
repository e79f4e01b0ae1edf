"""Encode chats so that user text never becomes a control token, while the chat template's control tokens do.

1. Choose a marker, a character that occurs nowhere else. Insert it into every control token that user text spells, and
   wherever user text could form one together with the template's own text.
2. Render the template with the marked text. Control tokens that are still spelt whole were written by the template.
3. Rename these with a secret suffix, and remove the markers.
4. Encode the result with a copy of the tokenizer that knows control tokens only by their renamed spelling.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from redrafter.chat.template import ChatError, ChatTemplate

if TYPE_CHECKING:  # commands import this module before they check their options
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Encode: TypeAlias = "Callable[[PreTrainedTokenizerBase | Tokenizer, str], list[int]]"  # without special tokens
_MARKERS = range(0xE000, 0xF8FF)  # private use area of Unicode
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})")
_TEXT_FIELDS = ("content", "reasoning_content", "name", "tool_call_id")  # of a message


def choose_marker(*values: Any) -> str:
    """Return a character that occurs in none of the JSON values, neither literally nor as a JSON escape."""
    text = json.dumps(values, ensure_ascii=False).lower()
    used = set(text) | {chr(int(code, 16)) for code in _ESCAPED.findall(text)}
    if (free := next((chr(code) for code in _MARKERS if chr(code) not in used), None)) is None:
        raise ChatError("the messages hold every character of private use, and one must be left")
    return free


def remove_markers(text: str, marker: str) -> str:
    """Return a text without its markers; an empty `marker` marks nothing."""
    # A template's `tojson` may escape the marker.
    return text.replace(marker, "").replace(f"\\u{ord(marker):04x}", "") if marker else text


def encode_plain(tokenizer: "PreTrainedTokenizerBase | Tokenizer", text: str) -> list[int]:
    """Encode a text, in which spelled control tokens become control tokens, without adding special tokens."""
    from tokenizers import Tokenizer

    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text, add_special_tokens=False).ids
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class ControlTokens:
    """The control tokens of a tokenizer.

    Control tokens are the special tokens, and other added tokens that the chat template spells, such as `<tool_call>`.
    In messages of the assistant only special tokens are marked, since the model generates the others itself.
    """

    def __init__(self, template: ChatTemplate):
        self._tokenizer = tokenizer = template.tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content.strip()) > 1]
        self._special = {token.content for token in added if token.special}
        self._all = self._special | {token.content for token in added if token.content in template.text}
        self._any_pattern, self._special_pattern = _match_any(self._all), _match_any(self._special)
        self._longest = max(map(len, self._all), default=0)
        self._beginnings = {name[:size] for name in self._all for size in range(1, len(name))}
        self._ends = {name[size:] for name in self._all for size in range(1, len(name))}
        self._suffix = secrets.token_hex(8)

    def prepare(self) -> None:
        """Build the renamed tokenizer ahead of its first use; building it blocks all threads for tenths of a second."""
        with suppress(ChatError):  # an unsupported tokenizer is an error only for a message that needs it
            self._renamed_tokenizer  # noqa: B018  # a cached property

    def mark_message(self, message: Mapping[str, Any], marker: str) -> dict[str, Any]:
        """Return a message as chat templates read it, with `marker` inserted into control tokens that it spells."""
        # An assistant's earlier messages may contain marks of thoughts and calls, which are not special tokens.
        pattern = self._special_pattern if message["role"] == "assistant" else self._any_pattern

        def mark_text(text: str) -> str:
            return self._mark_edges(_break_names(text, marker, pattern), marker)

        marked: dict[str, Any] = {}
        for name, value in message.items():
            if name == "content" and isinstance(value, list):  # only text parts contain user text
                marked[name] = [x | {"text": mark_text(x["text"])} if x["type"] == "text" else x for x in value]
            elif name in _TEXT_FIELDS and isinstance(value, str):
                marked[name] = mark_text(value)
            else:
                marked[name] = value if name == "role" else self.mark(value, marker)
        return marked

    def mark(self, value: Any, marker: str) -> Any:
        """Return a JSON value with `marker` inserted into the control tokens that its strings and keys spell."""
        if isinstance(value, str):
            return _break_names(value, marker, self._any_pattern)
        if isinstance(value, dict):
            return {self.mark(key, marker): self.mark(item, marker) for key, item in value.items()}
        return [self.mark(item, marker) for item in value] if isinstance(value, list) else value

    def encode(self, text: str, marker: str, encode: Encode = encode_plain) -> list[int]:
        """Return the token ids of a rendered chat, or of a part of one.

        A marker inside the spelling of a control token, such as `<|im_end|>`, shows that user text spelled it: it is
        encoded as plain text. A spelling without a marker comes from the chat template or the model, and becomes the
        control token's id.

        Args:
            text: The template's rendering of marked messages.
            marker: The marker; empty if nothing was marked.
            encode: Function that encodes a text with the tokenizer, or with its copy.

        Raises:
            ChatError: The text has markers, and the tokenizer is not one of the `tokenizers` library, the only kind
                that can be copied with renamed control tokens.
        """
        plain = remove_markers(text, marker)
        if plain == text:
            return encode(self._tokenizer, plain)
        renamed = self._any_pattern.sub(lambda match: match[0] + self._suffix, text)
        tokenizer, original_ids = self._renamed_tokenizer
        return [original_ids.get(token, token) for token in encode(tokenizer, remove_markers(renamed, marker))]

    def _mark_edges(self, text: str, marker: str) -> str:
        """Insert a marker where the edges of this text could form a control token with the template's text."""
        middle = text.strip()
        if not middle:
            return text
        # Templates strip texts and join them with marks, so a control token could also form across the edge.
        sizes = range(1, min(self._longest, len(middle)) + 1)
        inner = len(middle) < self._longest and any(middle in name[1:] for name in self._all)
        before = marker if inner or any(middle[:size] in self._ends for size in sizes) else ""
        after = marker if inner or any(middle[-size:] in self._beginnings for size in sizes) else ""
        begin = len(text) - len(text.lstrip())
        return text[:begin] + before + middle + after + text[begin + len(middle) :]

    @cached_property
    def _renamed_tokenizer(self) -> "tuple[Tokenizer, dict[int, int]]":
        """Tokenizer copy with renamed control tokens, and a map from its ids of added tokens to the original ids."""
        from tokenizers import Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ChatError("a message spells a control token, which this model's tokenizer cannot read as text")
        spec = json.loads(backend.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        names = {name: name + self._suffix for name in self._all}
        added = spec["added_tokens"]
        original_ids = {names.get(token["content"], token["content"]): token["id"] for token in added}
        for token in added:
            token["content"] = names.get(token["content"], token["content"])
        # With their names changed, control tokens in a text no longer match; ids are mapped back afterwards.
        _rename(spec["model"], names)
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        copied_ids = {name: tokenizer.token_to_id(name) for name in original_ids}
        return tokenizer, {token: original_ids[name] for name, token in copied_ids.items() if token is not None}


@lru_cache(maxsize=4)
def control_tokens_of(template: ChatTemplate) -> ControlTokens:
    """Return the control tokens of a chat template and its tokenizer."""
    return ControlTokens(template)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename entries in the vocabulary of a tokenizer's model, so that no text is encoded as one of them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): token for name, token in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if "merges" in model:
        joined = (pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in model["merges"])
        model["merges"] = [pair for pair, name in zip(model["merges"], joined, strict=True) if name not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _match_any(names: set[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some names; without names it matches nothing."""
    return re.compile(_branches(names) if names else "(?!)")


def _branches(names: set[str]) -> str:
    """Return a regular expression for names, built as a trie.

    Without the trie, a text with many prefixes of names would take minutes to match.
    """
    ends: dict[str, set[str]] = {}
    for name in names - {""}:
        ends.setdefault(name[0], set()).add(name[1:])
    parts = [re.escape(first) + _branches(rest) for first, rest in sorted(ends.items())]
    if len(parts) == 1 and "" not in names:
        return parts[0]
    return f"(?:{'|'.join(parts)})" + ("?" if "" in names else "") if parts else ""


def _break_names(text: str, marker: str, pattern: re.Pattern[str]) -> str:
    while (broken := pattern.sub(lambda match: match[0][0] + marker + match[0][1:], text)) != text:
        text = broken
    return text
