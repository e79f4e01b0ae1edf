"""Options of how a model is computed: compilation, batch invariance and adapters."""

from dataclasses import dataclass

from redrafter.options import check_values, option, whole

# How a model may be quantised when it is loaded; `quantized_layers.SCHEMES` says how.
SCHEMES = "fp8", "int4", "int8"
# How its checkpoint may be quantised, in vLLM's words.
STORED_SCHEMES = "awq", "gptq", "gguf", "compressed-tensors", "torchao", "bitsandbytes"


@dataclass(frozen=True)
class ModelOptions:
    """Configures the forwards of an engine: compilation, batch invariance and the number of adapters.

    Attributes:
        compile: compile the model on a GPU, which takes time at the first request and makes steps faster
        batch_invariant: make outputs independent of the batch, bit for bit, and of drafts and prompt chunks; slower,
            and on a GPU only for a compiled model
        max_loras: LoRA adapters that may be loaded at once
        max_lora_rank: maximum rank of adapters; a step with adapters computes as many columns for each, in each changed
            layer
    """

    compile: bool = True
    batch_invariant: bool = False
    max_loras: int = option(4, check=whole(1), commands=("serve",))
    max_lora_rank: int = option(16, check=whole(1), commands=("serve",))

    def __post_init__(self) -> None:
        check_values(self)
