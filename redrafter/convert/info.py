"""`redrafter info`: describe a checkpoint.

Facts from config.json and the headers of the weights are read without torch, whose import takes longer than the rest.
Facts that require running code (whether a model can be a target, whether a drafter fits it, what they convert to) need
`--check`; so do checkpoints in other projects' formats.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from redrafter.app.parser import Parser, add_json
from redrafter.app.program import import_libraries, run_command
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.mtp_layer import find_layer
from redrafter.errors import ArgumentError
from redrafter.features import BATCH_INVARIANCE, QUANTISED_WEIGHTS, FeatureSet
from redrafter.files.checkpoint_kind import (
    DRAFTER_FOLDER,
    SHAPE_FILE,
    check_path,
    kind_of,
    read_json,
)
from redrafter.files.drafter_kinds import drafter_kinds
from redrafter.files.gguf_file import find_gguf
from redrafter.files.headers import DTYPE_NAMES, Header, read_headers
from redrafter.tree.sizes import TreeShape

Stored = Mapping[str, tuple[tuple[int, ...], str]]  # shape and number format of each tensor
UNCHECKED = "whether it can be a target, fits, and converts: add --check, which imports torch"
# Entries of config.json that are internal to transformers or programs, or are shown under another name.
_NOT_SHOWN = {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "rms_norm_eps"}
_NOT_SHOWN |= {"vocab_size", "draft_vocab_size", "draft_beams", "base_embedding_norms", "source_config", "text_config"}


class StoredFacts(TypedDict):
    """The size of a checkpoint and its number formats."""

    parameters: int
    stored_as: str


class ModelFacts(StoredFacts, total=False):
    """The facts about a model; the last ones are shown for some models only."""

    architecture: str
    hidden_size: int | None
    layers: int | None
    vocabulary: int | None
    context: int | None
    quantised: str
    loaded_as: str
    ranks: int
    batch_invariant: str
    target: str


def describe_files(directory: Path) -> dict[str, object] | None:
    """Describe a model, a drafter or a pair from the files of its directory, without torch.

    Returns None if the files are not sufficient: for another project's drafter, a GGUF file, or a model whose sizes are
    only defined by its class in transformers.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    kind = kind_of(directory)
    document: dict[str, object] = {"path": str(directory), "kind": kind}
    if kind == "drafter":
        drafter = _describe_drafter(directory)
        return None if drafter is None else document | {"drafter": drafter, "unchecked": UNCHECKED}
    # None lets the caller take the complete way, which imports torch and transformers.
    if kind not in ("model", "merged checkpoint") or find_gguf(directory) is not None:
        return None
    headers = read_headers(directory)
    model = _describe_model(read_json(directory / "config.json"), headers)
    if model is None:
        return None
    document["model"] = model
    if kind == "merged checkpoint":
        folder = directory / DRAFTER_FOLDER
        drafter = _describe_drafter(folder) if kind_of(folder) == "drafter" else None
        if drafter is None:
            return None
        config = read_json(folder / "config.json")
        share = share_of_model(_stored(read_headers(folder)), model)
        document["drafter"] = {"path": str(folder)} | drafter | {"share_of_model": share}
        defaults = Defaults.from_file(directory / SHAPE_FILE)
        shape = defaults.shape.over(TreeShape(config.get("draft_beams"), config.get("draft_len_per_beam")))
        document["shape"] = shape.to_dict() | {"greedy_search": defaults.greedy_search}
    elif find_layer(headers) is not None:
        return None
    return document | {"unchecked": UNCHECKED}


def _describe_model(config: Mapping[str, Any], headers: Mapping[str, Header]) -> ModelFacts | None:
    text = config.get("text_config", config)  # the decoder's config of a vision-language model
    if not isinstance(text, dict):
        return None
    names = text.get("architectures") or config.get("architectures")
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    if not isinstance(names, list) or not all(type(text.get(size)) is int for size in sizes):
        return None
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else None
    facts = model_facts(", ".join(map(str, names)), _stored(headers), [text[size] for size in sizes], method)
    facts["batch_invariant"] = batch_invariant(method)
    return facts


