"""Load a model in parts: each process reads its own part of every weight, as transformers' plan for the model says."""

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.checkpoint_kind import load_error
from redrafter.parallel.ranks import join_ranks

__all__ = ["check_loaded_size", "check_splits", "split_arguments", "split_device"]

_WITHOUT = "load it in one process, without tp_size and torchrun"
_CONFIG_ARGUMENTS = ("cache_dir", "revision", "subfolder", "token")


def check_loaded_size(model: Any, tp_size: int) -> None:
    """Raise `ArgumentError` where a loaded model is not split over as many processes as are asked for."""
    size = getattr(model, "_tp_size", None) or 1
    if tp_size not in (1, size):
        raise ArgumentError(
            f"tp_size={tp_size}: this model is loaded already, whole; give its directory or hub id, so that each "
            "process reads its own part"
        )


def check_splits(
    name: str, tp_size: int, trust_remote_code: bool, kwargs: Mapping[str, Any], *, quantized: bool = False
) -> None:
    """Check that so many processes can share a model, and open the lines between them.

    Args:
        name: Directory or hub id of the model.
        tp_size: Number of processes.
        trust_remote_code: Whether code in the checkpoint may run.
        kwargs: What else transformers is given.
        quantized: Whether it is quantised while it is loaded.

    Raises:
        ArgumentError: There are other processes than that, or the model's heads cannot be shared by so many.
        CheckpointError: The model's config cannot be read.
        UnsupportedError: transformers has no plan for the model, or it is quantised.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ArgumentError(f"tp_size must be a positive integer, got {tp_size!r}")
    config = kwargs.get("config")
    if config is None:
        hub_options = {key: kwargs[key] for key in _CONFIG_ARGUMENTS if key in kwargs}
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub_options)
        except Exception as error:
            raise load_error("model", name, error) from error
    _check_plan(config, tp_size, name, quantized=quantized)
    join_ranks(tp_size)


def _check_plan(config: PretrainedConfig, tp_size: int, name: str, *, quantized: bool) -> None:
    """Check that a model with this config can be shared by `tp_size` processes."""
    text = config.get_text_config(decoder=True)
    if quantized or getattr(config, "quantization_config", None):
        raise UnsupportedError(f"{name} is quantised, and quantised weights cannot be split yet: {_WITHOUT}")
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedError(
            f"transformers has no tensor-parallel plan (base_model_tp_plan) for {text.model_type} models, such as "
            f"{name}: {_WITHOUT}"
        )
    if not any(key.rsplit(".", 1)[-1] == "k_proj" and style == "colwise" for key, style in plan.items()):
        return  # every process attends with all heads
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    common = gcd(heads, kv_heads)
    if common % tp_size:
        sizes = [str(size) for size in range(1, common + 1) if common % size == 0]
        raise ArgumentError(
            f"tp_size={tp_size} does not divide the {heads} heads and {kv_heads} key-value heads of {name}: "
            f"take {', '.join(sizes[:-1])} or {sizes[-1]}"
            if len(sizes) > 1
            else f"tp_size={tp_size}: {name} has one key-value head, which cannot be split: {_WITHOUT}"
        )


def split_device(device: Any) -> None:
    """Raise `ArgumentError` for a device that a process cannot choose, as its rank says which GPU it has."""
    if device is None:
        return
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) != expected:
        raise ArgumentError(
            f"device={str(device)!r}: with tensor parallelism each process has a device of its own; leave it out"
        )


def split_arguments(tp_size: int) -> dict[str, Any]:
    """Return what transformers must be told to load this process's part of a model."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=tp_size, tp_plan="auto")}
