"""Plan the files of a conversion for each output format, completely and before anything is written."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import PretrainedConfig

from redrafter.checkpoints.drafters import draft_length_warning
from redrafter.convert.config import ConvertConfig
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.drafter_config import AnyDrafterConfig, DrafterConfig, EagleConfig
from redrafter.errors import ArgumentError, MismatchError, UnsupportedError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE
from redrafter.files.drafter_kinds import drafter_kinds
from redrafter.files.dtype_names import dtype_name
from redrafter.files.headers import INDEX_FILE, WEIGHTS_FILE
from redrafter.files.hub import CARD_FILE
from redrafter.formats import apple, dflash, eagle, trtllm
from redrafter.formats.model_card import make_header, make_introduction
from redrafter.formats.sources import SourceBase, SourceDrafter
from redrafter.formats.tensors import StoredTensor, cast, memory_tensor, split_into_files, write_safetensors
from redrafter.model.packed_weights import pack_matrices
from redrafter.tree.sizes import TreeShape

DRAFTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = (  # and others that belong with a tokenizer
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


@dataclass(frozen=True)
class ConversionPlan:
    """The files that a conversion writes, by their names relative to the output directory.

    Attributes:
        weights: Tensors of each safetensors file.
        copies: Source of each unchanged file; weight files become hard links if the file system supports them.
        texts: Content of each text file. They are written last and in this order, so that an incomplete directory
            cannot be loaded.
        notes: Messages for the user.
        copy: Whether to copy weight files that could be hard links.
    """

    weights: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copy: bool = False

    @property
    def size(self) -> int:
        """Bytes of all weights and copies, hard links included."""
        written = sum(tensor.meta.nbytes for tensors in self.weights.values() for tensor in tensors.values())
        return written + sum(file.stat().st_size for file in self.copies.values())

    def write(self, folder: Path, progress: Callable[[int], object]) -> None:
        """Write all files into a new directory; `progress` is called with the number of bytes of each block."""
        for name in (*self.weights, *self.copies, *self.texts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.weights.items():
            write_safetensors(folder / name, tensors, progress)
        for name in sorted(self.copies, key="config.json".__eq__):  # last: a directory without it cannot be loaded
            link_or_copy(self.copies[name], folder / name, progress, self.copy)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def key_map(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the source, the new name, the shape and the dtype of each copied file and of each tensor."""
        for name, source in self.copies.items():
            yield str(source), name, "as it is", ""
        for file, tensors in self.weights.items():
            for name, tensor in tensors.items():
                shape, dtype = str(list(tensor.shape)), dtype_name(tensor.dtype)
                yield tensor.name, f"{file}: {name}", shape, dtype


def link_or_copy(source: Path, destination: Path, progress: Callable[[int], object], copy: bool) -> None:
    """Create a hard link to a file of weights, or copy the file if `copy` is set or links are not supported."""
    progress(source.stat().st_size)
    # Small files are copied, since users edit them and a link would change the source too.
    if not copy and source.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
        try:
            os.link(source.resolve(), destination)  # resolve first: the hub's cache consists of symbolic links
            return
        except OSError:
            pass  # another file system, or no hard links: copy below
    shutil.copyfile(source, destination)


def plan_drafter(
    drafter: SourceDrafter, base: SourceBase | None, config: ConvertConfig, shape: TreeShape | None = None
) -> ConversionPlan:
    """Plan a drafter directory of this project.

    `shape` has the search defaults to write, where None keeps the drafter's value; without it they are `config`'s.
    """
    shape = shape or drafter.fill(config.defaults).shape
    drafter = _without_copies(drafter, base)
    written = _config_with_base(drafter.config, base)
    written.draft_beams = shape.num_beams or written.draft_beams
    written.draft_len_per_beam = shape.draft_len_per_beam or written.draft_len_per_beam
    tensors = drafter.tensors if config.dtype == "int8" else _cast_floats(drafter.tensors, config.dtype)
    written.dtype = replace(drafter, tensors=tensors).dtype
    if config.dtype == "int8":
        packed, entries = pack_matrices({name: x.read() for name, x in tensors.items()})
        tensors = {name: memory_tensor(name, x) for name, x in packed.items()}
        written.quantization_config = entries
    written.architectures = [drafter_kinds()[written.model_type].class_name]
    # Model card and training record; those of other projects' drafters describe their own formats.
    ours = drafter.kind in ("drafter", "merged checkpoint")
    documents = [drafter.directory / name for name in (CARD_FILE, "training.json")] if ours else []
    copies = {file.name: file for file in documents if file.is_file()}
    card = {} if CARD_FILE in copies else {CARD_FILE: _make_card(drafter, written, base)}
    return ConversionPlan({WEIGHTS_FILE: tensors}, copies, card | {"config.json": _config_text(written)})


