"""Kinds of checkpoints that a directory may hold, and errors for a directory of the wrong kind."""

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrafter.errors import ArgumentError, CheckpointError, ReDrafterError, first_line
from redrafter.files.drafter_kinds import drafter_kinds
from redrafter.files.gguf_file import SUFFIX, find_gguf, gguf_error
from redrafter.files.hub import check_hub, is_offline
from redrafter.files.regular_file import read_regular

APPLE_MODEL_TYPE = "recurrent_drafting_drafter"  # `model_type` in the config.json of Apple's drafters
SPECULATORS_KEY = "speculators_model_type"  # in the config.json of vllm-project/speculators' checkpoints
FOREIGN_DRAFTERS = ("Apple drafter", "EAGLE-3 head", "DFlash drafter")  # checkpoints of other projects
DRAFTER_FOLDER = "drafter"  # of a merged checkpoint
SHAPE_FILE = "redrafter.json"  # of a merged checkpoint: the tree shape and other defaults
TOKENIZER_FILES = (  # of which each tokenizer has at least one
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json"),
)


def scheme_name(settings: Mapping[str, Any]) -> str:
    """Return a name of the quantisation in a config.json, such as `gptq, 4 bits in groups of 128`."""
    found = dict(reversed(list(_leaves(settings))))  # of several values of a key, the first one
    keys = ("quant_method", "format", "quant_algo", "fmt", "_type")
    named = " ".join(str(found[key]) for key in keys if found.get(key)) or "of an unnamed method"
    bits, group = found.get("num_bits") or found.get("bits"), found.get("group_size")
    grouped = f" in groups of {group}" if isinstance(group, int) and group > 0 else ""
    return f"{named}, {bits} bits{grouped}" if bits else named


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def kind_of(directory: Path) -> str:
    """Return the kind of checkpoint in a directory.

    It is `merged checkpoint`, `drafter` (of a registered type), `Apple drafter`, `EAGLE-3 head`, `DFlash drafter`
    (DFlash2 and DSpark included), `speculators checkpoint` of another type, `TensorRT-LLM ReDrafter checkpoint`,
    `TensorRT-LLM checkpoint`, `built TensorRT engine` or `model`, which is the default.
    """
    check_path(str(directory))
    if find_gguf(directory) is not None:
        return "merged checkpoint" if (directory / SHAPE_FILE).is_file() else "model"
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: it does not exist")
    check_config(directory)
    config = read_json(directory / "config.json")
    # The order matters: formats share keys, so the ones with the most specific keys are tried first.
    if str(config.get("model_type")) in drafter_kinds():
        return "drafter"
    if config.get("model_type") == APPLE_MODEL_TYPE or ("num_draft_layers" in config and "model_type" not in config):
        return "Apple drafter"
    architectures = config.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    named = [str(name).lower() for name in (*classes, config.get(SPECULATORS_KEY))]
    block = {"block_size", "target_layer_ids"} <= config.keys()  # as transformers saves them
    if block or "dflash_config" in config or any("dflash" in name or "dspark" in name for name in named):
        return "DFlash drafter"
    if SPECULATORS_KEY in config:
        return "EAGLE-3 head" if config[SPECULATORS_KEY] == "eagle3" else "speculators checkpoint"
    if "draft_vocab_size" in config or any("Eagle3" in str(name) for name in classes):
        return "EAGLE-3 head"
    if "build_config" in config and "model_type" not in config:
        return "built TensorRT engine"
    if isinstance(config.get("architecture"), str):  # Hugging Face has `architectures`
        return "TensorRT-LLM ReDrafter checkpoint" if "redrafter_num_layers" in config else "TensorRT-LLM checkpoint"
    return "merged checkpoint" if (directory / SHAPE_FILE).is_file() else "model"


def check_path(name: str) -> None:
    """Check that a name which looks like a path leads to a directory or a GGUF file, before the hub is queried."""
    path = Path(name)
    if path.is_dir() or find_gguf(path) is not None:
        return
    if path.exists():
        raise CheckpointError(f"{name} is not a directory, but a file, and no {SUFFIX} file")
    # A hub id has at most one slash and no path syntax.
    if name.startswith(("/", ".", "~", os.sep)) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise CheckpointError(f"{name} is not a directory: it does not exist")


def check_source(name: str) -> None:
    """Check that a name is a directory, a GGUF file or a hub id that can be looked for. Raises `CheckpointError`."""
    check_path(name)
    if not Path(name).is_dir() and find_gguf(name) is None:
        check_hub(name)


def check_config(path: Path) -> None:
    """Check that a directory has a config.json, a GGUF file or an adapter. Raises `CheckpointError`."""
    named = ("config.json", "adapter_config.json")
    if path.is_dir() and find_gguf(path) is None and not any((path / name).is_file() for name in named):
        raise CheckpointError(f"{path} has no config.json; give the directory that save_pretrained wrote")


def split_adapter(text: str) -> tuple[str, str]:
    """Return the name and the directory of an adapter that is typed as `name=path`, or as a path alone."""
    name, sign, path = text.partition("=")
    if sign and name and path and not Path(text).is_dir():
        return name, path
    return Path(text).resolve().name, text


