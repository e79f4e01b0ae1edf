"""The adapters that `--lora-modules` names, in vLLM's two forms."""

import json
from collections.abc import Sequence

from redrafter.errors import ArgumentError

__all__ = ["parse_lora_modules"]


def parse_lora_modules(words: Sequence[str]) -> dict[str, str]:
    """Return the directory of each adapter by name.

    Args:
        words: `name=path`, or `{"name": "...", "path": "..."}` as JSON.

    Raises:
        ArgumentError: A word is neither, or a name stands twice.
    """
    modules: dict[str, str] = {}
    for word in words:
        name, path = _parse(word)
        if name in modules:
            raise ArgumentError(f"--lora-modules names {name!r} twice: give each adapter a name of its own")
        modules[name] = path
    return modules


def _parse(word: str) -> tuple[str, str]:
    if word.lstrip().startswith("{"):
        try:
            module = json.loads(word)
        except ValueError:
            module = {}
        name, path = module.get("name"), module.get("path")
        unknown = set(module) - {"name", "path", "base_model_name"}
    else:
        name, _, path = word.partition("=")
        unknown = set()
    if not (isinstance(name, str) and isinstance(path, str) and name and path) or unknown:
        raise ArgumentError(f'--lora-modules are name=path or {{"name": "...", "path": "..."}}, got {word!r}')
    return name, path
