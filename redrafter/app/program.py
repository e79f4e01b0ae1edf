"""Run a command as a program: exit codes, one line on stderr for an error, no messages of other libraries.

Exit codes: 0 for success, 2 for an error that the user can correct, 130 after Ctrl-C, 141 when the reader of stdout has
closed it. A bug keeps its traceback.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from redrafter.errors import ReDrafterError, how_to_install

__all__ = ["print_message", "run_command"]


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print an error that the user can correct as one line on stderr.

    Any other error is a bug: it is raised, so that its traceback is shown.

    Args:
        command: Function that runs the command and returns its exit code.

    Returns:
        The exit code of `command`; 2 after a `ReDrafterError`, a missing package or a file that cannot be opened; 130
        after Ctrl-C; 141 if whoever reads stdout has closed it.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for characters that the terminal cannot show
    try:
        with warnings.catch_warnings():
            _show_own_messages_only()
            code = command()
        sys.stdout.flush()
        return code
    except ReDrafterError as error:
        print_message("error", error)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "redrafter":
            raise
        print_message("error", f"{error.name} is not installed; type: {how_to_install()}")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has closed it. Without this, the interpreter reports an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        print_message("error", f"{error.filename}: {error.strerror}")
        return 2


def print_message(kind: str, message: object) -> None:
    """Print one line on stderr.

    Args:
        kind: Kind of message: "error", "warning" or "note".
        message: The text; line breaks in it become spaces.
    """
    print(f"redrafter: {kind}: {' '.join(str(message).split())}", file=sys.stderr)


def _show_own_messages_only() -> None:
    """Print this library's warnings and log messages as one line each, and those of other libraries not at all."""
    import huggingface_hub
    import transformers

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("redrafter: %(message)s"))
    logger = logging.getLogger("redrafter")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_message("warning", message)

    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module=r"redrafter(\.|$)")
    warnings.showwarning = show
