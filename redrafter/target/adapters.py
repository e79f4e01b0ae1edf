"""PEFT adapters: the Hugging Face model that a `PeftModel` wraps, and the state of its adapters.

PEFT is no dependency: an object can be one of its models only where PEFT is imported already.
"""

import sys
from typing import Any

from torch import nn

from redrafter.errors import UnsupportedError

__all__ = ["active_adapters", "base_of"]


def base_of(model: Any) -> Any:
    """Return the Hugging Face model inside a `PeftModel`, or the model itself where it is no such model.

    Raises:
        UnsupportedError: The adapters are more than layers of that model (prompt tuning, X-LoRA, aLoRA, ...).
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
    """Return the state of each adapter layer, to compare: it differs once adapters are added, switched or merged.

    Returns:
        Per layer its id, and which adapters are active, disabled and merged; nothing without PEFT.
    """
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
