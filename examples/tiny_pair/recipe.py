"""Every setting of the recipe, each with its default and its help text, once.

A field that starts with a stage's name belongs to that stage; the others concern them all. The command line is made
from this class, and a stage that was made with other settings is never taken for this one.
"""

import argparse
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

COMPILE_MODES = ("auto", "off", "default", "reduce-overhead", "max-autotune-no-cudagraphs")


class UserError(Exception):
    """A wrong file or setting. The message says what was wrong, what was found and what to do; no traceback."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """What to make and how. `--tiny` replaces some of the defaults by those in `TINY`."""

    data: str = _setting("", "the texts: JSON lines, .jsonl, .jsonl.gz or .jsonl.xz (form: README.md)")
    out: str = _setting("build/tiny_pair", "folder that receives every stage's output and report.json")
    exclude: tuple[str, ...] = _setting(("sgd", "topical_chat"), "sources to leave out")
    seed: int = _setting(0, "seed of everything random")
    device: str = _setting("auto", "cuda, cpu, or auto: cuda where there is one")
    compile: str = _setting("auto", f"torch.compile mode, one of {', '.join(COMPILE_MODES)}; auto: only on cuda")

    tokenizer_vocab: int = _setting(2048, "tokens in the vocabulary, the special ones included")
    tokenizer_chars: int = _setting(25_000_000, "characters to learn it from, balanced over the sources")

    base_hidden: int = _setting(96, "width of the residual stream")
    base_layers: int = _setting(40, "decoder layers: deep and narrow, so that verifying many nodes costs little more")
    base_heads: int = _setting(3, "query heads")
    base_kv_heads: int = _setting(1, "key and value heads")
    base_head_dim: int = _setting(32, "width of a head")
    base_intermediate: int = _setting(288, "width of the MLP")
    base_positions: int = _setting(1024, "longest context, in tokens")
    base_window: int = _setting(1024, "tokens in a training window")
    base_batch: int = _setting(128, "windows in one forward pass")
    base_accumulate: int = _setting(1, "passes in one step; short of memory, raise it and lower --base-batch")
    base_minutes: float = _setting(2.2, "training time after compilation; the learning rate follows the clock to 0")
    base_steps: int = _setting(0, "train for this many steps instead of --base-minutes; 0: by the clock")
    base_matrix_lr: float = _setting(0.02, "peak learning rate of Muon, for the layers' matrices")
    base_lr: float = _setting(4e-3, "peak learning rate of AdamW, for embeddings and norms")
    base_weight_decay: float = _setting(0.1, "decay of matrices, times their learning rate")
    base_chat_weight: float = _setting(2.5, "how much oftener a conversation is seen than a text of its length")

    text_rows: int = _setting(24_576, "training prompts that the base writes on from")
    text_prompt: int = _setting(96, "tokens of a prompt, at most")
    text_new: int = _setting(256, "tokens written after each")
    text_batch: int = _setting(8192, "prompts at once; every other batch is greedy")

    drafter_minutes: float = _setting(1.5, "training time after compilation")
    drafter_steps: int = _setting(0, "train for this many steps instead of --drafter-minutes; 0: by the clock")
    drafter_batch: int = _setting(256, "windows in a step")
    drafter_own: float = _setting(0.85, "part of them written by the base; the others are the corpus's own")
    drafter_len: int = _setting(5, "draft steps")
    drafter_beams: int = _setting(5, "beams that it is searched with unless asked otherwise")
    drafter_layers: int = _setting(2, "residual layers")
    drafter_exit: int = _setting(384, "width of the head; 0: twice the base's")
    drafter_distill: float = _setting(0.9, "weight of the base's distribution against the text's own tokens")
    drafter_decay: float = _setting(0.9, "weight of each draft step relative to the one before")
    drafter_lr: float = _setting(4e-3, "peak learning rate")
    drafter_chunk: int = _setting(32_768, "anchors whose draft logits are in memory at once")

    evaluation_prompts: int = _setting(200, "held-out prompts")
    evaluation_new: int = _setting(128, "tokens written after each")

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
        """What `stage` is made with: its own fields, and of the shared ones those that change a result."""
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
    "text_rows": 16,
    "text_prompt": 32,
    "text_new": 32,
    "text_batch": 8,
    "drafter_steps": 10,
    "drafter_batch": 8,
    "drafter_chunk": 512,
    "evaluation_prompts": 6,
    "evaluation_new": 16,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `Recipe`."""
    for item in fields(Recipe):
        default: Any = item.default
        many = isinstance(default, tuple)
        parser.add_argument(
            "--" + item.name.replace("_", "-"),
            type=str if many else type(default),
            nargs="*" if many else None,
            default=default,
            metavar=item.name.rpartition("_")[2].upper(),
            help=f"{item.metadata['help']} (default: %(default)s)",
        )


def from_arguments(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the parsed flags ask for."""
    given: Any = {item.name: getattr(arguments, item.name) for item in fields(Recipe)}
    return Recipe(**given | {"exclude": tuple(given["exclude"])})
