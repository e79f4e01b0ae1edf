"""The output formats: which files a conversion writes for each."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redrafter.checkpoints.drafters import check_beams, draft_length_warning
from redrafter.checkpoints.headers import INDEX_FILE, WEIGHTS_FILE
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert import apple, eagle, trtllm, trtllm_base, trtllm_base_config
from redrafter.convert.plan import ConversionPlan
from redrafter.convert.request import ConversionRequest, ConversionSource
from redrafter.convert.source_base import TOKENIZER_FILES, SourceBase
from redrafter.convert.source_drafter import SourceDrafter
from redrafter.convert.tensors import LazyTensor, cast, split_into_files
from redrafter.drafting.drafter_config import DrafterConfig, EagleConfig
from redrafter.drafting.drafter_types import DRAFTER_CLASSES, DrafterArchitecture
from redrafter.errors import ArgumentError, MismatchError, UnsupportedError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE
from redrafter.files.dtype_names import dtype_name

__all__ = ["OUTPUT_PLANNERS", "possible_formats"]

DRAFTER_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def plan_drafter(source: ConversionSource, request: ConversionRequest) -> ConversionPlan:
    """Plan a drafter directory of this project."""
    shape = request.defaults_for(source.drafter).shape
    check_beams(source.drafter.config, shape.num_beams)
    plan = _plan_drafter(source, request.dtype, shape)
    return replace(plan, notes=plan.notes + _training_notes(source.drafter.config, shape))


def _plan_drafter(source: ConversionSource, dtype: str | None, shape: TreeShape) -> ConversionPlan:
    """Plan a drafter directory whose config has `shape` as its search defaults; what is None there stays."""
    drafter = _without_copied_embedding(source.drafter, source.base)
    config = _config_with_base(drafter.config, source.base)
    config.draft_beams = shape.num_beams or config.draft_beams
    config.draft_len_per_beam = shape.draft_len_per_beam or config.draft_len_per_beam
    tensors = _cast_floats(drafter.tensors, dtype)
    config.dtype, config.architectures = tensors["lm_head.weight"].dtype, [DRAFTER_CLASSES[config.model_type].__name__]
    return ConversionPlan(
        weights={WEIGHTS_FILE: tensors},
        copies=_documents(drafter),
        json_files={"config.json": _config_dict(config)},
        notes=_recurrence_notes(drafter),
    )


def plan_apple(source: ConversionSource, request: ConversionRequest) -> ConversionPlan:
    """Plan a drafter directory in Apple's format, with its current tensor names."""
    config = apple.check_drafter(source.drafter.config)
    layers = config.num_draft_layers
    tensors = {apple.to_apple_name(name, layers): tensor for name, tensor in source.drafter.tensors.items()}
    tensors = _cast_floats(tensors, request.dtype)
    dtype = dtype_name(tensors[f"lm_head.{layers}.weight"].dtype)
    return ConversionPlan(
        weights={WEIGHTS_FILE: tensors},
        json_files={"config.json": apple.to_apple_config(config, dtype)},
        notes=_recurrence_notes(source.drafter),
    )


def plan_merged(source: ConversionSource, request: ConversionRequest) -> ConversionPlan:
    """Plan a merged checkpoint: a base and its drafter in one directory, as `ReDrafter.from_pretrained` opens it."""
    base, drafter = _required_base(source, "redrafter"), source.drafter
    base.check_fits(drafter.config)
    part = _plan_drafter(source, request.dtype, TreeShape())
    defaults = request.defaults_for(drafter)
    check_beams(drafter.config, defaults.shape.num_beams)
    if drafter.kind in ("drafter", "merged checkpoint") and _is_unchanged(drafter, part):
        files = sorted(file for file in drafter.directory.iterdir() if file.is_file())
        part = ConversionPlan(copies={file.name: file for file in files}, notes=part.notes)
    plan = ConversionPlan(
        weights={f"{DRAFTER_FOLDER}/{name}": tensors for name, tensors in part.weights.items()},
        copies={f"{DRAFTER_FOLDER}/{name}": file for name, file in part.copies.items()},
        json_files={f"{DRAFTER_FOLDER}/{name}": content for name, content in part.json_files.items()},
        notes=part.notes + _training_notes(drafter.config, defaults.shape),
    )
    plan = _with_base(plan, source, base)
    if source.tokenizer is not None:
        files = [source.tokenizer / name for name in TOKENIZER_FILES]
        plan = replace(plan, copies=plan.copies | {file.name: file for file in files if file.is_file()})
    settings = defaults.shape.to_dict() | {"greedy_search": defaults.greedy_search}
    return replace(plan, json_files=plan.json_files | {SHAPE_FILE: settings})


