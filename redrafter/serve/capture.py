"""Store served sequences as training rows for a drafter: bounded files in a directory that only its owner may read.

A row holds the token ids of a prompt and of the sequence generated for it, and which of them were generated; no key,
no address, no time. `redrafter train --data DIR` reads these files. A file has a temporary name until it is finished,
so readers of the directory find only whole files. Each row is a single unbuffered write: a process that is killed loses
at most the row being written, and the next server finishes the file that was left.

A separate thread writes, so that serving never waits for the disk. Rows that cannot be written, for example to a full
disk, are counted and dropped; serving continues.
"""

import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from redrafter.data.rows import fingerprint
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions

if TYPE_CHECKING:  # checking a directory at startup must not wait for the import of torch
    from redrafter.scheduler.sequence import SequenceDelta
    from redrafter.serve.engine_process.client import ServedSequence

_LOG = logging.getLogger(__name__)
PREFIX, FINISHED, OPEN = "capture-", ".jsonl", ".jsonl.part"
FILE_SECONDS = 60.0  # age of the first row after which a file is finished
FILES = 16  # a file is finished when it reaches this fraction of the total byte limit
MAX_WAITING_ROWS = 1024  # rows queued for a slow disk; further rows are dropped
CLOSE_SECONDS = 5.0  # time limit for writing the last rows
MIN_WRITTEN = 2  # shortest sequence that is useful to train on


def prepare_folder(folder: str) -> Path:
    """Create a private directory, or check that it is private; finish files that a killed server left.

    Raises:
        ArgumentError: The directory cannot be created or written to, or other users may enter it.
    """
    path = Path(folder).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ArgumentError(
                f"--capture {folder} may be entered by others, or belongs to another user: give a directory of your "
                f"own (chmod 700 {folder})"
            )
        trial = path / f".{uuid4().hex}"
        # A trial file, since permissions do not reveal read-only or full file systems.
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        trial.unlink()
        for left in path.glob(f"{PREFIX}*{OPEN}"):
            _finish_left(left)
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        reason = getattr(error, "strerror", None) or error
        raise (
            error
            if isinstance(error, ArgumentError)
            else ArgumentError(f"--capture {folder} cannot be written to: {reason}")
        ) from error
    return path


def _finish_left(path: Path) -> None:
    """Truncate an abandoned file to its whole rows, and rename it to a finished file."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            # The lock ends with the process that holds it, however that ended.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another server still writes this file
        end = 0
        if os.fstat(file).st_size:
            # A server that was killed may have left part of a row at the end.
            with mmap(file, 0, access=ACCESS_READ) as rows:
                end = rows.rfind(b"\n") + 1
        os.ftruncate(file, end)
        if end:
            os.replace(path, path.with_name(path.name.removesuffix(OPEN) + FINISHED))
        else:
            path.unlink()
    finally:
        os.close(file)


class Capture:
    """Writes a server's sequences to a directory, except those of excluded keys.

    Attributes:
        rows: Number of rows written.
        lost: Number of rows dropped.
    """

    def __init__(self, options: ServeOptions, tokenizer: Any):
        """Start the writing thread; raise the errors of `prepare_folder`."""
        assert options.capture is not None, "there is a directory"
        self._folder, self._most = prepare_folder(options.capture), options.capture_max_bytes
        self._left_out, self._tokenizer = frozenset(options.capture_except), fingerprint(tokenizer)
        self.rows = self.lost = 0
        self._waiting: queue.Queue[tuple[Sequence[int], Sequence[int], str] | None] = queue.Queue(MAX_WAITING_ROWS)
        self._file: int | None = None
        self._path, self._size, self._began, self._count = self._folder, 0, 0.0, 0
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
            self._lose("the disk is slower than the engine")

    def close(self) -> None:
        """Write the queued rows, and finish the file."""
        self._closed = True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(timeout=CLOSE_SECONDS)

    def _lose(self, reason: object) -> None:
        self.lost += 1
        # One warning per failure, not one per sequence.
        if not self._failing:
            _LOG.warning(
                "served texts cannot be captured in %s: %s; they are lost until that is over, and serving continues",
                self._folder,
                reason,
            )
        self._failing = True

    def _write_rows(self) -> None:
        while True:
            # A file is also finished by age, so that readers get the rows of a quiet server.
            left = None if self._file is None else max(self._began + FILE_SECONDS - time.monotonic(), 0.0)
            try:
                row = self._waiting.get(timeout=left)
            except queue.Empty:
                self._finish()
                continue
            if row is None:
                return self._finish()
            prompt, written, source = row
            entry = {
                "input_ids": [*prompt, *written],
                "loss_mask": [0] * len(prompt) + [1] * len(written),
                "tokenizer": self._tokenizer,
                "source": source,
            }
            try:
                self._write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            except OSError as error:
                self._lose(error.strerror or error)
            else:
                self.rows, self._failing = self.rows + 1, False

    def _write(self, row: bytes) -> None:
        if len(row) > self._most // FILES:
            raise OSError(0, f"a text takes more than 1/{FILES} of --capture-max-bytes")
        if self._file is not None and (
            self._size + len(row) > self._most // FILES
            or time.monotonic() - self._began > FILE_SECONDS
            or not self._is_there(self._file)
        ):
            self._finish()
        if self._file is None:
            self._drop_oldest()
            self._open()
        assert self._file is not None
        try:
            written = os.write(self._file, row)
            if written < len(row):  # the disk is full: truncate the partial row
                raise OSError(28, os.strerror(28))
        except OSError:
            # Readers expect whole lines.
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(row)

    def _is_there(self, file: int) -> bool:
        """Return whether the open file still exists under its name; writes to a removed file succeed, but are lost."""
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        # Names sort by time, and differ between servers that share a directory.
        self._count += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._path = self._folder / f"{PREFIX}{stamp}-{os.getpid()}-{self._count:06d}{OPEN}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        self._file, self._size, self._began = os.open(self._path, flags, 0o600), 0, time.monotonic()
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _finish(self) -> None:
        """Close the file, and rename it to a finished file if it has rows."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._size:
                os.replace(self._path, self._path.with_name(self._path.name.removesuffix(OPEN) + FINISHED))
            else:
                self._path.unlink()
        except OSError as error:
            _LOG.warning("%s cannot be finished: %s", self._path, error.strerror or error)
        finally:
            os.close(file)

    def _drop_oldest(self) -> None:
        """Remove finished files, the oldest first, until another file fits."""
        sizes = dict[Path, int]()
        for file in sorted(self._folder.glob(f"{PREFIX}*{FINISHED}")):
            with suppress(FileNotFoundError):  # another server that shares the folder may remove it meanwhile
                sizes[file] = file.stat().st_size
        held = sum(sizes.values())
        for file in sizes:
            # Leave room for the file that is opened next, at its largest.
            if held + self._most // FILES <= self._most:
                return
            file.unlink(missing_ok=True)
            held -= sizes[file]
