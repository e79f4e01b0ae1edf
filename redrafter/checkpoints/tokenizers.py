"""Load tokenizers."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from redrafter.files.checkpoint_kind import check_path, load_error

__all__ = ["load_tokenizer"]


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
