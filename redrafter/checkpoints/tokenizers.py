"""Load tokenizers, and the processors of models that see images; and which tokens end a text."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from redrafter.checkpoints.chat_templates import find_template
from redrafter.errors import CheckpointError, MissingDependencyError, how_to_install
from redrafter.files.checkpoint_kind import check_source, load_error
from redrafter.files.gguf_file import find_gguf, read_gguf, reading


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with its chat template. It pads on the left, as decoder-only generation needs."""
    check_source(str(name))
    try:
        with reading(name, texts=True) as (source, gguf):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                source, padding_side="left", trust_remote_code=trust_remote_code, **gguf
            )
    except Exception as error:
        raise load_error("tokenizer", name, error) from error
    if (file := find_gguf(name)) is not None:
        model = read_gguf(file)
        tokenizer = _with_tokens_of_file(tokenizer, model.tokens)
        tokenizer.name_or_path = str(name)
        for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
            token = model.value(f"tokenizer.ggml.{key}_token_id")  # which some versions of transformers do not look at
            if token is not None:
                setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(token))
            # Batches need padding, and masks hide whichever token fills it.
            elif role == "pad_token":
                tokenizer.pad_token = tokenizer.eos_token
    find_template(tokenizer, str(name))
    return tokenizer


def _with_tokens_of_file(tokenizer: PreTrainedTokenizerBase, size: int) -> PreTrainedTokenizerBase:
    # Where a file names no token for unknown text, transformers adds one of its own, whose id the model does not know.
    if len(tokenizer) <= size:
        return tokenizer
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    roles = {role: getattr(tokenizer, role) for role in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        padding_side=tokenizer.padding_side,
        chat_template=tokenizer.chat_template,
        **roles,
    )


def load_processor(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model, which cuts images up and inserts their placeholder tokens."""
    if find_spec("PIL") is None:
        raise MissingDependencyError(f"images need Pillow: {how_to_install('vision')}")
    check_source(str(name))
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise load_error("processor", name, error) from error
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "image_processor"):
        raise CheckpointError(f"{name} has no processor for images in its directory: copy the files that its base has")
    return processor


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the ids that end a text, in ascending order: those that a model's generation config names.

    The end token of its tokenizer is one too: a chat model may end its turns with it though its base never did.
    """
    ends = model.generation_config.eos_token_id
    ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id if tokenizer else None}
    return sorted(end for end in ids if isinstance(end, int))
