"""Train continuously in rounds, each on new files in directories and on some earlier files.

A drafter thus learns from the texts that a server captures, on the same or another machine, and the server can load the
new drafter after each round.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from redrafter.data.rows import open_lines
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER
from redrafter.parallel.launched import launched_processes
from redrafter.train.config import TrainConfig

CURRENT = "current"  # value of --drafter for the existing one
REPLAYED_ROWS = 2048  # of earlier files, newest first, that a round trains on again
POLL_SECONDS = 2.0  # between scans of directories without enough new rows


def current_drafter(config: TrainConfig) -> str:
    """Return the directory of the drafter in `--output`, or else in the base's directory.

    Raises:
        ArgumentError: Neither directory has a drafter.
    """
    for folder in (Path(str(config.output)), Path(str(config.model)) / DRAFTER_FOLDER):
        if (folder / "config.json").is_file():
            return str(folder)
    raise ArgumentError(
        f"--drafter {CURRENT} is the drafter that --output {config.output} holds, or the one in {config.model}, and "
        "there is none: name its directory"
    )


def watch(config: TrainConfig, run: Callable[[TrainConfig], object], log: Callable[[str], object]) -> None:
    """Train in rounds until the process is stopped, each starting from the previous round's drafter.

    Args:
        config: Options of the training; `data` are directories, whose .jsonl files must appear atomically.
        run: Trains and saves one round.
        log: Called with a line about each round before it starts.

    Raises:
        ArgumentError: The options are incompatible.
    """
    folders = [Path(source) for source in config.data]
    if wrong := [folder for folder in folders if not folder.is_dir()]:
        raise ArgumentError(
            f"--watch looks for new files in directories, and {wrong[0]} is none: make it, or leave it out"
        )
    if config.drafter is None:
        raise ArgumentError(f"--watch trains a drafter further: give it with --drafter D, or --drafter {CURRENT}")
    for name in ("resume", "dry_run", "show_sample"):
        if vars(config)[name]:
            raise ArgumentError(f"--{name.replace('_', '-')} is for one training: leave out --watch")
    if launched_processes() > 1:
        raise ArgumentError(
            "--watch trains in one process, as processes could find other files: start it without a launcher"
        )
    # Numbers of rows of files that were trained on, and of files for the next round.
    seen, waiting = dict[Path, int](), dict[Path, int]()
    number = 0
    while True:
        for folder in folders:
            # Names of captured files sort by time, so rounds train on them in order.
            for file in sorted(folder.glob("*.jsonl")):
                if file not in seen and file not in waiting:
                    waiting[file] = _count_rows(file)
        waiting = {file: rows for file, rows in waiting.items() if file.is_file()}  # a server drops the oldest files
        if sum(waiting.values()) < config.watch_rows:
            time.sleep(POLL_SECONDS)
            continue
        number += 1
        # Training on a few new rows alone forgets earlier ones, so repeat the newest earlier rows.
        again, left = list[Path](), REPLAYED_ROWS
        for file in reversed([file for file in seen if file.is_file()]):
            if seen[file] > left:
                break
            again.insert(0, file)
            left -= seen[file]
        earlier = f", and {sum(seen[file] for file in again):,} of {len(again)} earlier ones" if again else ""
        log(f"round {number}: {sum(waiting.values()):,} rows of {len(waiting)} new files{earlier}")
        run(replace(config, data=tuple(map(str, [*again, *waiting])), overwrite=True))
        seen, waiting = seen | waiting, {}
        # The first round starts from --drafter, later rounds from the drafter that was just saved.
        config = replace(config, drafter=config.output)


def _count_rows(file: Path) -> int:
    try:
        return sum(1 for _ in open_lines(file))
    except CheckpointError:
        return 0  # it was just dropped, or is invalid, which training will report
