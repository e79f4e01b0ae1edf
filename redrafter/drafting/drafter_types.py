"""Registration of drafters, and drafters of the type that a config names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoModel, PretrainedConfig

from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import check_drafter, load_error
from redrafter.files.drafter_kinds import DrafterKind, define_kind, drafter_kinds

DrafterClass = TypeVar("DrafterClass", bound=type[DrafterModel])


def register_drafter(kind: str = "", *model_types: str) -> Callable[[DrafterClass], DrafterClass]:
    """Return a decorator that registers the class of a drafter, so that checkpoints of its types load as it.

    Args:
        kind: Name of drafters of the class in messages.
        model_types: `model_type` in the `config.json` of their checkpoints; none for a class that
            `redrafter.files.drafter_kinds` or an entry point declares.
    """

    def register(drafter: DrafterClass) -> DrafterClass:
        define_kind(DrafterKind(kind, model_types, drafter.__module__, drafter.__name__))
        AutoModel.register(drafter.config_class, drafter, exist_ok=True)
        return drafter

    return register


def make_drafter(config: AnyDrafterConfig) -> DrafterModel:
    """Make a drafter with random weights, of the type of its config.

    Raises:
        UnsupportedError: Its config alone does not make it.
    """
    kind: type[DrafterModel] = drafter_kinds()[config.model_type].load()
    if not kind.made_from_config:
        raise UnsupportedError(
            f"a drafter of the kind {config.kind} can be used only as in its checkpoint: it is neither trained nor "
            "converted; leave it out, or give another one"
        )
    return kind(config)


def drafter_class(name: str | Path, **hub_options: Any) -> type[DrafterModel]:
    """Return the class of the drafter that a checkpoint holds, by the type that its config names.

    Args:
        name: A directory or the name of a repository on the Hugging Face hub.
        hub_options: `subfolder` and `revision`, as in `PreTrainedModel.from_pretrained`.

    Raises:
        CheckpointError: It does not exist, or holds no drafter of a registered type.
        UnsupportedError: Its weights are quantised, and its config alone does not make it.
    """
    source = Path(name) / hub_options.get("subfolder", "") if Path(name).is_dir() else name
    check_drafter(source)
    try:
        config, _ = PretrainedConfig.get_config_dict(str(name), **hub_options)
    except OSError as error:
        raise load_error("drafter", source, error) from error
    kind = drafter_kinds().get(str(config.get("model_type")))
    if kind is None:
        raise CheckpointError(f"{name} is of the type {config.get('model_type')}, and no drafter of it is registered")
    loaded: type[DrafterModel] = kind.load()
    if config.get("quantization_config") is not None and not loaded.made_from_config:
        raise UnsupportedError(f"{source} is a quantised {kind.name}, which is not read: give the original")
    return loaded


def open_drafter_model(name: str | Path, **hub_options: object) -> DrafterModel:
    """Load a drafter of the type that its config names, for the arguments of `drafter_class`.

    Raises:
        CheckpointError: Files are missing or truncated, or hold no drafter.
    """
    drafter: DrafterModel = drafter_class(name, **hub_options).from_pretrained(name, **hub_options)
    return drafter
