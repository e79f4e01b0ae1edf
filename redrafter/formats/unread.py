"""Drafters of others that are recognised and cannot be computed here, and what to use instead."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from redrafter.errors import UnsupportedError
from redrafter.files.checkpoint_kind import SPECULATORS_KEY

READ_SPECULATORS = ("eagle3", "dflash", "dflash2", "dspark")  # types of vllm-project/speculators 0.9
_HEAD = "train a head with `redrafter train --form eagle3`, or use an EAGLE-3 head of the same base"
_BLOCK = "use a DFlash, DFlash2 or DSpark drafter of the same base"


# The kinds that are refused, by their names, which configs have in lower case without hyphens: a pattern of tensors
# that only this kind has, and what the user can do.
UNREAD = {
    # Several decoder layers over all committed tokens, and one pass over masks with a learnt hidden state.
    "P-EAGLE": (r"mask_hidden", _HEAD),
    # A transformer that scores each candidate of a block's position with those of the next.
    "LiLiCorr": (r"(.*\.)?(lilicorr|correlator|factor_input_proj)\..*", _BLOCK),
    # A GRU over the embeddings of drafted tokens, which corrects the logits of a block.
    "Domino": (r"(.*\.)?(prefix_gru|embed_proj)\..*", _BLOCK),
    # A refiner that reads the whole block and is applied several times to all of its positions.
    "XPress": (r"refiner_head\..*", _BLOCK),
    # An MTP layer apart from its base's checkpoint.
    "MTP": (
        r"mtp_layers\..*",
        "merge it with `speculators stitch-mtp DRAFTER BASE`, and give what this writes as the model",
    ),
}


def refuse_unread(config: Mapping[str, Any], tensors: Collection[str], directory: Path) -> None:
    """Raise `UnsupportedError` if a drafter is of a kind in `UNREAD`, by the names in its config or its tensors."""
    settings, kind = config.get("dflash_config"), config.get(SPECULATORS_KEY)
    projectors = [part.get("projector_type") for part in (config, settings) if isinstance(part, Mapping)]
    fields = (kind, config.get("model_type"), *projectors, *(config.get("architectures") or ()))
    named = " ".join(map(str, fields)).lower()
    for name, (pattern, instead) in UNREAD.items():
        if name.lower().replace("-", "") in named or any(map(re.compile(pattern).fullmatch, tensors)):
            raise UnsupportedError(f"{directory} is a drafter of the kind {name}, which is not read: {instead}")
    if kind is not None and kind not in READ_SPECULATORS:
        raise UnsupportedError(
            f"{directory} is a speculator of the type {kind}; of speculators' types, {', '.join(READ_SPECULATORS)} are "
            "read"
        )
