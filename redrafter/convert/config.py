"""Options of `redrafter convert`, including the options of TensorRT-LLM's ReDrafter script under the same names.

`redrafter.app.foreign_flags` lists the options of that script that have no effect here.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from redrafter.app.config_file import ConfigParser, command_parser
from redrafter.app.flags import flag, read_options, yes_or_no
from redrafter.app.paths import check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.checkpoints.merged import Defaults
from redrafter.drafting.recurrent_form import RECURRENCES
from redrafter.errors import ArgumentError
from redrafter.files.atomic_folder import check_output_folder
from redrafter.options import between, check_values, dtype_word, option
from redrafter.tree.sizes import TreeShape

OUTPUT_KINDS = {  # the output formats, and the results of `kind_of` for each
    "redrafter": ("merged checkpoint",),
    "trtllm": ("TensorRT-LLM ReDrafter checkpoint",),
    "apple": ("Apple drafter",),
    "drafter": ("drafter",),
    "speculators": ("EAGLE-3 head", "DFlash drafter"),
}
_OPTION_FORMATS = {  # output formats that support an option, for options that not all formats support
    "base_model_checkpoint_dir": ("redrafter", "trtllm", "drafter", "speculators"),
    "copy": ("redrafter",),
    "node_budget": ("redrafter",),
    "redrafter_draft_len_per_beam": ("redrafter", "trtllm", "drafter", "speculators"),
    "redrafter_greedy_search": ("redrafter", "trtllm"),
    "redrafter_num_beams": ("redrafter", "trtllm", "drafter"),
    "tokenizer_dir": ("redrafter",),
    "tp_size": ("trtllm",),
}


@dataclass(frozen=True)
class ConvertConfig:
    r"""Convert a drafter, or a model with its drafter, or merge a model and its drafter into one directory.

    Formats: redrafter, Apple, TensorRT-LLM and speculators.

    Examples:
        redrafter convert --base-model-checkpoint-dir my-base --drafter-model-dir my-drafter --output-dir merged
        redrafter convert --drafter-model-dir apple-drafter --to drafter --output-dir my-drafter
        redrafter convert --base-model-checkpoint-dir my-base --drafter-model-dir my-head --to speculators \
              --output-dir out
        redrafter convert --base-model-checkpoint-dir tllm-checkpoint --tokenizer-dir my-base --output-dir merged

    Attributes:
        base_model_checkpoint_dir: the model: a Hugging Face model, a GGUF file, a merged checkpoint, or a TensorRT-LLM
            checkpoint of Llama or Qwen2
        drafter_model_dir: the drafter: one of redrafter or of Apple, an EAGLE-3 head, a DFlash or DSpark drafter, or a
            merged or TensorRT-LLM checkpoint that holds one (default: the one in the directory of the model)
        output_dir: directory to write
        to: output format: a merged checkpoint of redrafter, a TensorRT-LLM checkpoint, a drafter in Apple's format, a
            drafter of redrafter, or an EAGLE-3 head or DFlash drafter as vllm-project/speculators and vLLM read it, and
            llama.cpp a head
        dtype: number format of the drafter, and with --to trtllm of the base too; int8, with --to redrafter and
            drafter, saves its matrices in 8 bits (default: as stored; with --to trtllm, the base's)
        tp_size: number of ranks of a TensorRT-LLM checkpoint (default: 1, or as many as the base has)
        redrafter_num_beams: beams of the drafter's search (default: the drafter's)
        redrafter_draft_len_per_beam: tokens drafted per beam, without the token that is certain already (default: the
            drafter's)
        redrafter_greedy_search: decode greedily by default, unless a call chooses; False, or
            --redrafter-no-greedy-search, samples (default: the source's)
        node_budget: nodes of the tree that is verified per step, its root included (default: what suits the device)
        recurrence: recurrence that a TensorRT-LLM checkpoint's drafter was trained with (default: apple, as in public
            trainers)
        tokenizer_dir: directory of a tokenizer, for a base that has none, such as TensorRT-LLM's
        copy: copy the base's weights even where they could be hard links
        overwrite: replace the checkpoint that --output-dir holds
        dry_run: print the source and the new name of each tensor, and write nothing
    """

    base_model_checkpoint_dir: str | None = option(None, names="checkpoint")
    drafter_model_dir: str | None = option(None, names="checkpoint")
    output_dir: str | None = option(None, metavar="DIR")
    to: str = option("redrafter", choices=tuple(OUTPUT_KINDS))
    dtype: str | None = option(None, choices=("float32", "bfloat16", "float16", "int8"), type=dtype_word)
    tp_size: int | None = option(None, check=between(1, 4096))
    redrafter_num_beams: int | None = None
    redrafter_draft_len_per_beam: int | None = None
    redrafter_greedy_search: bool | None = option(None, nargs="?", const=True, type=yes_or_no, metavar="True|False")
    node_budget: int | None = None
    recurrence: str | None = option(None, choices=tuple(name for name in RECURRENCES if name != "gated"))
    tokenizer_dir: str | None = option(None, names="tokenizer")
    copy: bool = False
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.base_model_checkpoint_dir is None and self.drafter_model_dir is None:
            raise ArgumentError("nothing to convert: give --base-model-checkpoint-dir, --drafter-model-dir or both")
        if self.output_dir is None and not self.dry_run:
            raise ArgumentError("--output-dir is required, unless --dry-run is given")
        check_values(self, flag)
        for item in fields(self):
            if vars(self)[item.name] != item.default and self.to not in _OPTION_FORMATS.get(item.name, OUTPUT_KINDS):
                formats = " or ".join(_OPTION_FORMATS[item.name])
                raise ArgumentError(f"{flag(item.name)} is for --to {formats}: leave it out")

    @property
    def defaults(self) -> Defaults:
        """Search and sampling defaults set by the options; None keeps the source's value."""
        shape = TreeShape(self.redrafter_num_beams, self.redrafter_draft_len_per_beam, self.node_budget)
        return Defaults(shape, self.redrafter_greedy_search)


def build_parser() -> ConfigParser:
    """Return the parser of the command."""
    return command_parser("redrafter convert", (ConvertConfig, "converting", ()))


def parse(argv: Sequence[str] | None) -> ConvertConfig:
    """Parse the arguments of the command; None parses `sys.argv[1:]`."""
    return read_options(ConvertConfig, build_parser().parse_args(argv))


def check_output(config: ConvertConfig) -> Path:
    """Return the output directory; raise `ArgumentError` if it overlaps a source or must not be replaced."""
    output = Path(str(config.output_dir))
    for source in filter(None, (config.base_model_checkpoint_dir, config.drafter_model_dir)):
        # Resolve symbolic links: an output inside of its source would be read while it is written.
        real_output, real_source = Path(os.path.realpath(output)), Path(os.path.realpath(source))
        if real_output == real_source or real_output in real_source.parents or real_source in real_output.parents:
            raise ArgumentError(f"the output {output} and its source {source} must not hold one another")
    check_output_folder(output, config.overwrite, flag="--output-dir", kinds=OUTPUT_KINDS[config.to])
    return output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def command() -> int:
        config = parse(argv)
        check_paths(config)
        if not config.dry_run:
            check_output(config)
        return int(import_libraries("redrafter.convert.convert_checkpoint").run_checked(config))

    return run_command(command)
