"""Load tokenizers, and check that two models use the same tokens."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from redrafter.errors import CheckpointError, MismatchError
from redrafter.files.checkpoint_kind import check_path, load_error
from redrafter.target.target import Target

__all__ = ["check_vocabularies", "load_tokenizer"]


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. It pads on the left, as decoder-only generation needs.

    Args:
        name: Directory or hub id of the model.
        trust_remote_code: Whether code in the checkpoint may run.

    Raises:
        CheckpointError: If there is no tokenizer, or it cannot be loaded.
    """
    check_path(str(name))
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise load_error("tokenizer", name, error) from error


def check_vocabularies(
    model: str | Path | PreTrainedModel | Target,
    draft_model: str | Path | PreTrainedModel | Target,
    trust_remote_code: bool,
) -> None:
    """Check that the tokenizers of a model and of its draft model give the same text the same ids.

    The models' embedding tables may differ in size: rows past the tokenizer's last id are padding. Loaded models pass
    unchecked where no tokenizer is found under their names.

    Args:
        model: Hub id, directory, loaded model or target.
        draft_model: The same for the model that drafts.
        trust_remote_code: Whether code in the checkpoints may run.

    Raises:
        CheckpointError: If the tokenizer of a model given by name cannot be loaded.
        MismatchError: If the vocabularies differ.
    """
    tokenizers = []
    for checked in (model, draft_model):
        loaded: Any = checked.model if isinstance(checked, Target) else checked
        name: Any = checked if isinstance(checked, str | Path) else getattr(loaded, "name_or_path", None)
        if name is None:
            return  # no model: refused where it is loaded
        try:
            tokenizers.append((name, load_tokenizer(name, trust_remote_code=trust_remote_code).get_vocab()))
        except CheckpointError:
            if name is checked:
                raise
            return
    (name, vocabulary), (draft_name, draft_vocabulary) = tokenizers
    if vocabulary == draft_vocabulary:
        return
    raise MismatchError(
        f"the draft model {draft_name} does not write with the tokens of {name} "
        f"({_difference(vocabulary, draft_vocabulary)}): use one of the same family, with the same tokenizer"
    )


def _difference(vocabulary: dict[str, int], draft_vocabulary: dict[str, int]) -> str:
    """Describe the first id that stands for different tokens in two vocabularies, or is in one of them only."""
    tokens, draft_tokens = ({id: token for token, id in tokens.items()} for tokens in (vocabulary, draft_vocabulary))
    first = min(id for id in tokens.keys() | draft_tokens.keys() if tokens.get(id) != draft_tokens.get(id))
    sizes = f"{len(vocabulary)} tokens against {len(draft_vocabulary)}"
    return f"{sizes}, id {first} is {tokens.get(first)!r} in one and {draft_tokens.get(first)!r} in the other"
