"""Compare the tokenizers of a target and its draft model, and map one vocabulary to the other where they differ.

Tokens are compared by the bytes that they encode, since vocabularies encode bytes in several alphabets.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from redrafter.checkpoints.token_bytes import BYTE_TOKEN, CHARACTER_OF, SPACE, TokenBytes
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.errors import CheckpointError, MismatchError, UnsupportedError
from redrafter.model.target import Target

MAX_PIECES = 4  # of a token; of 8,186 tokens in one base's vocabulary, 76 have more in one of 2,042
MIN_SHARED = 0.1  # of the smaller vocabulary's tokens of several bytes; with fewer, next to no draft is right


Model = str | Path | PreTrainedModel | Target
Tokenizer = str | Path | PreTrainedTokenizerBase


def map_unlike_vocabularies(
    model: Model, draft_model: Model, tokenizer: Tokenizer | None, draft_tokenizer: Tokenizer | None, trusted: bool
) -> VocabularyMap | None:
    """Map each token of a model with another vocabulary to the draft model's tokens.

    The models' embedding tables may differ in size: rows past the tokenizer's last id are padding. Loaded models are
    taken to have one vocabulary where no tokenizer is given, and none is found under their names.

    The result is None where the tokenizers give the same text the same ids. A tokenizer that is None is the one
    stored with its model.

    Raises:
        CheckpointError: If a named tokenizer, or the tokenizer of a named model, cannot be loaded.
        MismatchError: If the vocabularies have too little in common, or cannot be compared.
    """
    found = []
    for checked, given in ((model, tokenizer), (draft_model, draft_tokenizer)):
        if isinstance(given, PreTrainedTokenizerBase):
            found.append((str(given.name_or_path or type(given).__name__), given))
            continue
        loaded: object = checked.model if isinstance(checked, Target) else checked
        name: Any = checked if isinstance(checked, str | Path) else getattr(loaded, "name_or_path", None)
        name = name if given is None else given
        if name is None:
            return None  # no model: refused where it is loaded
        try:
            found.append((str(name), load_tokenizer(name, trust_remote_code=trusted)))
        except CheckpointError:
            if name is checked or name is given:
                raise
            return None
    (name, target_tokenizer), (draft_name, its_tokenizer) = found
    if target_tokenizer.get_vocab() == its_tokenizer.get_vocab():
        return None
    try:
        return map_vocabularies(target_tokenizer, its_tokenizer)
    except UnsupportedError as error:
        difference = _difference(target_tokenizer.get_vocab(), its_tokenizer.get_vocab())
        raise MismatchError(
            f"the draft model {draft_name} does not write with the tokens of {name} ({difference}): {error}; use one "
            "of the same family, with the same tokenizer"
        ) from error


def map_vocabularies(tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> VocabularyMap:
    """Map each token of a target to what a draft model with another tokenizer reads and writes for it.

    Raises `UnsupportedError` if a tokenizer's tokens cannot be written as bytes, or the two share too few of them.
    """
    target, draft = _Vocabulary(tokenizer), _Vocabulary(draft_tokenizer)
    draft_ids_of = draft.by_bytes()
    pairs = {  # each draft id at most once
        id: draft_id
        for text, ids in target.by_bytes().items()
        for id, draft_id in zip(ids, draft_ids_of.get(text, ()), strict=False)
    } | _pair_special(tokenizer, draft_tokenizer, target, draft)
    # Single bytes are in almost all vocabularies and say nothing about the overlap.
    sizes = [sum(len(text) > 1 for text in tokens.of_id.values()) for tokens in (target, draft)]
    shared = sum(len(target.of_id.get(id, b"")) > 1 for id in pairs)
    if shared < max(MIN_SHARED * min(sizes), 1):
        raise UnsupportedError(
            f"of {sizes[0]} and {sizes[1]} tokens of several bytes only {shared} are in both, and at least "
            f"{MIN_SHARED:.0%} of the smaller vocabulary's must be"
        )
    size = 1 + max(target.of_id.keys() | target.special.values())
    pieces, counts = torch.zeros(size, MAX_PIECES, dtype=torch.long), torch.ones(size, dtype=torch.long)
    draft_ids, is_shared = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
    names = {id: name.encode() for name, id in target.special.items()}
    for id, text in (names | target.of_id).items():
        if id in pairs:
            draft_ids[id], is_shared[id] = pairs[id], True
        # The next token depends most on the last pieces.
        read = [pairs[id]] if id in pairs else draft.split(text)[-MAX_PIECES:] or [0]
        pieces[id, : len(read)], counts[id] = torch.tensor(read), len(read)
    # The draft model's text begins as its tokenizer begins each text, unless the target's text has such a token.
    first, begins = draft_tokenizer.bos_token_id, draft_tokenizer("").input_ids
    has_first = first is not None and begins[:1] == [first] and tokenizer("").input_ids[:1] != [tokenizer.bos_token_id]
    return VocabularyMap(pieces, counts, draft_ids, is_shared, (first,) if has_first else ())


def _pair_special(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, target: "_Vocabulary", draft: "_Vocabulary"
) -> dict[int, int]:
    """Return the draft model's id of each special id that has one of the same role or name, each at most once."""
    roles = [(getattr(tokenizer, role), getattr(other, role)) for role in ("eos_token_id", "bos_token_id")]
    names = [(id, draft.special.get(name)) for name, id in target.special.items()]
    pairs: dict[int, int] = {}
    for id, draft_id in (*roles, *names):
        special = id in target.special.values() and draft_id in draft.special.values()
        if special and id not in pairs and draft_id not in pairs.values():
            pairs[id] = draft_id
    return pairs