def _with_base(plan: ConversionPlan, source: ConversionSource, base: SourceBase) -> ConversionPlan:
    """Return the plan of a merged checkpoint with the files of its base added."""
    if base.trtllm_config is None:
        return replace(plan, copies=plan.copies | base.files())
    if not base.tensors:
        raise UnsupportedError(
            f"{base.directory} is quantised in TensorRT-LLM's way; give the Hugging Face base with "
            "--base-model-checkpoint-dir, and this one with --drafter-model-dir"
        )
    files, index = split_into_files(base.tensors)
    json_files = plan.json_files | ({INDEX_FILE: index} if index else {}) | {"config.json": _config_dict(base.config)}
    notes = plan.notes
    if source.tokenizer is None:
        notes += (
            f"{base.directory} has no tokenizer and does not say what ends a text; give the directory of a model that "
            "has them with --tokenizer-dir",
        )
    return replace(plan, weights=plan.weights | files, json_files=json_files, notes=notes)


def plan_trtllm(source: ConversionSource, request: ConversionRequest) -> ConversionPlan:
    """Plan a TensorRT-LLM ReDrafter checkpoint of a base and its drafter."""
    base, drafter = _required_base(source, "trtllm"), source.drafter
    config = trtllm.check_drafter(drafter.config)
    base.check_fits(config)
    defaults = request.defaults_for(drafter)
    check_beams(config, defaults.shape.num_beams)
    base_config, ranks = _trtllm_base(base, request)
    tp, dtype = len(ranks), str(base_config.get("dtype"))
    trtllm.check_tp(tp, {"exit_dim": config.exit_dim, "hidden_size": config.hidden_size})
    tensors = _cast_floats(drafter.tensors, dtype)
    weights = {
        f"rank{rank}.safetensors": part | trtllm.split_drafter(tensors, config, rank, tp)
        for rank, part in enumerate(ranks)
    }
    notes = _recurrence_notes(drafter)
    if request.dtype is None and drafter.dtype != DRAFTER_DTYPES.get(dtype):
        hint = "" if base.trtllm_config is not None else "; --dtype chooses another for both"
        notes += (f"the drafter goes from {dtype_name(drafter.dtype)} to {dtype}, the base's{hint}",)
    notes += _training_notes(config, defaults.shape)
    if config.rnn and config.recurrence == "apple":
        notes += ("TensorRT-LLM's engine computes another recurrence than this drafter was trained with",)
    pair_config = trtllm.to_pair_config(config, defaults, base_config, base.directory)
    return ConversionPlan(weights=weights, json_files={"config.json": pair_config}, notes=notes)


def _trtllm_base(base: SourceBase, request: ConversionRequest) -> tuple[dict[str, Any], list[dict[str, LazyTensor]]]:
    """Return TensorRT-LLM's config of a base and the base's tensors on each rank.

    A TensorRT-LLM checkpoint, which may be quantised, keeps its config, its ranks and its number format.
    """
    if base.trtllm_config is not None:
        _check_same("--tp-size", request.tp, len(base.ranks), base)
        _check_same("--dtype", request.dtype, str(base.trtllm_config.get("dtype")), base)
        return base.trtllm_config, [dict(rank) for rank in base.ranks]
    tp, dtype = request.tp or 1, request.dtype or dtype_name(_embedding_dtype(base))
    if base.quantization_method:
        raise UnsupportedError(f"{base.directory} is quantised; convert what it was made from, and quantise it there")
    trtllm_base.check_base(base.config, base.tensors, tp, base.directory)
    config = trtllm_base_config.to_trtllm_config(base.config, dtype, tp)
    parts = (trtllm_base.split_base(base.tensors, base.config, rank, tp) for rank in range(tp))
    return config, [_cast_floats(part, dtype) for part in parts]


OUTPUT_PLANNERS: dict[str, Callable[[ConversionSource, ConversionRequest], ConversionPlan]] = {
    "redrafter": plan_merged,
    "trtllm": plan_trtllm,
    "apple": plan_apple,
    "drafter": plan_drafter,
}


def possible_formats(source: ConversionSource) -> dict[str, str]:
    """Return for each output format `yes`, or `no` with the reason why the source cannot be converted to it."""
    answers = {}
    for name, make_plan in OUTPUT_PLANNERS.items():
        try:
            make_plan(source, ConversionRequest())
            answers[name] = "yes"
        except (UnsupportedError, ArgumentError, MismatchError) as error:
            answers[name] = f"no: {error}"
    return answers


