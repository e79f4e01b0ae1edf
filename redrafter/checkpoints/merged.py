"""Merged checkpoints: a base and its drafter in one directory.

A merged checkpoint is a Hugging Face model directory (weights, tokenizer, chat template) with two more entries:

    drafter/          what `RecurrentDrafter.save_pretrained` wrote
    redrafter.json    {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": null}; may be edited by hand

The boxed pair, which ships inside the package, is a merged checkpoint.
"""

from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path

from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import SHAPE_FILE, read_json
from redrafter.files.gguf_file import SUFFIX
from redrafter.tree.sizes import TreeShape


@dataclass(frozen=True)
class Defaults:
    """Content of a merged checkpoint's `redrafter.json`.

    Attributes:
        shape: Shape of the draft tree.
        greedy_search: Whether `generate` decodes greedily where a call does not say, else it samples. None: as the
            model's generation config says.
    """

    shape: TreeShape = field(default_factory=TreeShape)
    greedy_search: bool | None = None

    @property
    def do_sample(self) -> bool | None:
        """Return whether `generate` samples where a call does not say; None: as the model's generation config says."""
        return None if self.greedy_search is None else not self.greedy_search

    def __post_init__(self) -> None:
        if not isinstance(self.greedy_search, bool | None):
            raise ArgumentError(f"greedy_search must be true, false or null, got {self.greedy_search!r}")

    @classmethod
    def from_file(cls, path: Path) -> "Defaults":
        """Read a `redrafter.json`."""
        content, keys = read_json(path), [*(item.name for item in fields(TreeShape)), "greedy_search"]
        if set(content) - set(keys):
            raise CheckpointError(f"{path} is not a JSON object of {', '.join(keys)}")
        greedy_search = content.pop("greedy_search", None)
        try:
            return cls(TreeShape(**content), greedy_search)
        except ArgumentError as error:
            raise CheckpointError(f"{path}: {error}") from error


def boxed_pair() -> Path:
    """Return the directory of the small base and its drafter that ship in the package, a merged checkpoint."""
    return Path(str(resources.files("redrafter"))) / "boxed"


def default_sampling(name: str) -> bool | None:
    """Return whether `generate` samples by default, as the `redrafter.json` of a directory or hub id says.

    None where there is no such file, or it does not say.
    """
    file = find_file(name, SHAPE_FILE)
    return None if file is None else Defaults.from_file(file).do_sample


def find_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Return the path of a file in a directory or repository, downloaded if need be; None without one.

    A GGUF file has no others. Raises `OSError` if the hub cannot be asked.
    """
    if Path(name).suffix == SUFFIX:
        return None
    from transformers.utils.hub import cached_file  # which most of this module's readers need not wait for

    found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