def plan_apple(drafter: SourceDrafter, base: SourceBase | None, config: ConvertConfig) -> ConversionPlan:
    """Plan a drafter directory in Apple's format, with its current tensor names."""
    published = apple.check_published_form(drafter.config, "Apple's format", ("apple",))
    layers = published.num_draft_layers
    tensors = {apple.to_apple_name(name, layers): tensor for name, tensor in drafter.tensors.items()}
    tensors = _cast_floats(tensors, config.dtype)
    content = apple.to_apple_config(published, dtype_name(tensors[f"lm_head.{layers}.weight"].dtype))
    return ConversionPlan({WEIGHTS_FILE: tensors}, texts={"config.json": _json(content)})


def plan_speculators(drafter: SourceDrafter, base: SourceBase | None, config: ConvertConfig) -> ConversionPlan:
    """Plan a directory of an EAGLE-3 head or a block drafter as vllm-project/speculators writes and vLLM serves it."""
    if not isinstance(drafter.config, EagleConfig | DFlashConfig):
        how = "`redrafter train --form eagle3` makes a head for it, and --form dflash, dspark or dflash2 a drafter"
        raise UnsupportedError(f"speculators' format cannot hold a {drafter.config.kind}; {how}")
    name, architecture, notes = drafter.config.base_model, None, tuple[str, ...]()
    if base is not None:
        name, architecture = config.base_model_checkpoint_dir or name, next(iter(base.config.architectures or ()), None)
    if name is None or not (base or "/" in name):
        where = "where vLLM looks for it; --base-model-checkpoint-dir names a directory"
        notes += (f"the base is written as {name!r}, {where}",)
    layers = drafter.config.target_layers
    depth = None if base is None else getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", None)
    # vLLM collects hidden states before each layer, so it never sees the last one's output.
    if layers is not None and depth is not None and layers[-1] == depth - 1:
        notes += (f"the drafter reads the output of the base's last layer, {layers[-1]}, which vLLM does not give",)
    floats = _cast_floats(drafter.tensors, config.dtype)
    dtype, length = dtype_name(floats["fc.weight"].dtype), drafter.fill(config.defaults).shape.draft_len_per_beam or 1
    fields = eagle.speculators_fields(drafter.config, name, architecture, dtype, length)
    if isinstance(drafter.config, DFlashConfig):
        content = fields | dflash.to_speculators_config(drafter.config)
    else:
        content = fields | eagle.to_speculators_config(drafter.config)
    tensors = eagle.to_speculators_tensors(floats, drafter.config)
    card = _make_card(drafter, _config_with_base(drafter.config, base), base, "speculators")
    texts = {CARD_FILE: card, "config.json": _json(content)}
    return ConversionPlan({WEIGHTS_FILE: tensors}, texts=texts, notes=notes)


def plan_merged(drafter: SourceDrafter, base: SourceBase | None, config: ConvertConfig) -> ConversionPlan:
    """Plan a merged checkpoint: a base and its drafter in one directory, for `ReDrafter.from_pretrained`."""
    base, notes = _required(base, "redrafter"), tuple[str, ...]()
    part = plan_drafter(drafter, base, config, TreeShape())
    weights = {f"{DRAFTER_FOLDER}/{name}": tensors for name, tensors in part.weights.items()}
    copies = {f"{DRAFTER_FOLDER}/{name}": file for name, file in part.copies.items()}
    texts = {f"{DRAFTER_FOLDER}/{name}": text for name, text in part.texts.items() if name != CARD_FILE}
    if base.trtllm_config is None:
        copies |= base.files()
    elif not base.tensors:
        raise UnsupportedError(
            f"{base.directory} is quantised in TensorRT-LLM's way; give the Hugging Face base with "
            "--base-model-checkpoint-dir, and this one with --drafter-model-dir"
        )
    else:
        base_weights, index = split_into_files(base.tensors)
        weights |= base_weights
        texts |= ({INDEX_FILE: _json(index)} if index else {}) | {"config.json": _config_text(base.config)}
        if config.tokenizer_dir is None:
            how = "give the directory of a model that has them with --tokenizer-dir"
            notes = (f"{base.directory} has no tokenizer and does not say what ends a text; {how}",)
    if config.tokenizer_dir is not None:
        given = [Path(config.tokenizer_dir, name) for name in TOKENIZER_FILES]
        copies |= {file.name: file for file in given if file.is_file()}
    defaults = drafter.fill(config.defaults)
    texts[SHAPE_FILE] = _json({**defaults.shape.to_dict(), "greedy_search": defaults.greedy_search})
    return ConversionPlan(weights, copies, texts, notes)