def _required_base(source: ConversionSource, output_format: str) -> SourceBase:
    if source.base is None:
        raise ArgumentError(f"--to {output_format} needs a base: give --base-model-checkpoint-dir")
    return source.base


def _config_with_base(config: DrafterArchitecture, base: SourceBase | None) -> DrafterArchitecture:
    """Return a copy of a drafter's config with the base recorded in it, unless it names one already."""
    config = deepcopy(config)
    if base is not None:
        base.check_fits(config)
        if config.base_embedding_norms is None:
            tables = base.embedding_norms()
            names = [name for name in tables if "embed" in name] or list(tables)
            config.base_embedding_norms = tables[names[0]] if len(names) == 1 else None
        config.base_model = config.base_model or _model_name(base.directory)
    return config


def _without_copied_embedding(drafter: SourceDrafter, base: SourceBase | None) -> SourceDrafter:
    """Return an EAGLE-3 head without its embedding table where that is the base's, which it then shares."""
    own = drafter.tensors.get(eagle.EMBEDDING)
    tables = () if base is None else (x for name, x in base.tensors.items() if name.endswith(eagle.EMBEDDING))
    if own is None or not any(eagle.is_same(own, table) for table in tables):
        return drafter
    config = deepcopy(drafter.config)
    assert isinstance(config, EagleConfig)
    config.own_embedding = False
    tensors = {name: tensor for name, tensor in drafter.tensors.items() if name != eagle.EMBEDDING}
    return replace(drafter, config=config, tensors=tensors)


def _model_name(directory: Path) -> str:
    """Return the hub id of a snapshot in the hub's cache, or the name of another directory."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots" and (repository := directory.parent.parent.name).startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.name


def _is_unchanged(drafter: SourceDrafter, plan: ConversionPlan) -> bool:
    """Return whether a drafter of this project is to be written with its own tensors and config."""
    [tensors], config = plan.weights.values(), plan.json_files["config.json"]
    same_tensors = all(tensor is drafter.tensors[name] for name, tensor in tensors.items())
    return same_tensors and config == _config_dict(drafter.config)


def _documents(drafter: SourceDrafter) -> dict[str, Path]:
    """Return the paths of a drafter's model card (README.md) and training record (training.json), by file name.

    A file that does not exist is left out. Drafters that come in another project's format have neither.
    """
    if drafter.kind not in ("drafter", "merged checkpoint"):
        return {}
    files = [drafter.directory / name for name in ("README.md", "training.json")]
    return {file.name: file for file in files if file.is_file()}


def _recurrence_notes(drafter: SourceDrafter) -> tuple[str, ...]:
    """Return a note about the recurrence that a TensorRT-LLM checkpoint is read with, which it does not hold."""
    config = drafter.config
    if not drafter.kind.startswith("TensorRT-LLM") or not isinstance(config, DrafterConfig) or not config.rnn:
        return ()
    other = {"apple": "trtllm", "trtllm": "apple"}.get(config.recurrence, "apple")
    return (f"recurrence {config.recurrence}; --recurrence {other} reads it the other way",)


def _training_notes(config: DrafterArchitecture, shape: TreeShape) -> tuple[str, ...]:
    """Return a note if the shape drafts more tokens than the drafter was trained for."""
    note = draft_length_warning(config, shape.draft_len_per_beam)
    return () if note is None else (note,)


def _cast_floats(tensors: Mapping[str, LazyTensor], dtype: str | None) -> dict[str, LazyTensor]:
    """Return tensors with floating-point ones cast to a number format; id maps stay integers."""
    if dtype is None:
        return dict(tensors)
    if dtype not in DRAFTER_DTYPES:
        raise UnsupportedError(f"a drafter is float32, bfloat16 or float16, not {dtype}")
    return {
        name: cast(tensor, DRAFTER_DTYPES[dtype]) if tensor.dtype.is_floating_point else tensor
        for name, tensor in tensors.items()
    }


def _check_same(flag: str, requested: object, value: object, base: SourceBase) -> None:
    """Raise `ArgumentError` if another value is requested than the base was converted with."""
    if requested is not None and requested != value:
        raise ArgumentError(f"{flag} {requested}: {base.directory} was converted with {value}, and a pair has one")


def _embedding_dtype(base: SourceBase) -> torch.dtype:
    table = base.tensors.get("model.embed_tokens.weight") or next(iter(base.tensors.values()))
    return table.dtype


def _config_dict(config: Any) -> dict[str, Any]:
    """Return a config as its `config.json` holds it."""
    values: dict[str, Any] = config.to_diff_dict() | {"model_type": config.model_type}
    values["dtype"] = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else config.dtype
    return values
