"""Directories on disk: a base, a drafter, or the two merged.

A merged checkpoint is a Hugging Face model directory (weights, tokenizer, chat template) with two more entries:

    drafter/          what `RecurrentDrafter.save_pretrained` wrote
    redrafter.json    {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": null}; a person may edit it

The boxed pair is one, shipped inside the package.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import cached_file

from redrafter.checkpoints.keywords import check_none_left, check_reserved, unknown_keyword
from redrafter.drafting.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, cannot_load, check_place
from redrafter.target.adapters import base_of
from redrafter.target.target import Target
from redrafter.tree.token_tree import check_size

__all__ = [
    "DRAFTER_FOLDER",
    "SHAPE_FILE",
    "Defaults",
    "TreeShape",
    "bind",
    "boxed_pair",
    "check_beams",
    "check_fit",
    "check_match",
    "default_sampling",
    "embedding_norms",
    "file_beside",
    "holds_drafter",
    "load_drafter",
    "load_model",
    "load_tokenizer",
    "past_training",
]

LOAD_ARGUMENTS = ("dtype", "device", "trust_remote_code", "caller")  # of `load_model`, not transformers' own
NORM_ROWS = 8  # rows of the embedding table whose norms tell one base from another
NORM_TOLERANCE = 0.02  # relative: enough for half precision, far less than two bases differ


@dataclass(frozen=True)
class TreeShape:
    """How a drafter is searched. None: left to the drafter's config and the device."""

    num_beams: int | None = None
    draft_len_per_beam: int | None = None
    node_budget: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_size(field.name, value)

    def over(self, other: "TreeShape") -> "TreeShape":
        """This shape, with `other`'s values where it has none."""
        mine = {name: value for name, value in asdict(self).items() if value is not None}
        return TreeShape(**(asdict(other) | mine))


@dataclass(frozen=True)
class Defaults:
    """What `redrafter.json` of a merged checkpoint says, which may be edited by hand.

    shape: how the drafter is searched. greedy_search: whether `generate` writes greedily or samples where a call does
    not say; None: as the model's generation config does.
    """

    shape: TreeShape = TreeShape()
    greedy_search: bool | None = None

    @property
    def do_sample(self) -> bool | None:
        """Return whether `generate` samples where a call does not say; None: as the model's generation config does."""
        return None if self.greedy_search is None else not self.greedy_search

    def __post_init__(self) -> None:
        if not isinstance(self.greedy_search, bool | None):
            raise ArgumentError(f"greedy_search must be true, false or null, got {self.greedy_search!r}")

    @classmethod
    def read(cls, path: Path) -> "Defaults":
        """From a file. Raises `CheckpointError` naming it."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            known = [*(field.name for field in fields(TreeShape)), "greedy_search"]
            if not isinstance(said, dict) or set(said) - set(known):
                raise CheckpointError(f"{path} is not a JSON object of {', '.join(known)}")
            greedy = said.pop("greedy_search", None)
            return cls(TreeShape(**said), greedy)
        except ArgumentError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def boxed_pair() -> Path:
    """Directory of the small base and its drafter that ship in the package: a merged checkpoint."""
    return Path(str(resources.files("redrafter"))) / "boxed"


def load_model(
    name: str | Path | PreTrainedModel,
    *,
    dtype: Any,
    device: Any,
    trust_remote_code: bool,
    caller: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A causal LM from a hub id or a directory; a loaded one is taken as it is, and moved when a device is given.

    kwargs go to `AutoModelForCausalLM.from_pretrained`, or to `AutoModelForImageTextToText.from_pretrained` for models
    that see images, which are then used for text. caller: whose keywords an unknown one may be meant for. Raises
    `CheckpointError` when it cannot be loaded whole, and `ArgumentError` for kwargs that transformers does not take.
    """
    if not isinstance(name, str | Path):
        check_none_left(kwargs)
        return base_of(name) if device is None else _to(base_of(name), device)
    check_place(str(name))
    check_reserved(kwargs, caller)
    try:
        loaded: Any = _auto_class(name, trust_remote_code, kwargs).from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **kwargs
        )
    except Exception as error:
        raise unknown_keyword(error, kwargs, caller) or cannot_load("model", name, error) from error
    model, info = loaded
    if info["missing_keys"]:
        raise CheckpointError(f"{name} is not whole: missing {', '.join(sorted(info['missing_keys'])[:5])}")
    return model if device is None else _to(model, device)


