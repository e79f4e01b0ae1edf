"""Convert drafters and pairs between this project's, Apple's and TensorRT-LLM's formats; merge a model and its drafter.

    redrafter convert --base_model_checkpoint_dir my-base --drafter_model_dir my-drafter --output_dir my-merged

From a checkout also `python convert/convert_checkpoint.py ...`. Where a model's weights stay as they are they become
hard links if the file system allows it, so a merged checkpoint costs the drafter's size only: do not write into the
weight files of either directory. Tensors are read a few rows at a time; a checkpoint appears whole or not at all.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from tqdm import tqdm

from redrafter.app.program import print_message, run_command
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert import base as bases
from redrafter.convert import drafters
from redrafter.convert.config import ConvertConfig, parse
from redrafter.convert.plan import Plan
from redrafter.convert.targets import TARGETS, ConversionRequest, Source
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.files.atomic_folder import check_output_folder, write_folder
from redrafter.files.checkpoint_kind import kind_of

__all__ = ["convert", "main", "merge", "plan"]

WRITES = {
    "redrafter": "merged checkpoint",
    "trtllm": "TensorRT-LLM ReDrafter checkpoint",
    "apple": "Apple drafter",
    "drafter": "drafter",
}


def merge(
    base: str | Path, drafter: str | Path, output: str | Path, shape: TreeShape | None = None, overwrite: bool = False
) -> Path:
    """Write the merged checkpoint `output` from a model directory and a drafter directory. Returns its path.

    shape: how the drafter is to be searched; what it leaves open is taken from the drafter's config. overwrite: replace
    `output`, which must be a merged checkpoint itself.

    Raises `CheckpointError` for files that are missing or cut short, `MismatchError` for a drafter of another base, and
    `ArgumentError` for an output that cannot be written or a shape that cannot be searched. Then nothing is written.
    """
    shape = shape or TreeShape()
    config = ConvertConfig(
        base_model_checkpoint_dir=str(base),
        drafter_model_dir=str(drafter),
        output_dir=str(output),
        redrafter_num_beams=shape.num_beams,
        redrafter_draft_len_per_beam=shape.draft_len_per_beam,
        node_budget=shape.node_budget,
        overwrite=overwrite,
    )
    convert(config)
    return Path(output)


def plan(config: ConvertConfig) -> Plan:
    """What a conversion will write; raises for everything that is wrong with what it is made from."""
    base = None if config.base_model_checkpoint_dir is None else Path(config.base_model_checkpoint_dir)
    place = Path(config.drafter_model_dir or config.base_model_checkpoint_dir or "")
    drafter = drafters.read(place, config.recurrence)
    if base is None and config.to in ("redrafter", "trtllm") and drafter.kind not in ("drafter", "Apple drafter"):
        base = place  # it holds a base too
    tokenizer = None if config.tokenizer_dir is None else Path(config.tokenizer_dir)
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        raise ArgumentError(f"--tokenizer-dir {tokenizer} has no tokenizer_config.json")
    source = Source(drafter, None if base is None or config.to == "apple" else bases.read(base), tokenizer)
    made = TARGETS[config.to](source, ConversionRequest(config.defaults, config.dtype, config.tp_size))
    return Plan(made.weights, made.copies, made.texts, made.notes, config.copy)


def convert(config: ConvertConfig, log: Callable[[str], object] = lambda line: None, shown: bool = False) -> None:
    """Convert. log: told what a person should know. shown: whether there is a progress bar on stderr."""
    output = Path(str(config.output_dir))
    for source in (config.base_model_checkpoint_dir, config.drafter_model_dir):
        if source is not None:
            _check_apart(output, Path(source))
    made = plan(config)
    what = WRITES[config.to]
    check_output_folder(
        output, config.overwrite, flag="--output-dir", what=what, replaceable=lambda path: _is(path, what)
    )
    made.check_space(output)
    lock = Lock()
    with tqdm(total=made.bytes(output), unit="B", unit_scale=True, disable=None if shown else True) as bar:

        def progress(count: int) -> None:
            with lock:
                bar.update(count)

        write_folder(output, lambda folder: made.fill(folder, progress, config.workers))
    for note in made.notes:
        log(note)


def _check_apart(output: Path, source: Path) -> None:
    mine, theirs = (Path(os.path.realpath(each)) for each in (output, source))
    if mine == theirs or mine in theirs.parents or theirs in mine.parents:
        raise ArgumentError(f"the output {output} and its source {source} must not hold one another")


def _is(path: Path, kind: str) -> bool:
    with suppress(ReDrafterError):
        return kind_of(path) == kind
    return False


def _print_map(made: Plan) -> None:
    rows = [("from", "to", "shape", "dtype"), *made.key_map()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""

    def run() -> int:
        config = parse(argv, "redrafter convert")
        if config.dry_run:
            made = plan(config)
            _print_map(made)
            for note in made.notes:
                print_message("note", note)
            return 0
        convert(config, log=lambda line: print_message("note", line), shown=True)
        print(config.output_dir)
        return 0

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
