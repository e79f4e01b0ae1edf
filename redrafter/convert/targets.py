"""What there is to be written for each of the formats."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from redrafter.checkpoints.drafters import check_beams, draft_length_warning
from redrafter.checkpoints.headers import INDEX_FILE, WEIGHTS_FILE
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert import apple, trtllm, trtllm_base
from redrafter.convert.base import TOKENIZER, Base
from redrafter.convert.drafters import Drafter
from redrafter.convert.plan import Plan
from redrafter.convert.tensors import Stored, cast, shards
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import ArgumentError, MismatchError, UnsupportedError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE
from redrafter.files.dtype_names import dtype_name

__all__ = ["TARGETS", "ConversionRequest", "Source", "possible"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Source:
    """What is converted."""

    drafter: Drafter
    base: Base | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class ConversionRequest:
    """What was asked for. None: as it is."""

    defaults: Defaults = field(default_factory=Defaults)
    dtype: str | None = None
    tp: int | None = None

    def over(self, drafter: Drafter) -> Defaults:
        """Of a search, what was asked for, then what the source says, then the drafter's config."""
        own = TreeShape(drafter.config.draft_beams, drafter.config.draft_len_per_beam)
        asked, said = self.defaults, drafter.defaults
        greedy = said.greedy_search if asked.greedy_search is None else asked.greedy_search
        return Defaults(asked.shape.over(said.shape).over(own), greedy)


def drafter(source: Source, wish: ConversionRequest) -> Plan:
    """This project's drafter."""
    shape = wish.over(source.drafter).shape
    check_beams(source.drafter.config, shape.num_beams)
    made = _drafter(source, wish.dtype, shape)
    return replace(made, notes=made.notes + _past_training(source.drafter.config, shape))


def _drafter(source: Source, dtype: str | None, shape: TreeShape) -> Plan:
    """shape: the search's defaults, where they are not those of its config."""
    found, config = source.drafter, _bound(source.drafter.config, source.base)
    config.draft_beams = shape.num_beams or config.draft_beams
    config.draft_len_per_beam = shape.draft_len_per_beam or config.draft_len_per_beam
    tensors = _cast(found.tensors, dtype)
    config.dtype, config.architectures = tensors["lm_head.weight"].dtype, ["RecurrentDrafter"]
    return Plan({WEIGHTS_FILE: tensors}, _papers(found), {"config.json": _dict(config)}, _recurrence(found))


def to_apple(source: Source, wish: ConversionRequest) -> Plan:
    """Apple's drafter, in the current naming."""
    config = source.drafter.config
    apple.check(config)
    tensors = {apple.theirs(name, config.num_draft_layers): x for name, x in source.drafter.tensors.items()}
    tensors = _cast(tensors, wish.dtype)
    dtype = _name(tensors[f"lm_head.{config.num_draft_layers}.weight"].dtype)
    return Plan(
        {WEIGHTS_FILE: tensors}, {}, {"config.json": apple.their_config(config, dtype)}, _recurrence(source.drafter)
    )


def merged(source: Source, wish: ConversionRequest) -> Plan:
    """A base and its drafter in one directory, which `ReDrafter.from_pretrained` opens by itself."""
    base, found = _needs_base(source, "redrafter"), source.drafter
    base.check(found.config)
    own = _drafter(source, wish.dtype, TreeShape())
    defaults = wish.over(found)
    check_beams(found.config, defaults.shape.num_beams)
    weights = {f"{DRAFTER_FOLDER}/{name}": tensors for name, tensors in own.weights.items()}
    copies = {f"{DRAFTER_FOLDER}/{name}": file for name, file in own.copies.items()}
    texts: dict[str, dict[str, Any]] = {f"{DRAFTER_FOLDER}/{name}": text for name, text in own.texts.items()}
    if found.kind in ("drafter", "merged checkpoint") and _unchanged(found, own):
        weights, texts = {}, {}
        copies = {f"{DRAFTER_FOLDER}/{file.name}": file for file in sorted(found.place.iterdir()) if file.is_file()}
    notes = own.notes + _past_training(found.config, defaults.shape)
    if base.said is None:
        copies |= base.files()
    else:
        if not base.tensors:
            raise UnsupportedError(
                f"{base.place} is quantised in TensorRT-LLM's way; give the Hugging Face base with "
                "--base-model-checkpoint-dir, and this one with --drafter-model-dir"
            )
        files, index = shards(base.tensors)
        weights |= files
        texts |= {INDEX_FILE: index} if index else {}
        texts |= {"config.json": _dict(base.config)}
        if source.tokenizer is None:
            notes += (
                f"{base.place} has no tokenizer and does not say what ends a text; give the directory of a model that "
                "has them with --tokenizer-dir",
            )
    if source.tokenizer is not None:
        copies |= {name: source.tokenizer / name for name in TOKENIZER if (source.tokenizer / name).is_file()}
    said = asdict(defaults.shape) | {"greedy_search": defaults.greedy_search}
    return Plan(weights, copies, texts | {SHAPE_FILE: said}, notes)