def plan_trtllm(drafter: SourceDrafter, base: SourceBase | None, config: ConvertConfig) -> ConversionPlan:
    """Plan a TensorRT-LLM ReDrafter checkpoint of a base and its drafter."""
    base = _required(base, "trtllm")
    published = apple.check_published_form(drafter.config, "TensorRT-LLM's format", ("apple", "trtllm"))
    base_config, ranks = _trtllm_base(base, config)
    tp, dtype, notes = len(ranks), str(base_config.get("dtype")), tuple[str, ...]()
    trtllm.check_tp(tp, {"exit_dim": published.exit_dim, "hidden_size": published.hidden_size})
    tensors = _cast_floats(drafter.tensors, dtype)
    weights = {
        f"rank{rank}.safetensors": part | trtllm.split(tensors, trtllm.drafter_rules(tensors), rank, tp)
        for rank, part in enumerate(ranks)
    }
    if config.dtype is None and drafter.dtype != DRAFTER_DTYPES.get(dtype):
        hint = "" if base.trtllm_config is not None else "; --dtype chooses another for both"
        notes += (f"the drafter goes from {dtype_name(drafter.dtype)} to {dtype}, the base's{hint}",)
    if published.rnn and published.recurrence == "apple":
        notes += ("TensorRT-LLM's engine computes another recurrence than this drafter was trained with",)
    pair_config = trtllm.to_pair_config(published, tensors, drafter.fill(config.defaults), base_config, base.directory)
    return ConversionPlan(weights, texts={"config.json": _json(pair_config)}, notes=notes)


def _trtllm_base(base: SourceBase, config: ConvertConfig) -> tuple[dict[str, Any], list[dict[str, StoredTensor]]]:
    """Return the TensorRT-LLM config of a base and its tensors on each rank.

    A base that is a TensorRT-LLM checkpoint, possibly quantised, keeps its config, ranks and number format.
    """
    if base.trtllm_config is not None:
        for flag, asked, value in (
            ("--tp-size", config.tp_size, len(base.ranks)),
            ("--dtype", config.dtype, str(base.trtllm_config.get("dtype"))),
        ):
            if asked is not None and asked != value:
                raise ArgumentError(f"{flag} {asked}: {base.directory} was converted with {value}, and a pair has one")
        return base.trtllm_config, [dict(rank) for rank in base.ranks]
    table = base.tensors.get("model.embed_tokens.weight") or next(iter(base.tensors.values()))
    tp, dtype = config.tp_size or 1, config.dtype or dtype_name(table.dtype)
    if base.quantization_method or base.gguf is not None:
        raise UnsupportedError(f"{base.directory} is quantised; convert what it was made from, and quantise it there")
    trtllm.check_base(base.config, base.tensors, tp, base.directory)
    sizes = (base.config.num_hidden_layers, base.config.num_attention_heads, base.config.num_key_value_heads)
    parts = (trtllm.split(base.tensors, trtllm.base_rules(*sizes), rank, tp) for rank in range(tp))
    return trtllm.to_trtllm_config(base.config, dtype, tp), [_cast_floats(part, dtype) for part in parts]


OUTPUT_PLANNERS: dict[str, Callable[[SourceDrafter, SourceBase | None, ConvertConfig], ConversionPlan]] = {
    "redrafter": plan_merged,
    "trtllm": plan_trtllm,
    "apple": plan_apple,
    "drafter": plan_drafter,
    "speculators": plan_speculators,
}


