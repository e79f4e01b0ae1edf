"""Load the processor of a model that sees images."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from redrafter.errors import CheckpointError, MissingDependencyError, how_to_install
from redrafter.files.checkpoint_kind import check_path, load_error

__all__ = ["load_processor"]


def load_processor(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model, which cuts images up and knows the tokens that stand for them.

    Args:
        name: Directory or hub id of the model.
        trust_remote_code: Whether code in the checkpoint may run.

    Raises:
        CheckpointError: There is no processor for images, or it cannot be loaded.
        MissingDependencyError: Pillow, which decodes images, is not installed.
    """
    if find_spec("PIL") is None:
        raise MissingDependencyError(f"images need Pillow: {how_to_install('vision')}")
    check_path(str(name))
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise load_error("processor", name, error) from error
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_processor"):
        raise CheckpointError(f"{name} has no processor for images beside it: copy the files that its base has")
    return processor
