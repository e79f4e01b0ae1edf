"""`redrafter info`: describe a checkpoint, and say what it can be converted to."""

import copy
import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from redrafter.app.parser import Parser, add_json
from redrafter.app.program import run_command
from redrafter.cache.dense import cache_in
from redrafter.cache.states import StateShape
from redrafter.checkpoints.merged import Defaults, boxed_pair
from redrafter.checkpoints.mtp import find_layer
from redrafter.convert.plan import possible_formats
from redrafter.drafting.assistant import AssistantConfig
from redrafter.drafting.drafter_config import MTPConfig
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, ReDrafterError, first_line
from redrafter.files.checkpoint_kind import check_path, kind_of
from redrafter.files.dtype_names import dtype_name
from redrafter.formats.sources import FOREIGN, SourceBase, SourceDrafter, is_pair, open_base, open_drafter
from redrafter.formats.tensors import LazyTensor, open_directory
from redrafter.model.recurrent_layers import layer_tensors
from redrafter.model.supported import check_states_found, check_supported, stored_shapes
from redrafter.version import __version__


def describe(name: str, drafter_name: str | None = None) -> dict[str, Any]:
    """Return facts about a checkpoint, or about a model and a drafter for it.

    Args:
        name: Directory, or hub id that was downloaded before.
        drafter_name: The same of a drafter for the model.

    Returns:
        The JSON document that `redrafter info --json` prints.

    Raises:
        CheckpointError: When files are missing or broken.
        ArgumentError: When a drafter is given for what is a drafter itself.
    """
    directory = _locate(name)
    kind = kind_of(directory)
    document: dict[str, Any] = {"path": str(directory), "kind": kind}
    if kind in ("drafter", "Apple drafter", *FOREIGN):
        if drafter_name is not None:
            raise ArgumentError(f"{name} is a drafter itself: give the model first, and the drafter with --drafter")
        drafter = open_drafter(directory)
        return document | {"drafter": _describe_drafter(drafter), "converts_to": possible_formats(drafter)}
    if kind == "assistant":
        assistant = SourceDrafter(
            directory, kind, AssistantConfig.from_pretrained(directory), open_directory(directory), Defaults()
        )
        return document | {"drafter": _describe_drafter(assistant)}
    base = open_base(directory)
    document["model"] = _describe_model(base)
    if drafter_name is not None:
        drafter = open_drafter(_locate(drafter_name))
    elif is_pair(kind):
        drafter = open_drafter(directory)
    elif (found := find_layer(base.tensors)) is not None:
        model = document["model"]
        config = MTPConfig(vocab_size=model["vocabulary"], hidden_size=model["hidden_size"], **found.config)
        tensors = {name: base.tensors[name] for name in found.names if name in base.tensors}
        return document | {"drafter": _describe_drafter(SourceDrafter(directory, kind, config, tensors))}
    else:
        return document
    share = _count_parameters(drafter.tensors) / max(document["model"]["parameters"] or 1, 1)
    document["drafter"] = {"path": str(drafter.directory)} | _describe_drafter(drafter)
    document["drafter"]["share_of_model"] = round(share, 4)
    if is_pair(drafter.kind):
        defaults = drafter.fill(Defaults())
        document["shape"] = defaults.shape.to_dict() | {"greedy_search": defaults.greedy_search}
    try:
        base.check_fits(drafter.config)
        document["fits"] = True
    except MismatchError as error:
        return document | {"fits": False, "why_not": str(error)}
    return document | {"converts_to": possible_formats(drafter, base)}


def _locate(name: str) -> Path:
    """Return a directory, or the download of a hub id in the local cache; nothing is downloaded."""
    check_path(name)
    if Path(name).exists():
        return Path(name)  # a GGUF file, too
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise CheckpointError(f"{name} is no directory, and not in the download cache: {first_line(error)}") from error


def _describe_model(base: SourceBase) -> dict[str, Any]:
    theirs, ranks = base.trtllm_config, enumerate(base.ranks)
    tensors = base.tensors or {f"{number} {name}": x for number, rank in ranks for name, x in rank.items()}
    config: Any
    if theirs is None:
        config = base.config.get_text_config(decoder=True)
        names = getattr(config, "architectures", None) or base.config.architectures
        architecture = ", ".join(names) if isinstance(names, list) else config.model_type
    else:
        config = SimpleNamespace(**theirs)
        architecture = theirs.get("base_model_architecture", theirs["architecture"])
    facts = {
        "architecture": architecture,
        "parameters": _count_parameters(tensors),
        "stored_as": _dtype_names(tensors) if base.gguf is None else base.gguf.stored_as,
        "hidden_size": getattr(config, "hidden_size", None),
        "layers": getattr(config, "num_hidden_layers", None),
        "vocabulary": getattr(config, "vocab_size", None),
        "context": getattr(config, "max_position_embeddings", None),
    }
    if theirs is not None:
        facts["ranks"] = len(base.ranks)
    method = base.quantization_method
    if base.gguf is not None:
        facts["loaded_as"] = f"{dtype_name(base.gguf.dtype)}, unless --dtype names another format"
    elif method is not None:
        facts["quantised"] = method
    if theirs is None:
        plain = method is None or base.gguf is not None
        facts["batch_invariant"] = "tried when --batch-invariant loads it" if plain else "no: it is quantised"
        facts["target"] = _describe_target(base.config)
    return facts


