"""Load a base from a directory or the hub, and bind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import cached_file

from redrafter.checkpoints.load_keywords import check_none_left, check_reserved, unknown_keyword
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import cannot_load, check_place
from redrafter.target.adapters import base_of
from redrafter.target.target import Target

__all__ = ["bind", "file_beside", "load_model"]

LOAD_ARGUMENTS = ("dtype", "device", "trust_remote_code", "caller")  # of `load_model`, not transformers' own


def bind(name: str | Path | PreTrainedModel | Target, **load: Any) -> Target:
    """The same, bound; what is bound already is taken as it is. load: for `load_model`."""
    name = base_of(name)
    if not isinstance(name, str | Path | PreTrainedModel | Target):
        raise ArgumentError(f"a model is a hub id, a directory or a loaded model, got {type(name).__name__}")
    if isinstance(name, Target):
        check_none_left({key: value for key, value in load.items() if key not in LOAD_ARGUMENTS})
        return name
    return Target(load_model(name, **load))


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    dtype: Any,
    device: Any,
    trust_remote_code: bool,
    caller: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A causal LM from a hub id or a directory; a loaded one is taken as it is, and moved when a device is given.

    kwargs go to `AutoModelForCausalLM.from_pretrained`, or to `AutoModelForImageTextToText.from_pretrained` for models
    that see images, which are then used for text. caller: whose keywords an unknown one may be meant for. Raises
    `CheckpointError` when it cannot be loaded whole, and `ArgumentError` for kwargs that transformers does not take.
    """
    if not isinstance(name, str | Path):
        check_none_left(kwargs)
        return base_of(name) if device is None else _to(base_of(name), device)
    check_place(str(name))
    check_reserved(kwargs, caller)
    try:
        loaded: Any = _auto_class(name, trust_remote_code, kwargs).from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
        )
    except Exception as error:
        raise unknown_keyword(error, kwargs, caller) or cannot_load("model", name, error) from error
    model, info = loaded
    if info["missing_keys"]:
        raise CheckpointError(f"{name} is not whole: missing {', '.join(sorted(info['missing_keys'])[:5])}")
    return model if device is None else _to(model, device)


def file_beside(model: str, name: str) -> str | None:
    """Return a file of a model's directory or repository, None where it has none or cannot be asked."""
    try:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None  # loading the model says what is wrong


def _auto_class(name: str | Path, trust_remote_code: bool, kwargs: dict[str, Any]) -> Any:
    """Return the class of transformers that opens a model: that of causal LMs, unless it knows it only among those
    that see images."""
    if "config" in kwargs:
        return AutoModelForCausalLM
    where = {key: kwargs[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in kwargs}
    try:
        said, _ = PretrainedConfig.get_config_dict(str(name), **where)
    except OSError:
        return AutoModelForCausalLM  # which finds the base of an adapter, or says what is missing
    kind, remote = said.get("model_type"), trust_remote_code and "AutoModelForCausalLM" in said.get("auto_map", {})
    if remote or kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _to(model: Any, device: Any) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error
