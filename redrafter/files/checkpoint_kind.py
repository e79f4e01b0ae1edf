"""What kind of checkpoint a directory holds, and what to do with one that is given in the place of another."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from redrafter.errors import CheckpointError, first_line

__all__ = [
    "APPLE",
    "DRAFTER_FOLDER",
    "MODEL_TYPE",
    "SHAPE_FILE",
    "cannot_load",
    "check_drafter",
    "check_place",
    "kind_of",
    "misplaced",
    "read_json",
]

MODEL_TYPE = "redrafter"  # of this project's drafters, in their config.json
APPLE = "recurrent_drafting_drafter"  # of Apple's
DRAFTER_FOLDER = "drafter"
SHAPE_FILE = "redrafter.json"
# A tokenizer is in one of these, whatever other files it has.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")


def kind_of(directory: Path) -> str:
    """Return `merged checkpoint`, `drafter`, `Apple drafter`, `TensorRT-LLM ReDrafter checkpoint`, `TensorRT-LLM
    checkpoint`, `built TensorRT engine` or `model`."""
    check_place(str(directory))
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: it does not exist")
    config = read_json(directory / "config.json")
    if config.get("model_type") == MODEL_TYPE:
        return "drafter"
    if config.get("model_type") == APPLE or ("num_draft_layers" in config and "model_type" not in config):
        return "Apple drafter"
    if "build_config" in config and "model_type" not in config:
        return "built TensorRT engine"
    if isinstance(config.get("architecture"), str):  # Hugging Face has `architectures`
        return "TensorRT-LLM ReDrafter checkpoint" if "redrafter_num_layers" in config else "TensorRT-LLM checkpoint"
    return "merged checkpoint" if (directory / SHAPE_FILE).is_file() else "model"


def check_place(name: str) -> None:
    """Raise `CheckpointError` for what looks like a path and leads to no directory, before a hub is asked for it."""
    place = Path(name)
    if place.is_dir():
        return
    if place.exists():
        raise CheckpointError(f"{name} is not a directory, but a file")
    if name.startswith(("/", ".", "~", os.sep)) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise CheckpointError(f"{name} is not a directory: it does not exist")


def check_drafter(name: str | Path) -> None:
    """Raise `CheckpointError` for a directory that holds no drafter of this project, with what to do about it."""
    check_place(str(name))
    place = Path(name)
    if not place.is_dir():
        return  # a hub id
    if not (place / "config.json").is_file():
        raise CheckpointError(f"{place} has no config.json; give the directory that save_pretrained wrote")
    if found := misplaced(place, "drafter"):
        raise found


def cannot_load(what: str, name: str | Path, error: Exception) -> CheckpointError:
    """Return the error of a model, a tokenizer or a drafter that could not be loaded: what is there in its place, or
    that nothing is, or else what the library that tried says."""
    place = Path(name)
    if not place.is_dir():
        return CheckpointError(
            f"{name} does not exist here, and as a hub id no {what} can be loaded from it: {first_line(error)}"
        )
    if (place / "config.json").is_file() and (found := misplaced(place, "drafter" if what == "drafter" else "model")):
        return found
    if what == "tokenizer" and not any((place / file).is_file() for file in TOKENIZERS):
        return CheckpointError(f"{name} has no tokenizer: copy the files of the one that the model was trained with")
    return CheckpointError(f"cannot load a {what} from {name}: {first_line(error)}")


def misplaced(place: Path, wanted: str) -> CheckpointError | None:
    """Return what to do with a directory of another kind than wanted, `model` or `drafter`; None for the right one."""
    kind = kind_of(place)
    if kind == wanted or (wanted == "model" and kind == "merged checkpoint"):
        return None
    own = f"{place} is " + {"drafter": "a drafter", "Apple drafter": "Apple's drafter"}.get(kind, f"a {kind}")
    base, drafter = "--base-model-checkpoint-dir", "--drafter-model-dir"
    if kind == "built TensorRT engine":
        return CheckpointError(f"{own}, whose weights cannot be read: give the Hugging Face {wanted} it was made from")
    convert_drafter = _command(place, drafter, "--to drafter", "drafter")
    if wanted == "model":
        advice = {
            "drafter": ", not a model: give the model that it drafts for, and this as the drafter (--drafter)",
            "Apple drafter": ", not a model: give the model that it drafts for, and as its drafter what this writes: "
            + convert_drafter,
            "TensorRT-LLM ReDrafter checkpoint": ": convert it first, with the tokenizer of BASE, the Hugging Face "
            "model that it was made from: " + _command(place, base, "--tokenizer-dir BASE", "merged"),
            "TensorRT-LLM checkpoint": ": give the Hugging Face model BASE that it was made from, or merge it with a "
            "drafter: " + _command(place, base, "--drafter-model-dir DRAFTER --tokenizer-dir BASE", "merged"),
        }
    else:
        advice = {
            "model": ", not a drafter: a smaller model drafts with --draft-model (DraftTarget)",
            "merged checkpoint": f", a model and its drafter: give it as the model alone, or {place / DRAFTER_FOLDER}",
            "Apple drafter": f": convert it first: {convert_drafter}",
            "TensorRT-LLM ReDrafter checkpoint": f": convert its drafter first: {convert_drafter}",
            "TensorRT-LLM checkpoint": ", which holds no drafter",
        }
    return CheckpointError(own + advice[kind])


def _command(place: Path, flag: str, more: str, suffix: str) -> str:
    """Return the conversion of a directory into one beside it."""
    name = os.path.normpath(place)
    output = (os.path.abspath(place) if Path(name).name in ("", "..") else name) + f"-{suffix}"
    return f"redrafter convert {flag} {shlex.quote(str(place))} {more} --output-dir {shlex.quote(output)}"


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object. Raises `CheckpointError` naming the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return found
