"""The Hugging Face hub: whether it is reachable, and single files of a repository, without torch."""

from pathlib import Path
from typing import Any

from redrafter.errors import CheckpointError, first_line, warn
from redrafter.files.regular_file import read_regular

CARD_FILE = "README.md"  # the model card of a repository
MAX_CARD_BYTES = 1 << 20  # of a card whose header is read
CONNECT_SECONDS = 5.0  # timeout of the hub's answer
_reached: set[str] = set()  # addresses that have answered this process


def check_hub(name: str) -> None:
    """Check that a hub id can be looked up.

    If the hub cannot be reached, huggingface_hub retries for each missing file six times, 24 s in all. Here it is tried
    once; without an answer, this process continues offline with a repository that was downloaded before.

    Raises:
        CheckpointError: The hub cannot be reached, and the repository was not downloaded before.
    """
    from huggingface_hub import constants, get_session, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if is_offline() or constants.ENDPOINT in _reached:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
        _reached.add(constants.ENDPOINT)
        return
    except Exception as error:  # of any HTTP library that huggingface_hub uses
        reason = first_line(error)
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        cached = False
    if not cached:
        raise CheckpointError(
            f"{name} does not exist here, and {constants.ENDPOINT} cannot be reached to look for it as a hub id "
            f"({reason}): give the directory of a model, or HF_HOME with a downloaded one, and HF_HUB_OFFLINE=1"
        )
    warn(
        f"{constants.ENDPOINT} cannot be reached ({reason}): what was downloaded of {name} is used, as with "
        "HF_HUB_OFFLINE=1"
    )
    constants.HF_HUB_OFFLINE = True


def is_offline() -> bool:
    """Return whether downloads are disabled by HF_HUB_OFFLINE."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def find_model_file(model: str, name: str) -> str | None:
    """Return the path of a file in a model's directory or repository, downloaded if necessary.

    Returns None if there is no such file, or the hub cannot be reached.
    """
    if Path(model).is_dir():
        file = Path(model, name)
        return str(file) if file.is_file() else None
    if Path(model).is_file():  # a GGUF file, which is no repository
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return hf_hub_download(model, name)
    except (OSError, ValueError, EntryNotFoundError, HfHubHTTPError):
        return None  # loading the model raises the precise error


def find_snapshot(model: str) -> Path | None:
    """Return the directory of a model: its own, or that of the latest snapshot downloaded; None if there is none."""
    if Path(model).exists():
        return Path(model) if Path(model).is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def read_card(model: str) -> dict[str, Any]:
    """Return the header of the model card of a directory or repository; an empty one where there is none to read.

    The header of a card of more than `MAX_CARD_BYTES` counts as none: YAML takes many seconds for one of that size.
    """
    if (card := find_model_file(model, CARD_FILE)) is None:
        return {}
    from huggingface_hub import ModelCard

    try:
        content = read_regular(Path(card))
        if len(content) > MAX_CARD_BYTES:
            return {}
        return ModelCard(content.decode("utf-8"), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # of YAML's own types, or no UTF-8
        return {}