def _describe_target(config: Any) -> str:
    """Say whether a model can be a target, and why not, by its config: one without weights reads a few tokens."""
    loaders = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    loader: Any = next((loader for loader, types in loaders.items() if config.model_type in types), None)
    if loader is None and not hasattr(config, "auto_map"):
        kind = "; it is an encoder-decoder" if config.is_encoder_decoder else ""
        return f"no: transformers has no causal LM of the type {config.model_type}{kind}"
    try:
        with torch.device("meta"), torch.no_grad():
            model: Any = loader.from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
            name, text = type(model).__name__, model.config.get_text_config(decoder=True)
            check_supported(model, name)
            output = model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=True)
        cache = cache_in(output)
        # Of recurrent states only that they are there is looked at: whether they can be rolled back, loading finds out.
        states = [
            StateShape(layer, state, tuple(x.shape[1:]), x.dtype, x.device)
            for layer, kept in enumerate(getattr(cache, "layers", ()))
            for state, x in layer_tensors(kept).items()
        ]
        if not states:
            check_states_found(model, text, name)
        stored_shapes(output, text, name, states)
    except ReDrafterError as error:
        return f"no: {error}"
    except Exception:  # code that needs numbers, or is not transformers' own
        return "not known before it is loaded, and tested"
    return "yes, by its config; it is tested when it is loaded"


def _describe_drafter(drafter: SourceDrafter) -> dict[str, Any]:
    config = drafter.config
    return {
        "type": config.kind,
        "parameters": _count_parameters(drafter.tensors),
        "stored_as": _dtype_names(drafter.tensors),
        "hidden_size": config.hidden_size,
        **config.describe(),
        "vocabulary": config.vocab_size,
        "draft_vocabulary": config.draft_vocab_size or config.vocab_size,
        "num_beams": config.draft_beams,
        "draft_len_per_beam": config.draft_len_per_beam,
        "trained_draft_len": config.trained_draft_len,
        "base_model": config.base_model,
    }


def _count_parameters(tensors: Mapping[str, LazyTensor]) -> int:
    # Maps of ids are no parameters.
    return sum(math.prod(tensor.shape) for tensor in tensors.values() if tensor.dtype != torch.int64)


def _dtype_names(tensors: Mapping[str, LazyTensor]) -> str:
    stored = {tensor.dtype for tensor in tensors.values()} - {torch.int64}
    return ", ".join(sorted(dtype_name(dtype) for dtype in stored))


def _format_lines(document: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in document.items():
        name = indent + key.replace("_", " ")
        if isinstance(value, dict):
            yield name
            yield from _format_lines(value, indent + "  ")
            continue
        if value is None or isinstance(value, bool):
            value = {None: "not set", True: "yes", False: "no"}[value]
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        yield f"{name:<24}{value:,}" if isinstance(value, int) else f"{name:<24}{value}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        prog="redrafter info",
        description="Describe a model, a drafter or a pair: whether they fit each other, and what they can be\n"
        "converted to. Reads the configs and the headers of the weights of Hugging Face models, GGUF files, merged\n"
        "checkpoints, drafters of redrafter and of Apple, EAGLE-3 heads, and TensorRT-LLM checkpoints. Without MODEL,\n"
        "describes the boxed pair and prints the versions of the libraries.",
        epilog="example:\n  redrafter info my-base --drafter my-drafter",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory, GGUF file, or hub id that was downloaded before"
    )
    parser.add_argument("--drafter", metavar="D", help="a drafter for MODEL")
    add_json(parser)

    def run() -> int:
        args = parser.parse_args(argv)
        if args.model is not None:
            document = describe(args.model, args.drafter)
        elif args.drafter is not None:
            raise ArgumentError("--drafter needs the model that it should fit: redrafter info MODEL --drafter D")
        else:
            boxed, gpus = boxed_pair(), range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            document = describe(str(boxed)) if boxed.is_dir() else {"boxed_pair": "not in this installation"}
            document["environment"] = {
                "redrafter": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
                "devices": ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in gpus)],
                "threads": torch.get_num_threads(),
            }
        print(json.dumps(document) if args.json else "\n".join(_format_lines(document)))
        return 0

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
