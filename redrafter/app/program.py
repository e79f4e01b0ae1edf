"""Run a command as a program: exit codes, one line on stderr for an error, no messages of other libraries.

Exit codes: 0 for success, 2 for an error that the user can correct, 130 after Ctrl-C, 141 when the reader of stdout has
closed it. A bug keeps its traceback.

Under torchrun all processes run the same command line, so all of them detect a user error. Rank 0 prints it; torchrun
terminates the other processes as soon as one exits with an error.
"""

import atexit
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import TextIOBase, TextIOWrapper
from typing import Any, NoReturn

from redrafter.errors import ArgumentError, ReDrafterError, ReDrafterWarning, how_to_install
from redrafter.parallel.launched import launched_processes, process_rank

SHARED_COMMANDS = ("generate", "serve", "bench")  # those that torchrun may start in several processes
# Signs of an exited process in errors of those that wait for it: texts of gloo and NCCL, and names of torch's types, as
# torch is imported later.
_LOST_PEER_TEXTS, _LOST_PEER_TYPES = ("gloo/transport", "ncclRemoteError"), ("DistNetworkError", "DistStoreError")
# Ranks above 0 wait this long before they report an error; if rank 0 exits with it, torchrun ends them meanwhile.
SILENT_SECONDS = 15.0
LAUNCHER_SECONDS = 1.0  # interval at which a rank looks for its launcher


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a user error as one line on stderr.

    User errors are `ReDrafterError`, a missing package and a file that cannot be opened. Any other exception is a bug
    and propagates, so that its traceback is shown.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not a test's or a rank's stream in memory
            stream.reconfigure(errors="replace")  # for characters that the terminal cannot show
    try:
        with warnings.catch_warnings():
            _show_own_messages_only()
            code = command()
        sys.stdout.flush()
        return code
    # The shell's convention: 128 plus the signal's number, here SIGINT.
    except KeyboardInterrupt as interrupt:
        if process_rank() == 0:
            what = f": {interrupt}" if interrupt.args else ""
            print(f"\nredrafter: stopped{what}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has closed it. Without this, the interpreter reports an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ReDrafterError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "redrafter":
            raise
        message = f"{error.name} is not installed; type: {how_to_install()}"
    except OSError as error:
        # Without a file's name the user cannot act on the message, so the traceback is shown.
        if error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}"
    except RuntimeError as error:
        lost = any(text in str(error) for text in _LOST_PEER_TEXTS) or type(error).__name__ in _LOST_PEER_TYPES
        if launched_processes() == 1 or not lost:
            raise
        message = "another process has ended, for which this one waited (the launcher reports which)"
    print_message("error", message)
    return 2


def print_message(kind: str, message: object) -> None:
    """Print a message of a kind ("error", "warning" or "note") as one line on stderr; its line breaks become spaces."""
    print(f"redrafter: {kind}: {' '.join(str(message).split())}", file=sys.stderr)


def _show_own_messages_only() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("redrafter: %(message)s"))
    logger = logging.getLogger("redrafter")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)

    # Libraries warn about internals that users cannot change; show only warnings of this package.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=ReDrafterWarning)
    warnings.showwarning = lambda message, *_, **__: print_message("warning", message)


def import_libraries(module: str) -> Any:
    """Import a module of this package that needs torch and transformers, and silence their logging.

    A command calls it once its options are validated, so that an invalid option is reported without waiting for
    imports.
    """
    # Imported objects stay, and scanning them again and again took a fifth of the time of a first import.
    collecting = gc.isenabled() and "torch" not in sys.modules
    if collecting:
        gc.disable()
    try:
        silence_libraries()
        return importlib.import_module(module)
    finally:
        if collecting:
            freeze_objects()
            gc.enable()


def freeze_objects() -> None:
    """Exclude all objects that exist from garbage collections, until the interpreter exits."""
    gc.freeze()
    # Triton's bindings report each of their objects that the collection at exit does not free, on 30 lines.
    atexit.register(gc.unfreeze)


def silence_libraries() -> None:
    """Limit logging of transformers and huggingface_hub to errors."""
    import huggingface_hub
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


def run_rank(name: str, command: Callable[[], int]) -> int:
    """Run the command of this name as one of several processes, and return its exit code."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="redrafter-launcher", daemon=True).start()
    from torch.distributed.elastic.multiprocessing.errors import record

    def refuse() -> NoReturn:
        raise ArgumentError(
            f"torchrun has started {launched_processes()} processes, which can share a model in "
            f"{', '.join(SHARED_COMMANDS)} alone: start `redrafter {name}` without torchrun"
        )

    def run_silently() -> int:  # on ranks other than 0; prints an error only if rank 0 does not exit with it
        said = _LastTexts()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                code = run()
        except Exception:
            # torchrun kills the other ranks at the first exit, and rank 0 should print its error first.
            time.sleep(SILENT_SECONDS)
            raise
        if code == 2:  # other codes are of no error, such as that of Ctrl-C
            time.sleep(SILENT_SECONDS)
            lines = [line for line in "".join(said.texts).splitlines() if line.strip()] or ["ended with an error"]
            print_message(f"rank {process_rank()}", lines[-1].removeprefix("redrafter: "))
        return code

    run = command if name in SHARED_COMMANDS else partial(run_command, refuse)
    return record(run if process_rank() == 0 else run_silently)() or 0


def _end_with(launcher: int) -> None:
    """Wait for the end of the process that has started this one, then end this one by the signal that it would send.

    Ranks may wait for each other for ever, as while they load, and only their launcher sees which of them has ended.
    """
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_SECONDS)
    if process_rank() == 0:
        print_message("error", "the process that started this one has ended")
    os.kill(os.getpid(), signal.SIGTERM)


class _LastTexts(TextIOBase):
    """A stream that keeps the most recent writes."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque(maxlen=100)

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)
