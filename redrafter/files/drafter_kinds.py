"""The kinds of drafters, by the `model_type` of their checkpoints. This module imports no torch, nor do its functions.

A module that defines a drafter imports torch, which takes longer than describing a checkpoint. So it is imported only
when a drafter is made.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from redrafter.errors import ArgumentError, CheckpointError, first_line

GROUP = "redrafter.drafters"  # entry points of other packages: a `model_type`, and `module:Class`


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
        name: Its name in messages.
        model_types: `model_type` in the `config.json` of its checkpoints.
        module: The module that defines its model.
        class_name: The class of the model there.
    """

    name: str
    model_types: tuple[str, ...]
    module: str
    class_name: str

    def load(self) -> Any:
        """Import and return the class of the model. Raises `CheckpointError` where its module does not have it."""
        try:
            return getattr(import_module(self.module), self.class_name)
        except (ImportError, AttributeError) as error:
            raise CheckpointError(
                f"{self.module}, which defines drafters of the kind {self.name}, cannot be imported: "
                f"{first_line(error)}"
            ) from error


_ASSISTANTS = "gemma4_assistant", "gemma4_unified_assistant"
_BUILT_IN = (
    DrafterKind("recurrent drafter", ("redrafter",), "redrafter.drafting.drafter", "RecurrentDrafter"),
    DrafterKind("EAGLE-3 head", ("redrafter_eagle3",), "redrafter.drafting.eagle", "EagleDrafter"),
    DrafterKind("DFlash drafter", ("redrafter_dflash",), "redrafter.drafting.dflash", "DFlashDrafter"),
    DrafterKind("table of recycled tokens", ("redrafter_recycled",), "redrafter.drafting.recycled", "RecycledTokens"),
    DrafterKind("MTP layer", ("redrafter_mtp",), "redrafter.drafting.mtp", "MTPDrafter"),
    DrafterKind("assistant", _ASSISTANTS, "redrafter.drafting.assistant", "AssistantDrafter"),
)
_defined: dict[str, DrafterKind] = {}  # kinds that the program defines, without an entry point


def define_kind(kind: DrafterKind) -> None:
    """Add a kind whose class was defined, or replace an earlier definition of the same class."""
    _defined.update(dict.fromkeys(kind.model_types, kind))


def drafter_kinds() -> dict[str, DrafterKind]:
    """Return the kinds of drafters by `model_type`: this package's, entry points', and kinds defined so far.

    Raises:
        ArgumentError: An entry point names no class, or a type that is taken.
    """
    # Declared ones last: they win over a definition made in a test or a notebook.
    return {**_defined, **declared_kinds()}


@cache
def declared_kinds() -> dict[str, DrafterKind]:
    """Return the kinds by `model_type` that this package and entry points declare; raises as `drafter_kinds` does."""
    by_type = {model_type: kind for kind in _BUILT_IN for model_type in kind.model_types}
    for declared in entry_points(group=GROUP):
        kind = DrafterKind(declared.name, (declared.name,), declared.module, declared.attr)
        where = f"the entry point {declared.name} = {declared.value} of {GROUP}"
        if not declared.attr:
            raise ArgumentError(f"{where} must name a module and a class, as module:Class: correct its package")
        if by_type.setdefault(declared.name, kind) != kind:
            raise ArgumentError(f"{where} names a type that another drafter has: uninstall one of the two packages")
    return by_type
