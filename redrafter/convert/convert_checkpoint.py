"""`redrafter convert`: change the format of a drafter or a pair, or merge a model and its drafter.

    redrafter convert --base_model_checkpoint_dir my-base --drafter_model_dir my-drafter --output_dir my-merged

In a checkout, `python convert/convert_checkpoint.py ...` is equivalent. Unchanged weight files become hard links if the
file system supports them, so that a merged checkpoint takes only the drafter's size on the disk: do not write into the
weight files of either directory. Tensors are read one at a time. The output appears only once it is complete.
"""

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from redrafter.app.paths import check_paths
from redrafter.app.program import print_message
from redrafter.checkpoints.drafters import check_beams
from redrafter.convert.config import ConvertConfig, check_output, main
from redrafter.convert.plan import OUTPUT_PLANNERS, ConversionPlan, notes_on
from redrafter.files.atomic_folder import write_folder
from redrafter.formats.sources import is_pair, open_base, open_drafter


def plan_conversion(config: ConvertConfig) -> ConversionPlan:
    """Open the sources of a conversion, check them, and return the files to write."""
    base = None if config.base_model_checkpoint_dir is None else Path(config.base_model_checkpoint_dir)
    directory = Path(config.drafter_model_dir or config.base_model_checkpoint_dir or "")
    drafter = open_drafter(directory, config.recurrence)
    if base is None and config.to in ("redrafter", "trtllm") and is_pair(drafter.kind):
        base = directory
    check_paths(config)
    opened_base = None if base is None or config.to == "apple" else open_base(base)
    if opened_base is not None:
        opened_base.check_fits(drafter.config)
    shape = drafter.fill(config.defaults).shape
    check_beams(drafter.config, shape.num_beams)
    plan = OUTPUT_PLANNERS[config.to](drafter, opened_base, config)
    length = None if config.to == "apple" else shape.draft_len_per_beam
    return replace(plan, copy=config.copy, notes=(*plan.notes, *notes_on(drafter, length)))


def convert(config: ConvertConfig, log: Callable[[str], object] = lambda _: None, show_progress: bool = False) -> None:
    """Run a conversion; `log` receives each note for the user. An error leaves no output."""
    output = check_output(config)
    # Everything is checked before the first byte is written.
    plan = plan_conversion(config)
    with tqdm(total=plan.size, unit="B", unit_scale=True, disable=None if show_progress else True) as bar:
        write_folder(output, lambda folder: plan.write(folder, bar.update))
    for note in plan.notes:
        log(note)


def _next_command(config: ConvertConfig) -> str:
    """Return the command that uses the output."""
    output = str(config.output_dir)
    if config.to == "trtllm":
        return shlex.join(["trtllm-build", "--checkpoint_dir", output])
    pair = ["--model", output] if config.to == "redrafter" else ["--model", "BASE", "--drafter", output]
    return shlex.join(["redrafter", "generate", *pair, "--compare", "Once upon a time"])


def run_checked(config: ConvertConfig) -> int:
    """Run the command with options validated by `main`. Returns its exit code."""
    if config.dry_run:
        plan = plan_conversion(config)
        rows = [("from", "to", "shape", "dtype"), *plan.key_map()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in plan.notes:
            print_message("note", note)
        return 0
    convert(config, log=lambda line: print_message("note", line), show_progress=True)
    print(config.output_dir)
    print(f"next: {_next_command(config)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
