"""Find the base of a drafter that a command is given as its model. Nothing here imports torch."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter.app.program import print_message
from redrafter.errors import CheckpointError
from redrafter.files.checkpoint_kind import check_source, kind_of, read_json
from redrafter.files.hub import CARD_FILE, find_model_file, read_card
from redrafter.parallel.launched import process_rank

_DRAFTERS = ("drafter", "EAGLE-3 head", "DFlash drafter", "speculators checkpoint")  # kinds that draft as they are
_METHODS = ("drafter", "draft_model", "prompt_lookup")  # options that choose another drafter


def use_base_of_drafter(args: argparse.Namespace) -> None:
    """Replace a `model` that is a drafter by its base, and make it the `drafter`; a note on stderr names both.

    Other models, and a drafter with an option that chooses another drafter, are left as they are.

    Raises:
        CheckpointError: The drafter does not name its base, or it names one that cannot be found.
    """
    values = vars(args)
    model = values.get("model")
    if not model or values.get("url") or any(values.get(name) for name in _METHODS):
        return
    check_source(model)
    config = find_model_file(model, "config.json")
    if config is None or (kind := kind_of(Path(config).parent)) not in _DRAFTERS:
        return
    named, file = _find_name(model, read_json(Path(config)))
    hint = f"give the model that it drafts for as the model, and this as its drafter: --drafter {model}"
    if named is None:
        message = f"{model} is a drafter, not a model, and names no base in config.json or {CARD_FILE}: {hint}"
        raise CheckpointError(message)
    # A training records the last part of its base's path, and the drafter is often saved next to the base.
    nearby = Path(model).resolve().parent / named
    base = str(nearby) if Path(model).is_dir() and not Path(named).is_dir() and nearby.is_dir() else named
    try:
        check_source(base)
        found = Path(base).is_dir() or find_model_file(base, "config.json") is not None
    except CheckpointError:
        found = False
    if not found:
        raise CheckpointError(
            f"{model} is a drafter, not a model, and the base that its {file} names, {named}, is neither a directory "
            f"here nor a repository that can be downloaded: {hint}"
        )
    if process_rank() == 0:
        what = "a drafter" if kind == "drafter" else f"a drafter ({kind})"
        print_message("note", f"{model} is {what} for {base}, as its {file} says: {base} is the model")
    args.model, args.drafter = base, model


def _find_name(model: str, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the base that a drafter's config or else its model card names, and the file that does."""
    verifier: Any = config.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, Mapping) else None
    for name in (config.get("base_model"), verifier):
        if isinstance(name, str) and name:
            return name, "config.json"
    named = read_card(model).get("base_model")
    names = named if isinstance(named, list) else [named]
    return names[0] if len(names) == 1 and isinstance(names[0], str) else None, CARD_FILE
