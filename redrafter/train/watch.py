"""Training that goes on as texts come: in rounds, each on files that directories have gained and on some before them.

So a drafter learns from what a server captures, beside it or on another machine, and each round ends with a drafter
that the server may be given.
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

CURRENT = "current"  # in place of a drafter's directory
POLL_SECONDS = 2.0  # between looks at directories without enough new rows


def current_drafter(config: TrainConfig) -> str:
    """Return the directory of the drafter that `--output` holds, or else of the one in the base's directory.

    Raises:
        ArgumentError: There is neither.
    """
    for folder in (Path(str(config.output)), Path(str(config.model)) / DRAFTER_FOLDER):
        if (folder / "config.json").is_file():
            return str(folder)
    raise ArgumentError(
        f"--drafter {CURRENT} is the drafter that --output {config.output} holds, or the one in {config.model}, and "
        "there is none: name its directory"
    )


def watch(config: TrainConfig, run: Callable[[TrainConfig], object], log: Callable[[str], object]) -> None:
    """Train in rounds until the process is stopped, each from the drafter that the one before has saved.

    Args:
        config: What is trained; `data` are directories, whose .jsonl files appear whole.
        run: Trains and saves one round.
        log: Is told of each round before it begins.

    Raises:
        ArgumentError: The options do not go together.
    """
    folders = [Path(source) for source in config.data]
    if wrong := [folder for folder in folders if not folder.is_dir()]:
        raise ArgumentError(
            f"--watch looks for new files in directories, and {wrong[0]} is none: make it, or leave it out"
        )
    if config.drafter is None:
        raise ArgumentError(f"--watch trains a drafter further: give it with --drafter D, or --drafter {CURRENT}")
    for name in ("resume", "dry_run", "show_sample"):
        if getattr(config, name):
            raise ArgumentError(f"--{name.replace('_', '-')} is for one training: leave out --watch")
    if launched_processes() > 1:
        raise ArgumentError(
            "--watch trains in one process, as processes could find other files: start it without a launcher"
        )
    # Rows of the files that were trained on, and of those that wait.
    seen, waiting = dict[Path, int](), dict[Path, int]()
    number = 0
    while True:
        for folder in folders:
            for file in sorted(folder.glob("*.jsonl")):
                if file not in seen and file not in waiting:
                    waiting[file] = _count_rows(file)
        waiting = {file: rows for file, rows in waiting.items() if file.is_file()}  # the oldest may be dropped
        if sum(waiting.values()) < config.watch_rows:
            time.sleep(POLL_SECONDS)
            continue
        number += 1
        # A round of few rows alone unlearns what those before it have taught, so the newest of these come again.
        again, left = list[Path](), config.watch_replay
        for file in reversed([file for file in seen if file.is_file()]):
            if seen[file] > left:
                break
            again.insert(0, file)
            left -= seen[file]
        earlier = f", and {sum(seen[file] for file in again):,} of {len(again)} earlier ones" if again else ""
        log(f"round {number}: {sum(waiting.values()):,} rows of {len(waiting)} new files{earlier}")
        run(replace(config, data=tuple(map(str, [*again, *waiting])), overwrite=True))
        seen, waiting = seen | waiting, {}
        config = replace(config, drafter=config.output)


def _count_rows(file: Path) -> int:
    try:
        return sum(1 for _ in open_lines(file))
    except CheckpointError:
        return 0  # it was dropped a moment ago, or reading it says what is wrong
