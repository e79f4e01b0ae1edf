"""Validate files, directories and models that options name, before any module that needs torch is imported.

The `names=` argument of `redrafter.options.option` selects the check for an option's value.
"""

from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter.app.flags import flag
from redrafter.data.rows import check_data
from redrafter.data.suites import suite_files
from redrafter.errors import ArgumentError, CheckpointError, MissingDependencyError, first_line, how_to_install
from redrafter.files.atomic_file import check_writable
from redrafter.files.checkpoint_kind import check_config, check_source, kind_of, split_adapter, wrong_kind_error
from redrafter.measure.prompts import check_prompts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_paths(*groups: "DataclassInstance") -> None:
    """Check that paths and models named by options can be read or written, without leaving files on the disk.

    Raises `ArgumentError` or `CheckpointError` naming the option.
    """
    for options in groups:
        values = vars(options)
        for item in fields(options):
            value, check = values[item.name], item.metadata.get("names")
            if check is not None and value is not None:
                for name in value if isinstance(value, tuple | list) else (value,):
                    CHECKS[check](name, flag(item.name))


def check_file(name: str, flag: str) -> None:
    """Raise `ArgumentError`, naming the flag, unless a file can be opened."""
    try:
        with open(name, "rb"):
            pass
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        raise ArgumentError(f"{flag} {name} cannot be read: {first_line(error)}") from error


def check_adapter(name: str, flag: str) -> None:
    """Raise `CheckpointError` unless a path, or the path in `name=path`, is a directory."""
    _, path = split_adapter(name)
    if not Path(path).is_dir():
        raise CheckpointError(f"{flag} {path} is not a directory; give the one that PEFT's save_pretrained wrote")


def _check_model(name: str, flag: str) -> None:
    """Check a hub id, a directory or a GGUF file that is to hold a model."""
    check_source(name)
    check_config(Path(name))
    if (Path(name) / "config.json").is_file() and (error := wrong_kind_error(Path(name), "model")):
        raise error


def _check_picture(name: str, flag: str) -> None:
    """Check that a `.png` can be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(f"{flag} needs matplotlib: {how_to_install('bench')}")
    if Path(name).suffix != ".png":
        raise ArgumentError(f"{flag} draws a .png, got {name!r}")
    check_writable(Path(name), flag)


def _check_tokenizer(name: str, flag: str) -> None:
    if not Path(name, "tokenizer_config.json").is_file():
        raise ArgumentError(f"{flag} {name} has no tokenizer_config.json")


CHECKS: dict[str, Callable[[str, str], object]] = {
    "adapter": check_adapter,
    "checkpoint": lambda name, flag: kind_of(Path(name)),
    "data": lambda name, flag: check_data(name),
    "drafter": lambda name, flag: check_source(name),
    "drafter or current": lambda name, flag: None if name == "current" else check_source(name),
    "file": check_file,
    "model": _check_model,
    "new file": lambda name, flag: check_writable(Path(name), flag),
    "picture": _check_picture,
    "prompts": lambda name, flag: check_prompts(name),
    "template": check_file,
    "suite": lambda name, flag: suite_files(name),
    "tokenizer": _check_tokenizer,
}
