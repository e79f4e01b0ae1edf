"""`redrafter info`: describe a checkpoint.

Facts from config.json and the headers of the weights are read without torch, whose import takes longer than the rest.
Facts that require running code (whether a model can be a target, whether a drafter fits it, what they convert to) need
`--check`; so do checkpoints in other projects' formats.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.app.flags import add_options, read_options
from redrafter.app.parser import Parser
from redrafter.app.program import import_libraries, run_command
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.mtp_layer import find_layer
from redrafter.errors import ArgumentError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, check_path, kind_of, read_json, scheme_name
from redrafter.files.drafter_kinds import drafter_kinds
from redrafter.files.gguf_file import find_gguf
from redrafter.files.headers import DTYPE_NAMES, read_headers
from redrafter.options import option
from redrafter.tree.sizes import TreeShape

Stored = Mapping[str, tuple[tuple[int, ...], str]]  # shape and number format of each tensor
UNCHECKED = "whether it can be a target, fits, and converts: add --check, which imports torch"
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")  # keys of a model's config
# Entries of config.json that are internal to transformers or programs, or are shown under another name.
_NOT_SHOWN = {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "rms_norm_eps"}
_NOT_SHOWN |= {"vocab_size", "draft_vocab_size", "draft_beams", "base_embedding_norms", "source_config", "text_config"}
_NOT_SHOWN |= {"quantization_config"}


def describe_files(directory: Path) -> dict[str, object] | None:
    """Describe a model, a drafter or a pair from the files of its directory, without torch.

    Returns None if the files are not sufficient: for another project's drafter, a GGUF file, or a model whose sizes are
    only defined by its class in transformers.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    kind = kind_of(directory)
    if kind not in ("drafter", "model", "merged checkpoint") or find_gguf(directory) is not None:
        return None
    document: dict[str, object] = {"path": str(directory), "kind": kind}
    if kind != "drafter":
        config, stored = read_json(directory / "config.json"), _read_stored(directory)
        text = config.get("text_config", config)  # the decoder's config of a vision-language model
        names = isinstance(text, dict) and (text.get("architectures") or config.get("architectures"))
        if not isinstance(names, list) or not all(type(text.get(size)) is int for size in SIZES):
            return None
        quantization = config.get("quantization_config")
        method = scheme_name(quantization) if isinstance(quantization, dict) else None
        document["model"] = model_facts(", ".join(map(str, names)), [text[size] for size in SIZES], stored, method)
    if kind == "model":
        return document | {"unchecked": UNCHECKED} if find_layer(stored) is None else None
    folder = directory / DRAFTER_FOLDER if kind == "merged checkpoint" else directory
    config = read_json(folder / "config.json")
    if kind_of(folder) != "drafter" or "vocab_size" not in config:  # another project's, which only its class can read
        return None
    document["drafter"] = own = drafter_facts(drafter_kinds()[config["model_type"]].name, _read_stored(folder), config)
    if kind == "merged checkpoint":
        document["drafter"] = {"path": str(folder), **own}
        defaults = Defaults.from_file(directory / SHAPE_FILE)
        shape = defaults.shape.over(TreeShape(config.get("draft_beams"), config.get("draft_len_per_beam")))
        document["shape"] = shape.to_dict() | {"greedy_search": defaults.greedy_search}
    return document | {"unchecked": UNCHECKED}


def _read_stored(directory: Path) -> Stored:
    headers = read_headers(directory).items()
    return {name: (header.shape, DTYPE_NAMES.get(header.code, header.code.lower())) for name, header in headers}


def model_facts(architecture: str, sizes: Sequence[int | None], tensors: Stored, method: str | None) -> dict[str, Any]:
    """Return the facts about a model that are always shown.

    Args:
        architecture: Names of its class.
        sizes: The values of `SIZES`; None if unknown.
        tensors: Shape and number format of each tensor.
        method: Name of the quantisation; None if the model is not quantised.
    """
    facts = {"architecture": architecture, **stored_facts(tensors)}
    facts |= zip(("hidden_size", "layers", "vocabulary", "context"), sizes, strict=True)
    return facts if method is None else facts | {"quantised": method}


def stored_facts(tensors: Stored) -> dict[str, Any]:
    """Return the number of parameters of a checkpoint and their formats, without maps of ids (int64) and scales."""
    counted = (x for name, x in tensors.items() if x[1] != "int64" and not name.endswith(".weight_scale"))
    parameters = [(math.prod(shape), dtype) for shape, dtype in counted]
    dtypes = ", ".join(sorted({dtype for _, dtype in parameters}))
    return {"parameters": sum(count for count, _ in parameters), "stored_as": dtypes}


def drafter_facts(kind: str, tensors: Stored, config: Mapping[str, object]) -> dict[str, object]:
    """Return the facts about a drafter that are always shown.

    Args:
        kind: Kind of the drafter, as messages name it.
        tensors: Shape and number format of each tensor.
        config: Content of its config.json.
    """
    own = {name: value for name, value in sorted(config.items()) if name not in _NOT_SHOWN and name[:1] != "_"}
    return {
        "type": kind,
        **stored_facts(tensors),
        "vocabulary": config.get("vocab_size"),
        "draft_vocabulary": config.get("draft_vocab_size") or config.get("vocab_size"),
        "num_beams": config.get("draft_beams"),
        **({"quantised": scheme_name(x)} if isinstance(x := config.get("quantization_config"), dict) else {}),
        **{name: value for name, value in own.items() if value is not None and value != []},
    }


def _format_lines(document: Mapping[str, object], indent: str = "") -> Iterator[str]:
    for key, value in document.items():
        name = indent + key.replace("_", " ")
        match value:
            case dict():
                yield name
                yield from _format_lines(value, indent + "  ")
                continue
            case None:
                text = "not set"
            case bool():
                text = "yes" if value else "no"
            case list():
                text = ", ".join(map(str, value))
            case _:
                text = f"{value:,}" if isinstance(value, int) else str(value)
        yield f"{name:<24}{text}"


@dataclass(frozen=True)
class InfoOptions:
    """Describe a model, a drafter or a pair by the configs and the headers of the weights.

    These are Hugging Face models, GGUF files, merged checkpoints, drafters of redrafter and of other projects, and
    TensorRT-LLM checkpoints; with --check or --drafter, also whether they fit each other, and what they can be
    converted to. Without MODEL, describes the boxed pair and prints the versions of the libraries.

    Examples:
        redrafter info my-base --drafter my-drafter

    Attributes:
        model: directory, GGUF file, or hub id that was downloaded before
        drafter: a drafter for MODEL
        check: also find out whether it can be a target, whether its drafter fits, and what it can be converted to
        json: print nothing on stdout but one JSON document
    """

    model: str | None = option(None, positional=True, nargs="?", metavar="MODEL")
    drafter: str | None = option(None, metavar="D")
    check: bool = False
    json: bool = False


def build_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog="redrafter info", options=InfoOptions)
    add_options(parser, InfoOptions, "")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def command() -> int:
        args = read_options(InfoOptions, build_parser().parse_args(argv))
        if args.model is None and args.drafter is not None:
            raise ArgumentError("--drafter needs the model that it should fit: redrafter info MODEL --drafter D")
        for name in filter(None, (args.model, args.drafter)):
            check_path(name)
        document = None
        if args.model is not None and args.drafter is None and not args.check and Path(args.model).is_dir():
            document = describe_files(Path(args.model))
        if document is None:
            checks = import_libraries("redrafter.convert.checks")
            document = checks.environment() if args.model is None else checks.describe(args.model, args.drafter)
        print(json.dumps(document) if args.json else "\n".join(_format_lines(document)))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
