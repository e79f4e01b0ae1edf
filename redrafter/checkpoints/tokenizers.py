"""Tokenizers: how they are loaded, and which tokens end a text."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from redrafter.files.checkpoint_kind import check_path, load_error


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


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the ids that end a text, in ascending order.

    Args:
        model: A Hugging Face model, whose generation config names some.
        tokenizer: Its tokenizer, with whose end token a chat model may end its turns though its base never did.
    """
    ends = model.generation_config.eos_token_id
    ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id if tokenizer else None}
    return sorted(end for end in ids if isinstance(end, int))
