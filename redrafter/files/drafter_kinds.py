"""The kinds of drafters, found by their registrations. This module imports no torch, nor do its functions.

A module that defines a drafter imports torch, which takes longer than describing a checkpoint. So the arguments of
`@register_drafter` are read from the module's source, and the module is imported only when a drafter is made.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from redrafter.errors import ArgumentError, CheckpointError, first_line

BUILT_IN = "redrafter.drafting"  # the package whose modules are searched
GROUP = "redrafter.drafters"  # entry points of other packages; the value of each is a module
_DECORATOR = "register_drafter"


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
        """Import and return the class of the model. Raises `CheckpointError` where its module cannot be imported."""
        try:
            return getattr(import_module(self.module), self.class_name)
        except ImportError as error:
            raise CheckpointError(
                f"{self.module}, which defines drafters of the kind {self.name}, cannot be imported: "
                f"{first_line(error)}"
            ) from error


_defined: dict[str, DrafterKind] = {}  # kinds of imported modules, with or without an entry point


def define_kind(kind: DrafterKind) -> None:
    """Add a kind whose class was defined, or replace an earlier definition of the same class."""
    _defined.update(dict.fromkeys(kind.model_types, kind))


def drafter_kinds() -> dict[str, DrafterKind]:
    """Return the kinds of drafters by `model_type`: this package's, entry points', and kinds defined so far.

    Raises:
        ArgumentError: An entry point names no module that registers a drafter, a registration cannot be read, or two
            modules register one type.
    """
    # Declared ones last: they win over a definition made in a test or a notebook.
    return {**_defined, **declared_kinds()}


@cache
def declared_kinds() -> dict[str, DrafterKind]:
    """Return the kinds by `model_type` that this package and entry points declare; raises as `drafter_kinds` does."""
    built_in = find_spec(BUILT_IN)
    assert built_in is not None
    folders = built_in.submodule_search_locations or ()
    kinds = [kind for found in iter_modules(folders) for kind in _read_registrations(f"{BUILT_IN}.{found.name}")]
    for entry_point in entry_points(group=GROUP):
        registered = list(_read_registrations(entry_point.module))
        if not registered:
            raise ArgumentError(
                f"the entry point {entry_point.name} = {entry_point.value} of {GROUP} names no module with a class "
                "under @register_drafter: correct or uninstall its package"
            )
        kinds += registered
    by_type: dict[str, DrafterKind] = {}
    for kind in kinds:
        for model_type in kind.model_types:
            if (other := by_type.setdefault(model_type, kind)) != kind:
                raise ArgumentError(
                    f"{other.module} and {kind.module} both register drafters of the type {model_type}: uninstall one"
                )
    return by_type


def _read_registrations(module: str) -> Iterator[DrafterKind]:
    """Yield the kinds that a module's source registers; none where the module does not exist."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of its package
        return
    if spec is None or spec.origin is None:
        return
    source = Path(spec.origin).read_bytes()
    if _DECORATOR.encode() not in source:  # a quick test, as parsing takes longer than reading
        return
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(
            f"{spec.origin}, which names {_DECORATOR}, cannot be parsed: {error}; correct or uninstall its package"
        ) from error
    for definition in statements:
        if not isinstance(definition, ast.ClassDef):
            continue
        for decorator in definition.decorator_list:
            # By the last part of the name, so that any way to import the decorator is found.
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == _DECORATOR:
                yield DrafterKind(*_read_arguments(decorator, spec.origin), module, definition.name)


def _read_arguments(registration: ast.Call, path: str) -> tuple[str, tuple[str, ...]]:
    """Return the name and the types in the arguments of a registration in the file `path`."""
    constants = [argument.value for argument in registration.args if isinstance(argument, ast.Constant)]
    strings = [value for value in constants if isinstance(value, str)]
    if not strings or len(strings) < len(registration.args) or registration.keywords:
        raise ArgumentError(
            f"{path} has @{ast.unparse(registration)}, whose arguments must be string literals, as they are read "
            "without importing the module"
        )
    name, *model_types = strings
    return name, tuple(model_types)
