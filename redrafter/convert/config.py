"""The options of `redrafter convert`: those of TensorRT-LLM's ReDrafter script, by their names, and some more.

What its script has and this does not need is in `redrafter.app.trtllm_flags`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from redrafter.app.flags import add_options, flag, option, read_options, yes_or_no
from redrafter.app.parser import Parser
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.drafting.drafter_config import RECURRENCES
from redrafter.errors import ArgumentError

__all__ = ["ConvertConfig", "parse", "parser"]

FORMATS = ("redrafter", "trtllm", "apple", "drafter")
_MEANT_FOR = {  # where not for all
    "base_model_checkpoint_dir": ("redrafter", "trtllm", "drafter"),
    "copy": ("redrafter",),
    "node_budget": ("redrafter",),
    "redrafter_draft_len_per_beam": ("redrafter", "trtllm", "drafter"),
    "redrafter_greedy_search": ("redrafter", "trtllm"),
    "redrafter_no_greedy_search": ("redrafter", "trtllm"),
    "redrafter_num_beams": ("redrafter", "trtllm", "drafter"),
    "tokenizer_dir": ("redrafter",),
    "tp_size": ("trtllm",),
}


@dataclass(frozen=True)
class ConvertConfig:
    """Everything that can be chosen about a conversion."""

    base_model_checkpoint_dir: str | None = option(
        None, "the model: Hugging Face's, a merged checkpoint, or TensorRT-LLM's of a Llama or Qwen2", metavar="DIR"
    )
    drafter_model_dir: str | None = option(
        None,
        "its drafter: this project's, Apple's, or what a merged or a TensorRT-LLM checkpoint holds (default: the base "
        "directory's own)",
        metavar="DIR",
    )
    output_dir: str | None = option(None, "directory to write", metavar="DIR")
    to: str = option(
        "redrafter",
        "what to write: a merged checkpoint, TensorRT-LLM's, Apple's drafter, or this project's drafter",
        choices=FORMATS,
    )
    dtype: str | None = option(
        None,
        "the drafter's number format, and for trtllm the base's too (default: as stored; for trtllm, the base's)",
        choices=("float32", "bfloat16", "float16"),
    )
    tp_size: int | None = option(
        None, "ranks of a TensorRT-LLM checkpoint (default: 1, or those of the base)", type=int, metavar="N"
    )
    workers: int = option(1, "files written at once")
    redrafter_num_beams: int | None = option(None, "beams (default: the drafter's)", type=int, metavar="W")
    redrafter_draft_len_per_beam: int | None = option(
        None, "tokens per beam, without the one that is certain (default: the drafter's)", type=int, metavar="K"
    )
    redrafter_no_greedy_search: bool = option(False, "sample where a call does not say")
    redrafter_greedy_search: bool | None = option(
        None,
        "write greedily where a call does not say; False is --redrafter-no-greedy-search (default: the source's)",
        nargs="?",
        const=True,
        type=yes_or_no,
        metavar="True|False",
    )
    node_budget: int | None = option(
        None, "nodes verified in a step (default: what suits the device)", type=int, metavar="N"
    )
    recurrence: str | None = option(
        None,
        "how a TensorRT-LLM checkpoint's drafter was trained (default: apple, what public trainers train)",
        choices=tuple(name for name in RECURRENCES if name != "gated"),
    )
    tokenizer_dir: str | None = option(
        None, "where the tokenizer comes from, for a base that has none, such as TensorRT-LLM's", metavar="DIR"
    )
    copy: bool = option(False, "copy the base's weights also where they could be hard links")
    overwrite: bool = option(False, "replace the checkpoint that --output-dir holds")
    dry_run: bool = option(False, "print which tensor becomes which, and write nothing")

    def __post_init__(self) -> None:
        if self.base_model_checkpoint_dir is None and self.drafter_model_dir is None:
            raise ArgumentError("nothing to convert: give --base-model-checkpoint-dir, --drafter-model-dir or both")
        if self.output_dir is None and not self.dry_run:
            raise ArgumentError("--output-dir is required, unless --dry-run is given")
        if self.redrafter_no_greedy_search and self.redrafter_greedy_search:
            raise ArgumentError("--redrafter-greedy-search and --redrafter-no-greedy-search exclude each other")
        for name in ("tp_size", "workers"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= 4096:
                raise ArgumentError(f"{flag(name)} must be from 1 to 4096, got {value}")
        for each in fields(self):
            value = getattr(self, each.name)
            if value == "":
                raise ArgumentError(f"{flag(each.name)} needs a value, got an empty one")
            if value != each.default and self.to not in _MEANT_FOR.get(each.name, FORMATS):
                raise ArgumentError(f"{flag(each.name)} is for --to {' or '.join(_MEANT_FOR[each.name])}: leave it out")

    @property
    def defaults(self) -> Defaults:
        shape = TreeShape(self.redrafter_num_beams, self.redrafter_draft_len_per_beam, self.node_budget)
        return Defaults(shape, False if self.redrafter_no_greedy_search else self.redrafter_greedy_search)


def parser(prog: str | None) -> Parser:
    """Return the parser of the command."""
    found = Parser(
        prog=prog,
        description="Convert a drafter, or a model with its drafter, between this project's, Apple's and\n"
        "TensorRT-LLM's formats, or merge a model and its drafter into one directory.",
        epilog="examples:\n"
        "  redrafter convert --base-model-checkpoint-dir my-base --drafter-model-dir my-drafter --output-dir merged\n"
        "  redrafter convert --drafter-model-dir apple-drafter --to drafter --output-dir my-drafter\n"
        "  redrafter convert --base-model-checkpoint-dir tllm-checkpoint --tokenizer-dir my-base --output-dir merged",
    )
    add_options(found, ConvertConfig, "converting")
    return found


def parse(argv: Sequence[str] | None, prog: str | None) -> ConvertConfig:
    """Read a command line."""
    return read_options(ConvertConfig, parser(prog).parse_args(argv))
