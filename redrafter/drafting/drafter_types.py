"""The types of drafters, by the `model_type` of their configs."""

import os
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PretrainedConfig

from redrafter.drafting.assistant import AssistantConfig, AssistantDrafter
from redrafter.drafting.dflash import DFlashDrafter
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DrafterConfig, EagleConfig, MTPConfig
from redrafter.drafting.eagle import EagleDrafter
from redrafter.drafting.mtp import MTPDrafter
from redrafter.files.checkpoint_kind import ASSISTANT_MODEL_TYPES, check_drafter

Drafter: TypeAlias = RecurrentDrafter | EagleDrafter | MTPDrafter | DFlashDrafter | AssistantDrafter
"""A drafter of any type."""

DrafterArchitecture: TypeAlias = DrafterConfig | EagleConfig | MTPConfig | DFlashConfig | AssistantConfig
"""The config of a drafter of any type."""

# Those with checkpoints of their own.
_KINDS: tuple[type[Drafter], ...] = (RecurrentDrafter, EagleDrafter, DFlashDrafter)
DRAFTER_CLASSES = {kind.config_class.model_type: kind for kind in _KINDS}
# Those that transformers makes and saves.
_ASSISTANTS = dict.fromkeys(ASSISTANT_MODEL_TYPES, AssistantDrafter)


def make_drafter(config: DrafterArchitecture) -> Drafter:
    """Make a drafter with random weights, of the type that its config is of."""
    kind: Any = DRAFTER_CLASSES[config.model_type]
    drafter: Drafter = kind(config)
    return drafter


def open_drafter_model(name: str | Path, **hub_options: Any) -> Drafter:
    """Load a drafter of the type that its config names.

    Args:
        name: A directory or the name of a repository on the Hugging Face hub.
        hub_options: `subfolder` and `revision`, as in `PreTrainedModel.from_pretrained`.

    Raises:
        CheckpointError: Files are missing or truncated, or hold no drafter of this project.
    """
    check_drafter(Path(name) / hub_options.get("subfolder", "") if os.path.isdir(name) else name)
    try:
        config, _ = PretrainedConfig.get_config_dict(str(name), **hub_options)
    except OSError:
        config = {}  # loading says what is wrong
    kind: Any = (DRAFTER_CLASSES | _ASSISTANTS).get(config.get("model_type", ""), RecurrentDrafter)
    drafter: Drafter = kind.from_pretrained(name, **hub_options)
    return drafter
