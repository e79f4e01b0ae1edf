"""Settings of the recipe, each with its default and its help text.

A field that starts with the name of a stage belongs to that stage; the others belong to all. The command line is made
from this class, and a stage that was made with other settings is never taken for this one.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from redrafter.options import option

COMPILE_MODES = ("auto", "off", "default", "reduce-overhead", "max-autotune-no-cudagraphs")


class UserError(Exception):
    """A wrong file or setting. The message says what was wrong, what was found and what to do; no traceback."""


@dataclass(frozen=True)
class Recipe:
    """Settings of all stages. `--tiny` replaces some of the defaults by those in `TINY`."""

    data: str = option("", "the texts: JSON lines, .jsonl, .jsonl.gz or .jsonl.xz (form: README.md)")
    out: str = option("build/tiny_pair", "folder that receives every stage's output and report.json")
    exclude: tuple[str, ...] = option(("sgd", "topical_chat"), "sources to leave out", nargs="*")
    seed: int = option(0, "seed of everything random")
    device: str = option("auto", "cuda, cpu, or auto: cuda where there is one")
    compile: str = option("auto", f"torch.compile mode, one of {', '.join(COMPILE_MODES)}; auto: only on cuda")

    tokenizer_vocab: int = option(2048, "tokens in the vocabulary, the special ones included")
    tokenizer_chars: int = option(25_000_000, "characters to learn it from, balanced over the sources")

    base_hidden: int = option(96, "width of the residual stream")
    base_layers: int = option(40, "decoder layers: deep and narrow, so that verifying many nodes costs little more")
    base_heads: int = option(3, "query heads")
    base_kv_heads: int = option(1, "key and value heads")
    base_head_dim: int = option(32, "width of a head")
    base_intermediate: int = option(288, "width of the MLP")
    base_positions: int = option(1024, "longest context, in tokens")
    base_window: int = option(1024, "tokens in a training window")
    base_batch: int = option(128, "windows in one forward pass")
    base_accumulate: int = option(1, "passes in one step; short of memory, raise it and lower --base-batch")
    base_minutes: float = option(2.2, "training time after compilation; the learning rate follows the clock to 0")
    base_steps: int = option(0, "train for this many steps instead of --base-minutes; 0: by the clock")
    base_matrix_lr: float = option(0.02, "peak learning rate of Muon, for the layers' matrices")
    base_lr: float = option(4e-3, "peak learning rate of AdamW, for embeddings and norms")
    base_weight_decay: float = option(0.1, "decay of matrices, times their learning rate")
    base_chat_weight: float = option(2.5, "how much oftener a conversation is seen than a text of its length")

    text_minutes: float = option(1.5, "time to write for")
    text_batches: int = option(0, "write this many batches instead of for --text-minutes; 0: by the clock")
    text_batch: int = option(16_384, "texts written at once")
    text_length: int = option(512, "tokens of a text, its opening included")
    text_prompt: int = option(96, "tokens of the opening, taken from the training texts, at most")
    text_greedy: float = option(0.235, "part of the texts that is greedy; the rest is drawn at temperature 1")

    drafter_minutes: float = option(5.0, "training time after compilation")
    drafter_steps: int = option(0, "train for this many steps instead of --drafter-minutes; 0: by the clock")
    drafter_batch: int = option(64, "rows in a step")
    drafter_length: int = option(512, "tokens of a row, which may hold several texts")
    drafter_own: float = option(0.85, "part of the tokens written by the base; the others are the corpus's own")
    drafter_len: int = option(5, "draft steps")
    drafter_beams: int = option(5, "beams that it is searched with unless asked otherwise")
    drafter_fused: tuple[int, ...] = option(
        (9, 19, 29, 38), "layers of the base, from 0, whose outputs it reads too", type=int, nargs="*"
    )
    drafter_context: int = option(512, "tokens of the text that each draft step attends to, the last ones")
    drafter_context_heads: int = option(3, "query heads of that attention")
    drafter_context_kv_heads: int = option(1, "its key and value heads")
    drafter_context_head_dim: int = option(32, "width of its heads")
    drafter_layers: int = option(3, "residual layers")
    drafter_exit: int = option(512, "width of the layers; 0: twice the base's")
    drafter_rank: int = option(256, "rank of the head; 0: full")
    drafter_distill: float = option(0.9, "weight of the base's distribution against the text's own tokens")
    drafter_lr: float = option(4e-3, "peak learning rate")

    evaluation_prompts: int = option(200, "held-out prompts")
    evaluation_new: int = option(128, "tokens written after each")

    def __post_init__(self) -> None:
        """Refuse what cannot work, before the first minute is spent."""
        if self.compile not in COMPILE_MODES:
            raise UserError(f"--compile {self.compile}: not one of {', '.join(COMPILE_MODES)}")
        if not 0 < self.base_window <= self.base_positions:
            raise UserError(f"--base-window {self.base_window}: must be 1 to --base-positions ({self.base_positions})")
        if self.base_heads % self.base_kv_heads:
            raise UserError(f"--base-heads {self.base_heads}: must be a multiple of --base-kv-heads")
        if not 262 <= self.tokenizer_vocab <= 65536:
            raise UserError(f"--tokenizer-vocab {self.tokenizer_vocab}: must be 262 (bytes and specials) to 65536")

    @property
    def torch_device(self) -> torch.device:
        """`device`, with `auto` resolved."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def settings(self, stage: str) -> dict[str, Any]:
        """Return the settings that a stage depends on: its own fields, and those shared ones that change a result."""
        return {k: v for k, v in asdict(self).items() if k in ("exclude", "seed") or k.startswith(f"{stage}_")}


TINY = {
    "tokenizer_vocab": 512,
    "tokenizer_chars": 300_000,
    "base_hidden": 64,
    "base_layers": 2,
    "base_heads": 2,
    "base_head_dim": 32,
    "drafter_exit": 0,
    "base_intermediate": 128,
    "base_window": 128,
    "base_batch": 8,
    "base_steps": 20,
    "text_batches": 2,
    "text_batch": 8,
    "text_length": 64,
    "text_prompt": 32,
    "drafter_steps": 10,
    "drafter_batch": 8,
    "drafter_length": 64,
    "drafter_fused": (0,),
    "drafter_context": 32,
    "drafter_context_heads": 2,
    "drafter_rank": 32,
    "evaluation_prompts": 6,
    "evaluation_new": 16,
}