def to_trtllm(source: Source, wish: ConversionRequest) -> Plan:
    """A TensorRT-LLM ReDrafter checkpoint."""
    base, found = _needs_base(source, "trtllm"), source.drafter
    trtllm.check_drafter(found.config)
    base.check(found.config)
    config, defaults = found.config, wish.over(found)
    check_beams(config, defaults.shape.num_beams)
    if base.said is not None:
        tp, dtype, said = len(base.ranks), str(base.said.get("dtype")), base.said
        _must_be("--tp-size", wish.tp, tp, base)
        _must_be("--dtype", wish.dtype, dtype, base)
        ranks = [dict(rank) for rank in base.ranks]
    else:
        tp = wish.tp or 1
        dtype = wish.dtype or _name(_stored(base))
        if base.quantised:
            raise UnsupportedError(f"{base.place} is quantised; convert what it was made from, and quantise it there")
        trtllm_base.check_base(base.config, base.tensors, tp, base.place)
        said = trtllm_base.base_config(base.config, dtype, tp)
        ranks = [_cast(trtllm_base.base_part(base.tensors, base.config, rank, tp), dtype) for rank in range(tp)]
    trtllm.check_tp(tp, {"exit_dim": config.exit_dim, "hidden_size": config.hidden_size})
    own = _cast(found.tensors, dtype)
    files = {f"rank{r}.safetensors": rank | trtllm.drafter_part(own, config, r, tp) for r, rank in enumerate(ranks)}
    text = trtllm.their_drafter_config(config, defaults, said, base.place)
    notes = _recurrence(found)
    if wish.dtype is None and found.dtype != DTYPES.get(dtype):
        another = "" if base.said is not None else "; --dtype chooses another for both"
        notes += (f"the drafter goes from {_name(found.dtype)} to {dtype}, the base's{another}",)
    notes += _past_training(config, defaults.shape)
    if config.rnn and config.recurrence == "apple":
        notes += ("TensorRT-LLM's engine computes another recurrence than this drafter was trained with",)
    return Plan(files, {}, {"config.json": text}, notes)


TARGETS: dict[str, Callable[[Source, ConversionRequest], Plan]] = {
    "redrafter": merged,
    "trtllm": to_trtllm,
    "apple": to_apple,
    "drafter": drafter,
}


def possible(source: Source) -> dict[str, str]:
    """Of each format whether the source can be converted to it: `yes`, or why not."""
    found = {}
    for name, target in TARGETS.items():
        try:
            target(source, ConversionRequest())
            found[name] = "yes"
        except (UnsupportedError, ArgumentError, MismatchError) as error:
            found[name] = f"no: {error}"
    return found


def _needs_base(source: Source, to: str) -> Base:
    if source.base is None:
        raise ArgumentError(f"--to {to} needs a base: give --base-model-checkpoint-dir")
    return source.base


def _bound(config: DrafterConfig, base: Base | None) -> DrafterConfig:
    """A copy of a drafter's config, in which the base is recorded where none was."""
    config = deepcopy(config)
    if base is not None:
        base.check(config)
        if config.base_embedding_norms is None:
            tables = base.norms()
            named = [name for name in tables if "embed" in name] or list(tables)
            config.base_embedding_norms = tables[named[0]] if len(named) == 1 else None
        config.base_model = config.base_model or _name_of(base.place)
    return config


def _name_of(place: Path) -> str:
    """A directory's name; of a snapshot in the hub's cache, the hub id."""
    place = place.resolve()
    if place.parent.name == "snapshots" and (repository := place.parent.parent.name).startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return place.name


def _unchanged(found: Drafter, plan: Plan) -> bool:
    """Whether our own drafter is to be written as it is."""
    [tensors], config = plan.weights.values(), plan.texts["config.json"]
    same = all(tensor is found.tensors[name] for name, tensor in tensors.items())
    return same and config == _dict(found.config)


def _papers(found: Drafter) -> dict[str, Path]:
    """The card and the provenance of a drafter of ours."""
    if found.kind not in ("drafter", "merged checkpoint"):
        return {}
    return {name: found.place / name for name in ("README.md", "training.json") if (found.place / name).is_file()}


def _recurrence(found: Drafter) -> tuple[str, ...]:
    if not found.kind.startswith("TensorRT-LLM") or not found.config.rnn:
        return ()
    other = {"apple": "trtllm", "trtllm": "apple"}.get(found.config.recurrence, "apple")
    return (f"recurrence {found.config.recurrence}; --recurrence {other} reads it the other way",)


def _past_training(config: DrafterConfig, shape: TreeShape) -> tuple[str, ...]:
    told = draft_length_warning(config, shape.draft_len_per_beam)
    return () if told is None else (told,)


def _cast(tensors: Mapping[str, Stored], dtype: str | None) -> dict[str, Stored]:
    """Floating-point tensors in a number format; id maps stay."""
    if dtype is None:
        return dict(tensors)
    if dtype not in DTYPES:
        raise UnsupportedError(f"a drafter is float32, bfloat16 or float16, not {dtype}")
    return {name: cast(x, DTYPES[dtype]) if x.dtype.is_floating_point else x for name, x in tensors.items()}


def _must_be(flag: str, asked: object, own: object, base: Base) -> None:
    if asked is not None and asked != own:
        raise ArgumentError(f"{flag} {asked}: {base.place} was converted with {own}, and a pair has one")


def _stored(base: Base) -> torch.dtype:
    table = base.tensors.get("model.embed_tokens.weight") or next(iter(base.tensors.values()))
    return table.dtype


def _name(dtype: torch.dtype) -> str:
    return dtype_name(dtype)


def _dict(config: Any) -> dict[str, Any]:
    """A config as its file holds it."""
    found: dict[str, Any] = config.to_diff_dict() | {"model_type": config.model_type}
    found["dtype"] = _name(config.dtype) if isinstance(config.dtype, torch.dtype) else config.dtype
    return found