def _difference(vocabulary: dict[str, int], draft_vocabulary: dict[str, int]) -> str:
    """Describe the first id that maps to different tokens in two vocabularies, or is in one of them only."""
    tokens, draft_tokens = ({id: token for token, id in tokens.items()} for tokens in (vocabulary, draft_vocabulary))
    first = min(id for id in tokens.keys() | draft_tokens.keys() if tokens.get(id) != draft_tokens.get(id))
    sizes = f"{len(vocabulary)} tokens against {len(draft_vocabulary)}"
    return f"{sizes}, id {first} is {tokens.get(first)!r} in one and {draft_tokens.get(first)!r} in the other"


class _Vocabulary(TokenBytes):
    """A vocabulary by bytes.

    Attributes:
        of_id: The bytes of each id that is text.
        byte_ids: Ids of single bytes, in addition to the ids of characters, as sentencepiece has them.
        special: Ids that are no text, by their names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Read the vocabulary of a tokenizer; raises `UnsupportedError` as `TokenBytes` does."""
        super().__init__(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.special = {token.content: id for id, token in added.items() if token.special}
        self.of_id = {id: token.content.encode() for id, token in added.items() if not token.special}
        self.byte_ids = set[int]()
        for token, id in tokenizer.get_vocab().items():
            if id in added or (text := self.of_piece(token)) is None:
                continue
            self.of_id[id] = text
            if not self.byte_level and BYTE_TOKEN.fullmatch(token):
                self.byte_ids.add(id)

    def by_bytes(self) -> dict[bytes, list[int]]:
        """Return the ids of each string of bytes: tokens of characters before tokens of single bytes, lowest first."""
        ids: dict[bytes, list[int]] = {}
        # The tokenizer itself writes a byte as a character's token where it can, so that id is the one that texts hold.
        for id in sorted(self.of_id, key=lambda id: (id in self.byte_ids, id)):
            if self.of_id[id]:
                ids.setdefault(self.of_id[id], []).append(id)
        return ids

    def split(self, text: bytes) -> list[int]:
        """Return the ids that the tokenizer splits bytes into, in the midst of a text; none where it has no way to."""
        if self.byte_level:
            return [token.id for token in self.backend.model.tokenize("".join(CHARACTER_OF[byte] for byte in text))]
        try:
            return [token.id for token in self.backend.model.tokenize(text.decode().replace(" ", SPACE))]
        except UnicodeDecodeError:  # part of a character
            by_byte = {self.of_id[id]: id for id in self.byte_ids}
            return [by_byte[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in by_byte]
