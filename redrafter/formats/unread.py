"""Drafters of others that are recognised and cannot be computed here, each with the reason and what to use instead."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.errors import UnsupportedError
from redrafter.files.checkpoint_kind import SPECULATORS_KEY

READ_SPECULATORS = ("eagle3", "dflash", "dflash2", "dspark")  # types of vllm-project/speculators 0.9
_HEAD = "train a head with `redrafter train --form eagle3`, or use an EAGLE-3 head of the same base"
_BLOCK = "use a DFlash, DFlash2 or DSpark drafter of the same base"


@dataclass(frozen=True)
class UnreadKind:
    """A kind of drafter that is refused.

    Attributes:
        name: What its authors call it.
        word: Part of its names in configs, in lower case.
        tensors: Pattern of the tensors that only this kind has.
        needs: What its drafts need and this library does not compute.
        instead: What the user can do.
    """

    name: str
    word: str
    tensors: str
    needs: str
    instead: str


UNREAD = (
    UnreadKind(
        "P-EAGLE",
        "peagle",
        r"mask_hidden",
        "several decoder layers over all committed tokens, and one pass over masks with a learnt hidden state "
        "(mask_hidden), where EAGLE-3 heads here have one layer and draft token by token",
        _HEAD,
    ),
    UnreadKind(
        "LiLiCorr",
        "lilicorr",
        r"(.*\.)?(lilicorr|correlator|factor_input_proj)\..*",
        "a transformer that scores each candidate of a block's position against those of the next",
        _BLOCK,
    ),
    UnreadKind(
        "Domino",
        "domino",
        r"(.*\.)?(prefix_gru|embed_proj)\..*",
        "a GRU over the embeddings of drafted tokens (prefix_gru), which corrects the logits of a block",
        _BLOCK,
    ),
    UnreadKind(
        "XPress",
        "xpress",
        r"refiner_head\..*",
        "a refiner that reads the whole block and is applied several times to all of its positions",
        _BLOCK,
    ),
    UnreadKind(
        "MTP",
        "mtp",
        r"mtp_layers\..*",
        "an MTP layer within its base's checkpoint, where this one is apart",
        "merge it with `speculators stitch-mtp DRAFTER BASE`, and give what this writes as the model",
    ),
)


def refuse_unread(config: Mapping[str, Any], tensors: Collection[str], directory: Path) -> None:
    """Raise `UnsupportedError` if a drafter is of a kind in `UNREAD`, by the names in its config or its tensors."""
    settings, kind = config.get("dflash_config"), config.get(SPECULATORS_KEY)
    projectors = [part.get("projector_type") for part in (config, settings) if isinstance(part, Mapping)]
    named = [
        str(name).lower()
        for name in (kind, config.get("model_type"), *projectors, *(config.get("architectures") or ()))
    ]
    for unread in UNREAD:
        if any(unread.word in name for name in named) or any(map(re.compile(unread.tensors).fullmatch, tensors)):
            raise UnsupportedError(
                f"{directory} is a drafter of the kind {unread.name}, which is not read: it needs {unread.needs}; "
                f"{unread.instead}"
            )
    if kind is not None and kind not in READ_SPECULATORS:
        raise UnsupportedError(
            f"{directory} is a speculator of the type {kind}; of speculators' types, {', '.join(READ_SPECULATORS)} are "
            "read"
        )
