"""Load models from directories or the hub, and bind them as targets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file

from redrafter.checkpoints.load_keywords import check_no_load_keywords, check_reserved_keywords, unknown_keyword_error
from redrafter.checkpoints.quantization import check_quantization, quantize_model
from redrafter.checkpoints.splitting import check_loaded_size, check_splits, split_arguments, split_device
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import check_path, load_error, wrong_kind_error
from redrafter.target.supported import base_of
from redrafter.target.target import Target

__all__ = ["bind", "find_model_file", "load_model"]

# Keyword arguments of `load_model` itself; it hands all others to transformers.
LOAD_ARGUMENTS = ("dtype", "device", "trust_remote_code", "caller", "quantization", "tp_size")


def bind(model: str | Path | PreTrainedModel | Target, **load: Any) -> Target:
    """Return a model as a `Target`, loaded first if need be.

    Args:
        model: Hub id, directory, loaded model, or a target, which is returned as it is.
        load: Keyword arguments of `load_model`.

    Raises:
        ArgumentError: If `model` is none of these, or `load` has arguments for loading and it is loaded already.
        CheckpointError: If the model cannot be loaded.
        UnsupportedError: If the model cannot be used as a target.
    """
    model = base_of(model)
    if not isinstance(model, str | Path | PreTrainedModel | Target):
        raise ArgumentError(f"a model is a hub id, a directory or a loaded model, got {type(model).__name__}")
    if isinstance(model, Target):
        check_quantization(load.get("quantization"), model)
        check_no_load_keywords({key: value for key, value in load.items() if key not in LOAD_ARGUMENTS})
        return model
    return Target(load_model(model, **load))


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    dtype: Any,
    device: Any,
    trust_remote_code: bool,
    caller: Callable[..., Any] | None = None,
    quantization: str | None = None,
    tp_size: int = 1,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal LM from a hub id or a directory.

    Args:
        name: Hub id or directory. A loaded model is returned itself, without a PEFT wrapper.
        dtype: Dtype of the weights, as `AutoModelForCausalLM.from_pretrained` takes it. Unused for a loaded model.
        device: Device to move the model to; None leaves it where it is.
        trust_remote_code: Whether code in the checkpoint may run.
        caller: The `from_pretrained` whose argument an unknown keyword may be a misspelling of.
        quantization: "fp8" to quantise the weights of linear layers to FP8, "fp8_dynamic" to round their inputs too;
            None to leave them as they are.
        tp_size: Processes that share the model, all of which call this; 1 for a whole model.
        kwargs: For `AutoModelForCausalLM.from_pretrained`, or for `AutoModelForImageTextToText.from_pretrained` for
            models that see images.

    Raises:
        ArgumentError: If transformers does not take one of `kwargs`, the model is loaded already and `kwargs` are
            given, the device cannot be used, there is no such quantisation, or the model cannot be shared by so many
            processes.
        CheckpointError: If the model cannot be loaded, or lacks weights.
        UnsupportedError: If the model cannot be quantised, or shared by processes.
    """
    check_quantization(quantization, name)
    if not isinstance(name, str | Path):
        check_loaded_size(base_of(name), tp_size)
        check_no_load_keywords(kwargs)
        return base_of(name) if device is None else _move(base_of(name), device)
    check_path(str(name))
    check_reserved_keywords(kwargs)
    if tp_size != 1:
        split_device(device)
        quantized = quantization is not None or "quantization_config" in kwargs
        check_splits(str(name), tp_size, trust_remote_code, kwargs, quantized=quantized)
        device, kwargs = None, kwargs | split_arguments(tp_size)
    try:
        loaded: Any = _auto_class(name, trust_remote_code, kwargs).from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
        )
    except Exception as error:
        raise unknown_keyword_error(error, kwargs, caller) or load_error("model", name, error) from error
    model, info = loaded
    if info["missing_keys"]:
        if Path(name).is_dir() and (wrong_kind := wrong_kind_error(Path(name), "model")):
            raise wrong_kind
        raise CheckpointError(f"{name} is not whole: missing {', '.join(sorted(info['missing_keys'])[:5])}")
    if quantization is not None:
        _quantize(model, str(name), device, quantization)
    return model if device is None else _move(model, device)


def find_model_file(model: str, name: str) -> str | None:
    """Return the path of a file in a model's directory or repository, downloaded if need be.

    Args:
        model: Directory or hub id of a model.
        name: Name of the file.

    Returns:
        The path, or None where there is no such file or the hub cannot be asked.
    """
    try:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None  # loading the model says what is wrong


def _auto_class(name: str | Path, trust_remote_code: bool, kwargs: dict[str, Any]) -> Any:
    """Return the auto class of transformers that loads a model.

    It is the one for causal LMs, unless transformers knows the model type only among models that see images.
    """
    if "config" in kwargs:
        return AutoModelForCausalLM
    hub_options = {key: kwargs[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in kwargs}
    try:
        config, _ = PretrainedConfig.get_config_dict(str(name), **hub_options)
    except OSError:
        return AutoModelForCausalLM  # which finds the base of an adapter, or says what is missing
    model_type = config.get("model_type")
    if trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {}):
        return AutoModelForCausalLM
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _quantize(model: Any, name: str, device: Any, quantization: str) -> None:
    with _device_errors(device):
        quantize_model(model, name, device, quantization=quantization)


def _move(model: Any, device: Any) -> Any:
    with _device_errors(device):
        return model.to(device)


@contextmanager
def _device_errors(device: Any) -> Iterator[None]:
    """Name a device that cannot be used."""
    try:
        yield
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error
