"""Run a command in each of the processes that torchrun has started, of which one speaks.

All processes run the same command on the same words. An error of the user is met by all of them; rank 0 says it, and
torchrun, as soon as one process ends with an error, ends the others.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOBase

from redrafter.app.program import print_message, run_command
from redrafter.errors import ArgumentError
from redrafter.parallel.launched import launched_processes, process_rank

__all__ = ["run_rank"]

SHARED_COMMANDS = ("generate", "serve", "bench")  # those that torchrun may start in several processes
# For which a process leaves it to rank 0 to say what is wrong. If it does, torchrun ends this process meanwhile.
SILENT_SECONDS = 15.0


def run_rank(name: str, command: Callable[[], int]) -> int:
    """Run a command as one of several processes, and return its exit code.

    Args:
        name: Name of the command.
        command: Runs it and returns its exit code.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    if name not in SHARED_COMMANDS:
        command = _refuse(name)
    return record(command if process_rank() == 0 else lambda: _run_silently(command))() or 0


def _refuse(name: str) -> Callable[[], int]:
    def refuse() -> int:
        shared = ", ".join(SHARED_COMMANDS)
        raise ArgumentError(
            f"torchrun has started {launched_processes()} processes, which can share a model in {shared} alone: "
            f"start `redrafter {name}` without torchrun"
        )

    return lambda: run_command(refuse)


def _run_silently(command: Callable[[], int]) -> int:
    """Run a command on a rank other than 0; what ends it is said, unless rank 0 is ended by the same."""
    said = _LastLines()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = command()
    except Exception:
        time.sleep(SILENT_SECONDS)
        raise
    if code == 2:
        time.sleep(SILENT_SECONDS)
    if code:
        print_message(f"rank {process_rank()}", said.last.removeprefix("redrafter: "))
    return code


class _LastLines(TextIOBase):
    """A stream that keeps the last of what is written to it."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=100)

    def write(self, text: str) -> int:
        """Keep a text."""
        self._texts.append(text)
        return len(text)

    @property
    def last(self) -> str:
        """The last line that holds anything."""
        lines = [line for line in "".join(self._texts).splitlines() if line.strip()]
        return lines[-1] if lines else "ended with an error"
