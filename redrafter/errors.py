"""The exceptions that this library raises on purpose, under one base class.

    ReDrafterError
    ├── ArgumentError        an argument is unknown, out of range, of the wrong shape
    ├── UnsupportedError     a model or a decoding mode cannot be served exactly
    │   └── MissingDependencyError  a feature needs a package that is not installed
    ├── MismatchError        a drafter was made for another target
    ├── CheckpointError      a checkpoint's files are missing, truncated or invalid
    ├── CacheFullError       the KV cache has too few free blocks
    └── NotFiniteError       a model computes no numbers for a text, as where float16 overflows

A message says what was wrong, what was found, and what to type instead. The command line prints it on one
line and exits with code 2.
"""

import re
import sys
import warnings
from collections.abc import Iterable
from types import FrameType

# CUDA errors after which, by its reference, any further work returns the same error until the process ends:
# https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html. torch and Triton quote CUDA's messages.
_LASTING_ERRORS = re.compile(
    r"(?:CUDA|HIP)\b.*(?:uncorrectable ECC error|uncorrectable NVLink error|an illegal memory access was encountered"
    r"|the launch timed out and was terminated|context is destroyed|device-side assert triggered|hardware stack error"
    r"|an illegal instruction was encountered|misaligned address|operation not supported on global/shared address space"
    r"|invalid program counter|unspecified launch failure|unspecified launch error|unknown error)",
    re.DOTALL,
)
CLOSE_RATIO = 0.75  # cutoff of difflib: `prot` is close to `port`, and `host` is not


class ReDrafterError(Exception):
    """Base of every error raised on purpose by this library."""


class ArgumentError(ReDrafterError, ValueError):
    """An argument is unknown, out of range, of the wrong shape, or cannot be combined with another."""


class UnsupportedError(ReDrafterError):
    """The model's architecture, or the requested decoding mode, cannot be served exactly."""


class MissingDependencyError(UnsupportedError):
    """A feature needs a package, or an operating system, that this installation lacks."""


class MismatchError(ReDrafterError):
    """The drafter was made for another hidden size, vocabulary or base model than the target has."""


class CheckpointError(ReDrafterError):
    """A checkpoint lacks a file or a tensor, is truncated, or contains an unexpected tensor."""


class CacheFullError(ReDrafterError):
    """The paged cache has too few free blocks for a row."""


class NotFiniteError(ReDrafterError):
    """New weights are NaN or infinite, or the model's logits after a sequence, so that no token can follow it."""


class ReDrafterWarning(UserWarning):
    """Something works, but slower, for fewer tokens or in another way than asked for."""


def warn(message: str) -> None:
    """Issue a `ReDrafterWarning` at the line that called this library, also if it was called through transformers."""
    frame = outermost = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        if _package_of(frame) == "redrafter":
            outermost = frame
    # Decorators of torch, and the `generate` of transformers, may be between the call and this library.
    while outermost.f_back is not None and _package_of(outermost) in ("redrafter", "torch", "transformers"):
        outermost = outermost.f_back
    registry = outermost.f_globals.setdefault("__warningregistry__", {})
    where = outermost.f_code.co_filename, outermost.f_lineno
    warnings.warn_explicit(message, ReDrafterWarning, *where, outermost.f_globals.get("__name__"), registry)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def check_characters(text: str, what: str, kind: type[ReDrafterError] = ArgumentError) -> None:
    """Raise an error for a text with a lone surrogate, which has no UTF-8; `what` names the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!a} at {error.start}, a lone surrogate, which is not a character"
        raise kind(f"{what} holds {found}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, to be quoted in a one-line message.

    If the first line ends in a colon, the second is appended; an empty message gives the name of the error's class. Of
    the operating system's error, return its reason, without its number and the file's name.
    """
    message = str(getattr(error, "strerror", None) or error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def ends_device(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, makes the GPU unusable for this process.

    CUDA returns such an error from every later call. Others are temporary, such as a lack of memory or a failed
    capture.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, RuntimeError) and _LASTING_ERRORS.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the hint that ends an error about a misspelt name: `; did you mean x?`, or nothing if no name is close.

    Leading dashes are ignored, and dashes and underscores are the same. A name and its negation (`--no-x`) are never
    close.

    Args:
        word: The name as it was typed.
        known: The names that exist.
    """
    import difflib  # only after an error, as it would double the time of `import redrafter`

    def without_no(name: str) -> tuple[bool, str]:
        bare = name.lstrip("-").replace("_", "-").lower()
        return bare.startswith("no-"), bare.removeprefix("no-")

    negated, typed = without_no(word)
    # A misspelt flag must not suggest its own negation, which differs by three letters only.
    names = {bare: name for name in known for no, bare in [without_no(name)] if no == negated}
    near = difflib.get_close_matches(typed, names, n=1, cutoff=CLOSE_RATIO)
    return f"; did you mean {names[near[0]]}?" if near else ""


def how_to_install(extra: str = "") -> str:
    """Return the command that installs this package, and where to run it.

    The package is on no index, so its name alone must not be installed from one.

    Args:
        extra: Extras to install too, such as `serve`, with commas between several.
    """
    package = f"'.[{extra}]'" if extra else "."
    return f"pip install {package} in a checkout of redrafter"
