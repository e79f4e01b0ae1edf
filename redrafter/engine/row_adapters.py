"""The adapter of each output row, from what a call gives."""

from collections.abc import Sequence
from typing import TypeAlias

from redrafter.errors import ArgumentError

__all__ = ["AdapterNames", "row_adapters"]

AdapterNames: TypeAlias = str | Sequence[str | None] | None


def row_adapters(adapter: AdapterNames, prompts: int, rows: int) -> list[str | None]:
    """Return the name of each output row's adapter, None for the model alone.

    Args:
        adapter: One name for all prompts, or a name or None for each; None for none.
        prompts: Number of prompts.
        rows: Number of output rows, as many of each prompt.

    Raises:
        ArgumentError: It is neither, or there are more or fewer names than prompts.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * rows
    if not isinstance(adapter, list | tuple) or not all(isinstance(name, str | None) for name in adapter):
        raise ArgumentError(f"adapter must be a name, or a list of a name or None for each prompt, got {adapter!r}")
    if len(adapter) != prompts:
        raise ArgumentError(f"adapter has {len(adapter)} entries for {prompts} prompts; give one name or one for each")
    return [name for name in adapter for _ in range(rows // prompts)]
