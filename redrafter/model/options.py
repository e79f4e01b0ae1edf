"""Options of how a model is computed: compilation, batch invariance and adapters."""

from dataclasses import dataclass

from redrafter.options import check_values, option, whole


@dataclass(frozen=True)
class ModelOptions:
    """Configure the forwards of an engine: compilation, batch invariance and the number of adapters."""

    compile: bool = option(
        True, "compile the model on a GPU, which takes time at the first request and makes steps faster"
    )
    batch_invariant: bool = option(
        False,
        "write the same text whatever is computed beside it, bit for bit: drafts, other texts, cut prompts; slower, "
        "and on a GPU only for a compiled model",
    )
    max_loras: int = option(4, "LoRA adapters that may be loaded at once", check=whole(1), commands=("serve",))
    max_lora_rank: int = option(
        16,
        "most of their ranks; a step with adapters computes as many columns for each, in each layer that they change",
        check=whole(1),
        commands=("serve",),
    )

    def __post_init__(self) -> None:
        check_values(self)
