"""Recipes of `redrafter train`: options that were measured together, by the name that `--recipe` takes.

A recipe holds only what differs from the command's defaults or was measured at another value. The form's other sizes
follow the base (`init_drafter.new_config`).
"""

from dataclasses import dataclass
from typing import Any

SMALL_BASE = 3_000_000_000  # parameters; small was measured at 135M and 1.5B, large at 135M alone


@dataclass(frozen=True)
class Recipe:
    """Options of a training, the bases that they suit, and the result that was measured with them."""

    suits: str
    options: dict[str, Any]  # values of `TrainConfig`'s fields, for those that neither a flag nor a file sets
    measured: str


RECIPES = {
    # At 135M parameters the default form is a quarter of the base: its head alone reads 25M numbers at each draft step.
    "small": Recipe(
        f"bases of fewer than {SMALL_BASE // 10**9}B parameters, and CPUs",
        {
            "num_layers": 2,
            "head_rank": 320,
            "draft_vocab_size": 16_384,
            "batch_size": 32,
            "lr": 2e-3,
            "save_dtype": "bfloat16",
        },
        "on SmolLM2-135M-Instruct, accepted length 3.84 greedily and 2.67 at T=1 (MT-Bench) after two passes over 30M "
        "tokens of its own text, 6.3 minutes of a shared H200 with --compile --mixed-precision bf16; on "
        "Qwen2.5-Coder-1.5B-Instruct 5.12 and 4.55 (HumanEval) after 2.2 passes over 23M tokens, 9 minutes of an H200",
    ),
    "large": Recipe(
        f"bases of {SMALL_BASE // 10**9}B parameters and more, on GPUs",
        {"dtype": "bfloat16", "length": 2048, "batch_size": 8, "mixed_precision": "bf16", "compile": True},
        "on no base of this size; on SmolLM2-135M-Instruct the same form has accepted length 3.34 greedily and 2.43 at "
        "T=1 (MT-Bench) after six passes over 3.3M tokens of its own text, 2 minutes of an H200 with --lr 0.002",
    ),
}
