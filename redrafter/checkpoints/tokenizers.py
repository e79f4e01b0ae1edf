"""Load tokenizers, and check that two models share one."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from redrafter.errors import CheckpointError, MismatchError
from redrafter.files.checkpoint_kind import cannot_load, check_place
from redrafter.target.target import Target

__all__ = ["check_vocabularies", "load_tokenizer"]


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, padding on the left as decoder-only generation needs."""
    check_place(str(name))
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise cannot_load("tokenizer", name, error) from error


def check_vocabularies(
    model: str | Path | PreTrainedModel | Target,
    draft_model: str | Path | PreTrainedModel | Target,
    trust_remote_code: bool,
) -> None:
    """Raise `MismatchError` when the tokenizers beside two models give the same text other ids.

    Tables of ids may be of different sizes: rows past the tokenizer's last id are padding. A model that was loaded by
    the caller is taken at its word where no tokenizer is found by its name.
    """
    found = []
    for each in (model, draft_model):
        loaded: Any = each.model if isinstance(each, Target) else each
        name: Any = each if isinstance(each, str | Path) else getattr(loaded, "name_or_path", None)
        if name is None:
            return  # no model: refused where it is loaded
        try:
            found.append((name, load_tokenizer(name, trust_remote_code=trust_remote_code).get_vocab()))
        except CheckpointError:
            if name is each:
                raise
            return
    (name, vocabulary), (draft_name, draft_vocabulary) = found
    if vocabulary == draft_vocabulary:
        return
    raise MismatchError(
        f"the draft model {draft_name} does not write with the tokens of {name} "
        f"({_difference(vocabulary, draft_vocabulary)}): use one of the same family, with the same tokenizer"
    )


def _difference(mine: dict[str, int], theirs: dict[str, int]) -> str:
    """The first id that stands for another token, or for one in one vocabulary only."""
    by_id, other = ({id: token for token, id in each.items()} for each in (mine, theirs))
    first = min(id for id in by_id.keys() | other.keys() if by_id.get(id) != other.get(id))
    sizes = f"{len(mine)} tokens against {len(theirs)}"
    return f"{sizes}, id {first} is {by_id.get(first)!r} in one and {other.get(first)!r} in the other"