def model_facts(architecture: str, tensors: Stored, sizes: Sequence[int | None], method: str | None) -> ModelFacts:
    """Return the facts about a model that are always shown.

    Args:
        architecture: Names of its class.
        tensors: Shape and number format of each tensor.
        sizes: Hidden size, layers, vocabulary and context; None if unknown.
        method: Name of the quantization method; None if the model is not quantised.
    """
    hidden_size, layers, vocabulary, context = sizes
    stored = stored_facts(tensors)
    facts: ModelFacts = {
        "architecture": architecture,
        "parameters": stored["parameters"],
        "stored_as": stored["stored_as"],
        "hidden_size": hidden_size,
        "layers": layers,
        "vocabulary": vocabulary,
        "context": context,
    }
    if method is not None:
        facts["quantised"] = method
    return facts


def batch_invariant(method: str | None) -> str:
    """Describe whether a model supports `batch_invariant`; `method` is its quantization method."""
    if method is None:
        return "tried when --batch-invariant loads it"
    return f"no: {FeatureSet(method, QUANTISED_WEIGHTS).conflict(BATCH_INVARIANCE)}"


def stored_facts(tensors: Stored) -> StoredFacts:
    """Return the number of parameters of a checkpoint and their formats; maps of ids (int64) are not counted."""
    parameters = [(math.prod(shape), dtype) for shape, dtype in tensors.values() if dtype != "int64"]
    return {
        "parameters": sum(count for count, _ in parameters),
        "stored_as": ", ".join(sorted({dtype for _, dtype in parameters})),
    }


def share_of_model(drafter: Stored, model: ModelFacts) -> float:
    """Return the parameters of a drafter as a share of its model's, with four digits."""
    return round(stored_facts(drafter)["parameters"] / max(model["parameters"], 1), 4)


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
        **{name: value for name, value in own.items() if value is not None and value != []},
    }


def _describe_drafter(directory: Path) -> dict[str, object] | None:
    config = read_json(directory / "config.json")
    if "vocab_size" not in config:  # another project's config, which only the drafter's class can read
        return None
    return drafter_facts(drafter_kinds()[config["model_type"]].name, _stored(read_headers(directory)), config)


def _stored(headers: Mapping[str, Header]) -> Stored:
    return {name: (header.shape, DTYPE_NAMES.get(header.code, header.code.lower())) for name, header in headers.items()}


def _format_lines(document: Mapping[str, object], indent: str = "") -> Iterator[str]:
    for key, value in document.items():
        name = indent + key.replace("_", " ")
        match value:
            case dict():
                yield name
                yield from _format_lines(value, indent + "  ")
            case None:
                yield f"{name:<24}not set"
            case bool():
                yield f"{name:<24}{'yes' if value else 'no'}"
            case int():
                yield f"{name:<24}{value:,}"
            case list():
                yield f"{name:<24}{', '.join(map(str, value))}"
            case _:
                yield f"{name:<24}{value}"


def build_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        prog="redrafter info",
        description="Describe a model, a drafter or a pair by the configs and the headers of the weights of Hugging\n"
        "Face models, GGUF files, merged checkpoints, drafters of redrafter and of other projects, and\n"
        "TensorRT-LLM checkpoints; with --check or --drafter, also whether they fit each other, and what they can be\n"
        "converted to. Without MODEL, describes the boxed pair and prints the versions of the libraries.",
        epilog="example:\n  redrafter info my-base --drafter my-drafter",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory, GGUF file, or hub id that was downloaded before"
    )
    parser.add_argument("--drafter", metavar="D", help="a drafter for MODEL")
    checked = "also find out whether it can be a target, whether its drafter fits, and what it can be converted to"
    parser.add_argument("--check", action="store_true", help=checked)
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def command() -> int:
        args = build_parser().parse_args(argv)
        if args.model is None and args.drafter is not None:
            raise ArgumentError("--drafter needs the model that it should fit: redrafter info MODEL --drafter D")
        for name in filter(None, (args.model, args.drafter)):
            check_path(name)
        document = None
        if args.model is not None and args.drafter is None and not args.check and Path(args.model).is_dir():
            document = describe_files(Path(args.model))
        if document is None:
            describe = import_libraries("redrafter.convert.describe")
            document = describe.environment() if args.model is None else describe.describe(args.model, args.drafter)
        print(json.dumps(document) if args.json else "\n".join(_format_lines(document)))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
