"""The Hugging Face model that a caller's object stands for: a `PeftModel` of PEFT, or one compiled by torch.

PEFT is no dependency: an object can be one of its models only where PEFT is imported already.
"""

import sys
from typing import Any

from redrafter.errors import UnsupportedError

__all__ = ["base_of"]


def base_of(model: Any) -> Any:
    """Return the Hugging Face model inside a `PeftModel` or what `torch.compile` returns, or the model itself.

    Raises:
        UnsupportedError: The adapters are more than layers of that model (prompt tuning, X-LoRA, aLoRA, ...).
    """
    model = getattr(model, "_modules", {}).get("_orig_mod", model)  # our forwards are compiled by ourselves
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    tuner = model.base_model
    in_layers = isinstance(tuner, peft.tuners.tuners_utils.BaseTuner)
    in_layers = in_layers and type(tuner).forward is peft.tuners.tuners_utils.BaseTuner.forward
    configs = model.peft_config.values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        raise UnsupportedError(
            f"{type(model).__name__} has an activated LoRA (alora_invocation_tokens), which changes only the tokens "
            "after those that invoke it, and a step has no place to say which; use LoRA without alora_invocation_tokens"
        )
    if not in_layers:
        kinds = ", ".join(sorted({config.peft_type.value for config in configs}))
        raise UnsupportedError(
            f"{type(model).__name__} with {kinds} adapters is more than layers of its model; merge it with "
            "merge_and_unload(), or use adapters that stand in layers, such as LoRA"
        )
    return tuner.model