def check_drafter(name: str | Path) -> None:
    """Check that a directory holds a drafter of a registered type. A hub id passes unchecked."""
    check_source(str(name))
    path = Path(name)
    if not path.is_dir() and find_gguf(path) is None:
        return  # a hub id
    check_config(path)
    if error := wrong_kind_error(path, "drafter"):
        raise error


def load_error(what: str, name: str | Path, error: Exception) -> ReDrafterError:
    """Return the error for a `what` (model, tokenizer, drafter...) that could not be loaded from a path or hub id.

    It states what the path contains instead, that it does not exist, or else the loading library's message. An error of
    this library is returned unchanged.
    """
    path = Path(name)
    if isinstance(error, ReDrafterError):
        return error
    if (file := find_gguf(path)) is not None:
        return gguf_error(what, file, error)
    if not path.is_dir():
        offline = "; HF_HUB_OFFLINE is set, so that nothing is downloaded: give a directory" if is_offline() else ""
        return CheckpointError(
            f"{name} does not exist here, and as a hub id no {what} can be loaded from it: {first_line(error)}{offline}"
        )
    if (path / "config.json").is_file():
        wrong_kind = wrong_kind_error(path, "drafter" if what == "drafter" else "model")
        if wrong_kind is not None:
            return wrong_kind
    if what == "tokenizer" and not any((path / file).is_file() for file in TOKENIZER_FILES):
        return CheckpointError(f"{name} has no tokenizer: copy the files of the one that the model was trained with")
    return CheckpointError(f"cannot load a {what} from {name}: {first_line(error)}")


def download(what: str, name: str | Path, patterns: Iterable[str], **hub_options: Any) -> Path:
    """Return the snapshot of a repository with its files of `patterns`; raises `load_error` of a `what`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=[*patterns], **hub_options))
    except Exception as error:  # of HTTP libraries too
        raise load_error(what, name, error) from error


def wrong_kind_error(path: Path, wanted: str) -> CheckpointError | None:
    """Return an error for a directory that contains no `model` or no `drafter`, with advice.

    Returns None for the wanted kind; a merged checkpoint counts as a model.
    """
    kind = kind_of(path)
    if kind == wanted or (wanted, kind) == ("model", "merged checkpoint"):
        return None
    names = {"Apple drafter": "Apple's drafter", "EAGLE-3 head": "an EAGLE-3 head"}
    this = f"{path} is {names.get(kind, f'a {kind}')}"
    base, drafter = "--base-model-checkpoint-dir", "--drafter-model-dir"
    if kind == "built TensorRT engine":
        return CheckpointError(f"{this}, whose weights cannot be read: give the Hugging Face {wanted} it was made from")
    convert_drafter = _convert_command(path, drafter, "--to drafter", "drafter")
    drafts_for = ", not a model: give the model that it drafts for, and as its drafter what this writes: "
    if wanted == "model":
        advice = {
            "drafter": ", not a model: give the model that it drafts for, and this as the drafter (--drafter)",
            **dict.fromkeys(FOREIGN_DRAFTERS, drafts_for + convert_drafter),
            "speculators checkpoint": ", not a model",
            "TensorRT-LLM ReDrafter checkpoint": ": convert it first, with the tokenizer of BASE, the Hugging Face "
            "model that it was made from: " + _convert_command(path, base, "--tokenizer-dir BASE", "merged"),
            "TensorRT-LLM checkpoint": ": give the Hugging Face model BASE that it was made from, or merge it with a "
            "drafter: " + _convert_command(path, base, "--drafter-model-dir DRAFTER --tokenizer-dir BASE", "merged"),
        }
    else:
        advice = {
            "model": ", not a drafter: a smaller model drafts with --draft-model (DraftTarget)",
            "merged checkpoint": f", a model and its drafter: give it as the model alone, or {path / DRAFTER_FOLDER}",
            **dict.fromkeys(FOREIGN_DRAFTERS, f": convert it first: {convert_drafter}"),
            "speculators checkpoint": " of a type that cannot be read; EAGLE-3 heads, DFlash(2) and DSpark can be",
            "TensorRT-LLM ReDrafter checkpoint": f": convert its drafter first: {convert_drafter}",
            "TensorRT-LLM checkpoint": ", which holds no drafter",
        }
    return CheckpointError(this + advice[kind])


def _convert_command(path: Path, flag: str, arguments: str, suffix: str) -> str:
    name = os.path.normpath(path)
    output = (os.path.abspath(path) if Path(name).name in ("", "..") else name) + f"-{suffix}"
    return f"redrafter convert {flag} {shlex.quote(str(path))} {arguments} --output-dir {shlex.quote(output)}"


@contextmanager
def config_errors(directory: Path, what: str) -> Iterator[None]:
    """Raise `CheckpointError` if a directory's config.json makes transformers or the `check` of a config fail.

    The error states that the config describes no `what`, and why. Other errors of this library are unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ReDrafterError) and not isinstance(error, ArgumentError):
            raise
        raise CheckpointError(f"{directory / 'config.json'} describes no {what}: {first_line(error)}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a regular file that holds one JSON object."""
    content = read_regular(file)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value