def _auto_class(name: str | Path, trust_remote_code: bool, kwargs: dict[str, Any]) -> Any:
    """Return the class of transformers that opens a model: that of causal LMs, unless it knows it only among those
    that see images."""
    if "config" in kwargs:
        return AutoModelForCausalLM
    where = {key: kwargs[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in kwargs}
    try:
        said, _ = PretrainedConfig.get_config_dict(str(name), **where)
    except OSError:
        return AutoModelForCausalLM  # which finds the base of an adapter, or says what is missing
    kind, remote = said.get("model_type"), trust_remote_code and "AutoModelForCausalLM" in said.get("auto_map", {})
    if remote or kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def bind(name: str | Path | PreTrainedModel | Target, **load: Any) -> Target:
    """The same, bound; what is bound already is taken as it is. load: for `load_model`."""
    name = base_of(name)
    if not isinstance(name, str | Path | PreTrainedModel | Target):
        raise ArgumentError(f"a model is a hub id, a directory or a loaded model, got {type(name).__name__}")
    if isinstance(name, Target):
        check_none_left({key: value for key, value in load.items() if key not in LOAD_ARGUMENTS})
        return name
    return Target(load_model(name, **load))


def holds_drafter(name: str) -> bool:
    """Whether a directory or hub id is a merged checkpoint."""
    return _defaults_file(name) is not None


def _defaults_file(name: str, revision: str | None = None) -> Path | None:
    """Return where a merged checkpoint's `redrafter.json` is; None where a directory or hub id has none."""
    file = cached_file(name, SHAPE_FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def file_beside(model: str, name: str) -> str | None:
    """Return a file of a model's directory or repository, None where it has none or cannot be asked."""
    try:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None  # loading the model says what is wrong


def _to(model: Any, device: Any) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"device={str(device)!r} cannot be used: {first_line(error)}") from error


def default_sampling(name: str) -> bool | None:
    """Return whether a merged checkpoint says to sample where a call does not; None where it does not say."""
    file = _defaults_file(name)
    return None if file is None else Defaults.read(file).do_sample


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, padding on the left as decoder-only generation needs."""
    check_place(str(name))
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise cannot_load("tokenizer", name, error) from error


def load_drafter(
    model: str | Path | PreTrainedModel,
    drafter: str | Path | RecurrentDrafter | None,
    target: Target,
    revision: str | None = None,
) -> tuple[RecurrentDrafter, Defaults]:
    """The drafter for a target, on its device and in its dtype, and what a merged checkpoint asks for.

    Without `drafter`, `model` must name a merged checkpoint, which is then read at `revision`.
    """
    defaults = Defaults()
    if drafter is None:
        if not isinstance(model, str | Path):
            raise ArgumentError("a loaded model comes without a drafter: pass drafter=")
        file = _defaults_file(str(model), revision)
        if file is None:
            raise CheckpointError(
                f"{model} has no {SHAPE_FILE}, so it holds no drafter: give one (--drafter D), draft with a smaller "
                "model (--draft-model D) or with the text itself (--prompt-lookup), or write plainly (--no-speculate)"
            )
        defaults = Defaults.read(file)
        drafter = RecurrentDrafter.from_pretrained(model, subfolder=DRAFTER_FOLDER, revision=revision)
    elif isinstance(drafter, str | Path):
        drafter = RecurrentDrafter.from_pretrained(drafter)
    assert isinstance(drafter, RecurrentDrafter)
    check_fit(drafter, target)
    module: Any = drafter
    return module.to(target.device, target.dtype).eval(), defaults


def embedding_norms(embedding: torch.nn.Embedding) -> list[float]:
    """Norms of a few evenly spaced rows of an embedding table: a base's fingerprint that survives a change of dtype."""
    weight = embedding.weight
    rows = torch.linspace(0, len(weight) - 1, NORM_ROWS, device=weight.device).long()
    return weight[rows].float().norm(dim=-1).tolist()


def check_fit(drafter: RecurrentDrafter, target: Target) -> None:
    """Raise `MismatchError`, with both values, when the drafter was made for another target."""
    name = f"{target.model.config._name_or_path or 'the target'} ({target.name})"
    width = target.embedding.weight.shape[-1]
    if width != target.hidden_size:
        raise UnsupportedError(
            f"{name} has embeddings of {width} and a head that reads {target.hidden_size}; a drafter needs one size of "
            "both, so use DraftTarget or PromptLookup"
        )
    check_match(drafter.config, target.hidden_size, target.vocab_size, [embedding_norms(target.embedding)], name)


def check_match(drafter: DrafterConfig, hidden: int, vocabulary: int, norms: list[list[float]], name: str) -> None:
    """The same of what is known of a base: its sizes, and the row norms of tables that may be its embedding."""
    made_for = f"its base is {drafter.base_model or 'not recorded'}"
    for what, mine, theirs in (
        ("hidden size", drafter.hidden_size, hidden),
        ("vocabulary", drafter.vocab_size, vocabulary),
    ):
        if mine != theirs:
            raise MismatchError(f"the drafter was made for a {what} of {mine}, but {name} has {theirs}; {made_for}")
    own = drafter.base_embedding_norms
    if own is None or not norms:
        return
    if not any(torch.allclose(torch.tensor(each), torch.tensor(own), rtol=NORM_TOLERANCE) for each in norms):
        raise MismatchError(
            f"the drafter was made for another base than {name}: the embedding's row norms are "
            f"{_short(norms[0])} instead of {_short(own)}; {made_for}"
        )


def check_beams(config: DrafterConfig, beams: int | None) -> None:
    """Raise `ArgumentError` when there are more beams than tokens to begin them with."""
    vocabulary = config.draft_vocab_size or config.vocab_size
    if beams is not None and beams > vocabulary:
        raise ArgumentError(f"num_beams={beams} is more than the drafter's vocabulary of {vocabulary} ids")


def past_training(config: DrafterConfig, depth: int | None) -> str | None:
    """Return what to say of drafts that are longer than those the drafter was trained for; None where they are not."""
    if depth is None or config.trained_draft_len is None or depth <= config.trained_draft_len:
        return None
    return (
        f"draft_len_per_beam={depth} is more than the {config.trained_draft_len} steps that the drafter was trained "
        "for; the further ones will seldom be accepted"
    )


def _short(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values[:3]) + ", ...]"
