"""What every command of ours does as a program: one line for an error, exit codes, no chatter."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from redrafter.errors import ReDrafterError

__all__ = ["guarded", "report"]


def guarded(command: Callable[[], int]) -> int:
    """Run a command and turn the ends that are no bugs into exit codes; a bug keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        with warnings.catch_warnings():
            _hush()
            code = command()
        sys.stdout.flush()
        return code
    except ReDrafterError as error:
        report("error", error)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "redrafter":
            raise
        report("error", f"{error.name} is not installed; type: pip install redrafter")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; without this the interpreter complains while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        report("error", f"{error.filename}: {error.strerror}")
        return 2


def report(kind: str, message: object) -> None:
    """One line on stderr."""
    print(f"redrafter: {kind}: {' '.join(str(message).split())}", file=sys.stderr)


def _hush() -> None:
    """Of warnings and news show this library's, each on one line; of the libraries below show nothing but errors."""
    import huggingface_hub
    import transformers

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("redrafter: %(message)s"))
    log = logging.getLogger("redrafter")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        report("warning", message)

    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module=r"redrafter(\.|$)")
    warnings.showwarning = show
