"""Merge a Hugging Face model and its drafter into one checkpoint, which `ReDrafter.from_pretrained` opens by itself.

    redrafter convert --base_model_checkpoint_dir my-base --drafter_model_dir my-drafter --output_dir my-merged

From a checkout also `python convert/convert_checkpoint.py ...`; options may be written with dashes. The base's weights
are hard links where the file system allows it, so a merged checkpoint costs the drafter's size only: do not write into
the weight files of either directory. Nothing is loaded; a checkpoint appears whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from redrafter.checkpoint import DRAFTER_FOLDER, SHAPE_FILE, TreeShape, check_beams
from redrafter.cli.parser import Parser
from redrafter.cli.program import guarded
from redrafter.errors import ArgumentError
from redrafter.headers import check_pair, read_base, read_drafter

__all__ = ["main", "merge"]

# The one folder of a model directory that belongs to the model: `save_pretrained` keeps further chat templates there.
FOLDERS = ("additional_chat_templates",)


def merge(
    base: str | Path, drafter: str | Path, output: str | Path, shape: TreeShape | None = None, overwrite: bool = False
) -> Path:
    """Write the merged checkpoint `output` from a model directory and a drafter directory. Returns its path.

    shape: how the drafter is to be searched; what it leaves open is taken from the drafter's config. overwrite: replace
    `output`, which must be a merged checkpoint itself.

    Raises `CheckpointError` for files that are missing or cut short, `MismatchError` for a drafter of another base, and
    `ArgumentError` for an output that cannot be written or a shape that cannot be searched. Then nothing is written.
    """
    base, drafter, output = Path(base), Path(drafter), Path(output)
    base_config, headers = read_base(base)
    config, _ = read_drafter(drafter)
    check_pair(config, base_config, headers, str(base))
    shape = (shape or TreeShape()).over(TreeShape(config.draft_beams, config.draft_len_per_beam))
    check_beams(config, shape.num_beams)
    _check_output(output, (base, drafter), overwrite)

    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        _copy(base, partial)
        (partial / DRAFTER_FOLDER).mkdir()
        _copy(drafter, partial / DRAFTER_FOLDER)
        (partial / SHAPE_FILE).write_text(json.dumps(asdict(shape), indent=2) + "\n")
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _check_output(output: Path, sources: Sequence[Path], overwrite: bool) -> None:
    for source in sources:
        mine, theirs = output.resolve(), source.resolve()
        if mine == theirs or mine in theirs.parents or theirs in mine.parents:
            raise ArgumentError(f"the output {output} and its source {source} must not hold one another")
    if not output.exists():
        return
    if not overwrite:
        raise ArgumentError(f"{output} exists; give --overwrite to replace it")
    if not (output / SHAPE_FILE).is_file():
        raise ArgumentError(f"{output} is no merged checkpoint, so it is not overwritten; remove it yourself")


def _copy(source: Path, target: Path) -> None:
    """The files of a model directory: weights as hard links where that works, the small ones as copies to edit."""
    for entry in sorted(source.iterdir()):
        if entry.is_file() and entry.name != SHAPE_FILE and not entry.name.startswith("."):
            if entry.suffix == ".safetensors":
                _link(entry.resolve(), target / entry.name)  # the hub's cache is made of symbolic links
            else:
                shutil.copyfile(entry, target / entry.name)
        elif entry.is_dir() and entry.name in FOLDERS:
            shutil.copytree(entry, target / entry.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _parser() -> Parser:
    parser = Parser(
        prog=None if __name__ == "__main__" else "redrafter convert",
        description="Merge a Hugging Face model and its drafter into one checkpoint.",
        epilog="example:\n  redrafter convert --base-model-checkpoint-dir my-base --drafter-model-dir my-drafter "
        "--output-dir my-merged",
    )
    parser.add_argument("--base-model-checkpoint-dir", required=True, metavar="BASE", help="directory of the model")
    parser.add_argument("--drafter-model-dir", required=True, metavar="DRAFTER", help="directory of the drafter")
    parser.add_argument("--output-dir", required=True, metavar="OUT", help="directory to write")
    parser.add_argument("--redrafter-num-beams", type=int, metavar="W", help="beams (default: the drafter's)")
    parser.add_argument(
        "--redrafter-draft-len-per-beam", type=int, metavar="K", help="tokens per beam (default: the drafter's)"
    )
    parser.add_argument(
        "--node-budget", type=int, metavar="N", help="drafts verified per step (default: what suits the device)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT when it is a merged checkpoint")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    args = _parser().parse_args(argv)

    def run() -> int:
        shape = TreeShape(args.redrafter_num_beams, args.redrafter_draft_len_per_beam, args.node_budget)
        print(merge(args.base_model_checkpoint_dir, args.drafter_model_dir, args.output_dir, shape, args.overwrite))
        return 0

    return guarded(run)


if __name__ == "__main__":
    raise SystemExit(main())