def possible_formats(drafter: SourceDrafter, base: SourceBase | None = None) -> dict[str, str]:
    """Return `yes` for each possible output format, or `no` with the reason for the others."""
    answers = {}
    for name, make_plan in OUTPUT_PLANNERS.items():
        try:
            make_plan(drafter, base, ConvertConfig(drafter_model_dir=str(drafter.directory), to=name, dry_run=True))
            answers[name] = "yes"
        except (UnsupportedError, ArgumentError, MismatchError) as error:
            answers[name] = f"no: {error}"
    return answers


def _required(base: SourceBase | None, output_format: str) -> SourceBase:
    if base is None:
        raise ArgumentError(f"--to {output_format} needs a base: give --base-model-checkpoint-dir")
    return base


def _config_with_base(config: AnyDrafterConfig, base: SourceBase | None) -> AnyDrafterConfig:
    """Copy a drafter's config and record the base in it, unless it already names one."""
    config = deepcopy(config)
    if base is not None:
        # With several tables, such as an untied head, only a name identifies the embedding; else nothing is checked.
        if config.base_embedding_norms is None:
            tables = base.embedding_norms
            names = [name for name in tables if "embed" in name] or list(tables)
            config.base_embedding_norms = tables[names[0]] if len(names) == 1 else None
        directory = base.directory.resolve()
        name = directory.name  # or a GGUF file's
        if directory.parent.name == "snapshots" and directory.parents[1].name.startswith("models--"):
            name = directory.parents[1].name.removeprefix("models--").replace("--", "/")  # a hub id, in the hub's cache
        config.base_model = config.base_model or name
    return config


def _without_copies(drafter: SourceDrafter, base: SourceBase | None) -> SourceDrafter:
    """Remove a drafter's embedding table and head if they equal the base's, which the drafter then shares."""
    tables = {} if base is None else base.tensors
    # A table equal to the base's would take memory twice when both are loaded.
    shared = [x for name, x in tables.items() if name.endswith((dflash.HEAD, eagle.EMBEDDING))]
    for name, flag in drafter.config.own_tables.items():
        own = drafter.tensors.get(name)
        if own is None or not any(eagle.is_same(own, x) for x in shared):
            continue
        config = deepcopy(drafter.config)
        setattr(config, flag, False)
        drafter = replace(drafter, config=config, tensors={key: x for key, x in drafter.tensors.items() if key != name})
    return drafter


def notes_on(drafter: SourceDrafter, length: int | None) -> Iterator[str]:
    """Yield what a user should know of a drafter that is to draft `length` tokens per beam; None if no format says."""
    config = drafter.config
    # A TensorRT-LLM checkpoint does not record the recurrence.
    if drafter.kind.startswith("TensorRT-LLM") and isinstance(config, DrafterConfig) and config.rnn:
        other = {"apple": "trtllm", "trtllm": "apple"}.get(config.recurrence, "apple")
        yield f"recurrence {config.recurrence}; --recurrence {other} reads it the other way"
    if length is not None and (warning := draft_length_warning(config, length)) is not None:
        yield warning


def _cast_floats(tensors: Mapping[str, StoredTensor], dtype: str | None) -> dict[str, StoredTensor]:
    """Cast floating-point tensors to a number format; id maps keep their integers."""
    if dtype is None:
        return dict(tensors)
    if dtype not in DRAFTER_DTYPES:
        raise UnsupportedError(f"this output format has drafters of float32, bfloat16 or float16, not {dtype}")
    return {
        name: cast(tensor, DRAFTER_DTYPES[dtype]) if tensor.dtype.is_floating_point else tensor
        for name, tensor in tensors.items()
    }


def _make_card(drafter: SourceDrafter, config: AnyDrafterConfig, base: SourceBase | None, *tags: str) -> str:
    """Return the model card of a converted drafter, with the text of its own card if it is one of this project."""
    own, body = drafter.directory / CARD_FILE, make_introduction(config, config.base_model)
    if drafter.kind == "drafter" and own.is_file():
        body = ModelCard(own.read_text(encoding="utf-8"), ignore_metadata_errors=True).text.lstrip("\n")
    return f"{make_header(config, config.base_model, None if base is None else str(base.directory), tags)}\n{body}"


def _config_text(config: PretrainedConfig) -> str:
    values: dict[str, object] = config.to_diff_dict() | {"model_type": config.model_type}
    values["dtype"] = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else config.dtype
    return _json(values)


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
