"""PEFT: the Hugging Face model that a `PeftModel` wraps, and which of its adapters are at work.

PEFT is no dependency: an object can only be one of its models where it is imported already.
"""

import sys
from typing import Any

from torch import nn

from redrafter.errors import UnsupportedError

__all__ = ["active_adapters", "base_of"]


def base_of(model: Any) -> Any:
    """Return the model in which a `PeftModel`'s adapters stand, and any other object as it is.

    Raises `UnsupportedError` for adapters that are more than layers of that model (prompt tuning, X-LoRA, aLoRA, ...).
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    tuner = model.base_model
    in_layers = isinstance(tuner, peft.tuners.tuners_utils.BaseTuner)
    in_layers = in_layers and type(tuner).forward is peft.tuners.tuners_utils.BaseTuner.forward
    configs = model.peft_config.values()
    if not in_layers or any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        kinds = ", ".join(sorted({config.peft_type.value for config in configs}))
        raise UnsupportedError(
            f"{type(model).__name__} with {kinds} adapters is more than layers of its model; merge it with "
            "merge_and_unload(), or use adapters that stand in layers, such as LoRA"
        )
    return tuner.model


def active_adapters(model: nn.Module) -> list[tuple[int, object]]:
    """Return what differs once adapters are added, switched, disabled or merged: the state of each of their layers."""
    if "peft" not in sys.modules:
        return []
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)  # of a whole model it is a method
    ]
    return [
        (id(layer), (list(layer.active_adapters), layer.disable_adapters, list(getattr(layer, "merged_adapters", ()))))
        for layer in layers
    ]
