"""Store served sequences as training rows for a drafter: bounded files in a directory that only its owner may read.

A row holds the token ids of a prompt and of the sequence generated for it, and which of them were generated; no key,
no address, no time. `redrafter train --data DIR` reads these files. A file is written at once, when its rows are old or
many enough, so readers of the directory find only whole files; a server that is killed loses the rows that it holds.

A separate thread writes, so that serving never waits for the disk. Rows that cannot be written, for example to a full
disk, are counted and dropped; serving continues.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from redrafter.data.rows import fingerprint
from redrafter.errors import ArgumentError, first_line
from redrafter.files.atomic_file import write_atomically
from redrafter.serve.config import ServeOptions

if TYPE_CHECKING:  # checking a directory at startup must not wait for the import of torch
    from transformers import PreTrainedTokenizerBase

    from redrafter.scheduler.sequence import SequenceDelta
    from redrafter.serve.engine_process.client import ServedSequence

_LOG = logging.getLogger(__name__)
FILE_SECONDS = 60.0  # age of the first row at which a file is written
POLL_SECONDS = 1.0  # interval at which the age of the rows is checked
FILES = 16  # a file is written before it reaches this fraction of the total byte limit
MAX_FILE_BYTES = 1 << 24  # of the rows that are held in memory for a file
MAX_WAITING_ROWS = 1024  # rows queued for a slow disk; further rows are dropped
CLOSE_SECONDS = 5.0  # time limit for writing the last rows
MIN_WRITTEN = 2  # shortest sequence that is useful to train on


def prepare_folder(folder: str) -> Path:
    """Create a private directory, or check that it is private.

    Raises:
        ArgumentError: The directory cannot be created or written to, or other users may enter it.
    """
    path = Path(folder).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        # A trial file, since permissions do not reveal read-only or full file systems.
        trial = path / f".{uuid4().hex}"
        trial.touch(0o600)
        trial.unlink()
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        raise ArgumentError(f"--capture {folder} cannot be written to: {first_line(error)}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ArgumentError(
            f"--capture {folder} may be entered by others, or is another user's: give your own (chmod 700 {folder})"
        )
    return path


class Capture:
    """Writes a server's sequences to a directory, except those of excluded keys.

    Attributes:
        rows: Number of rows written.
        lost: Number of rows dropped.
    """

    def __init__(self, options: ServeOptions, tokenizer: "PreTrainedTokenizerBase"):
        """Start the writing thread; raise the errors of `prepare_folder`."""
        assert options.capture is not None, "there is a directory"
        self._folder, self._most = prepare_folder(options.capture), options.capture_max_bytes
        self._left_out, self._tokenizer = frozenset(options.capture_except), fingerprint(tokenizer)
        self.rows = self.lost = 0
        self._waiting: queue.Queue[tuple[Sequence[int], Sequence[int], str] | None] = queue.Queue(MAX_WAITING_ROWS)
        self._file_bytes, self._numbers = min(self._most // FILES, MAX_FILE_BYTES), count()
        self._failing = self._closed = False
        self._thread = threading.Thread(target=self._write_rows, name="redrafter-capture", daemon=True)
        self._thread.start()

    def wants(self, client: str) -> bool:
        """Return whether to store sequences of a client; `client` is the name of its key, or its address."""
        return client not in self._left_out

    def describe(self) -> str:
        """Return a line about the captured files, for the startup log."""
        but = f" but {', '.join(sorted(self._left_out))}" if self._left_out else ""
        return (
            f"capturing to {self._folder}: the token ids of prompts and answers of all clients{but}, {self._most:,} "
            "bytes at most, the oldest dropped first; files that their owner alone can read"
        )

    def observe(self, sequence: "ServedSequence", delta: "SequenceDelta") -> None:
        """Record a delta of a sequence, in the thread that receives deltas. Never blocks."""
        if sequence.recorded is None:
            return
        sequence.recorded += delta.tokens
        if delta.finish is None:
            return
        recorded, sequence.recorded = sequence.recorded, None
        # A cancelled or failed sequence is not what the model would have written in full.
        if delta.finish not in ("stop", "length") or len(recorded) < MIN_WRITTEN or self._closed:
            return
        try:
            # This is the receiving thread of all sequences, so it must not wait for the disk.
            self._waiting.put_nowait((sequence.prompt, recorded, sequence.adapter or "model"))
        except queue.Full:
            self._lose(1, "the disk is slower than the engine")

    def close(self) -> None:
        """Write the rows that wait."""
        self._closed = True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(timeout=CLOSE_SECONDS)

    def _lose(self, rows: int, reason: object) -> None:
        self.lost += rows
        # One warning per failure, not one per sequence.
        if not self._failing:
            what = "served texts cannot be captured in %s: %s; they are lost until that is over, and serving continues"
            _LOG.warning(what, self._folder, reason)
        self._failing = True

    def _write_rows(self) -> None:
        rows, size, began = list[bytes](), 0, 0.0  # rows of the next file, their bytes, and when the first came
        while True:
            entry: tuple[Sequence[int], Sequence[int], str] | tuple[()] | None = ()
            with suppress(queue.Empty):
                entry = self._waiting.get(timeout=POLL_SECONDS)
            row = self._format(*entry) if entry else b""
            if len(row) > self._file_bytes:
                self._lose(1, f"a text takes more than {self._file_bytes} bytes, 1/{FILES} of --capture-max-bytes")
                row = b""
            # A file is also written by age, so that readers get the rows of a quiet server.
            old = time.monotonic() - began > FILE_SECONDS
            if rows and (entry is None or old or size + len(row) > self._file_bytes):
                self._write(rows)
                rows, size = [], 0
            if entry is None:
                return
            if row:
                began = began if rows else time.monotonic()
                rows.append(row)
                size += len(row)

    def _format(self, prompt: Sequence[int], written: Sequence[int], source: str) -> bytes:
        mask = [0] * len(prompt) + [1] * len(written)
        entry = {"input_ids": [*prompt, *written], "loss_mask": mask, "tokenizer": self._tokenizer, "source": source}
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"

    def _write(self, rows: Sequence[bytes]) -> None:
        # Names sort by time, and differ between servers that share a directory.
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self._folder / f"capture-{stamp}-{os.getpid()}-{next(self._numbers):06d}.jsonl"
        try:
            self._drop_oldest()
            write_atomically(path, b"".join(rows))
            path.chmod(0o600)
        except (OSError, ArgumentError) as error:
            self._lose(len(rows), error)
        else:
            self.rows, self._failing = self.rows + len(rows), False

    def _drop_oldest(self) -> None:
        """Remove files, the oldest first, until another one fits."""
        sizes = dict[Path, int]()
        for file in sorted(self._folder.glob("capture-*.jsonl")):
            with suppress(FileNotFoundError):  # another server that shares the folder may remove it meanwhile
                sizes[file] = file.stat().st_size
        held = sum(sizes.values())
        for file in sizes:
            # Leave room for the next file, at its largest.
            if held + self._file_bytes <= self._most:
                return
            file.unlink(missing_ok=True)
            held -= sizes[file]
