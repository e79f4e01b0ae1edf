"""Merged checkpoints: a base and its drafter in one directory.

A merged checkpoint is a Hugging Face model directory (weights, tokenizer, chat template) with two more entries:

    drafter/          what `RecurrentDrafter.save_pretrained` wrote
    redrafter.json    {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": null}; a person may edit it

The boxed pair is one, shipped inside the package.
"""

import json
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path

from transformers.utils import cached_file

from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import SHAPE_FILE

__all__ = ["Defaults", "boxed_pair", "default_sampling", "defaults_file", "holds_drafter"]


@dataclass(frozen=True)
class Defaults:
    """What `redrafter.json` of a merged checkpoint says, which may be edited by hand.

    shape: how the drafter is searched. greedy_search: whether `generate` writes greedily or samples where a call does
    not say; None: as the model's generation config does.
    """

    shape: TreeShape = field(default_factory=TreeShape)
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
            known = [*(item.name for item in fields(TreeShape)), "greedy_search"]
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


def holds_drafter(name: str) -> bool:
    """Whether a directory or hub id is a merged checkpoint."""
    return defaults_file(name) is not None


def default_sampling(name: str) -> bool | None:
    """Return whether a merged checkpoint says to sample where a call does not; None where it does not say."""
    file = defaults_file(name)
    return None if file is None else Defaults.read(file).do_sample


def defaults_file(name: str, revision: str | None = None) -> Path | None:
    """Return where a merged checkpoint's `redrafter.json` is; None where a directory or hub id has none."""
    file = cached_file(name, SHAPE_FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)
