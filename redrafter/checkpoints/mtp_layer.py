"""The tensors of an MTP layer in a checkpoint, found by their names. This module imports no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

OWN = ("projection", "embedding_norm", "hidden_norm", "norm")  # the drafter's names of tensors outside of its blocks


@dataclass(frozen=True)
class Family:
    """Names that a family of models has for the tensors of an MTP layer, and the formula that goes with them.

    Attributes:
        marker: A regular expression of the name of a tensor that no other family has. What its group `at` matches is
            what all names begin with; those below follow it.
        own: The product that joins embedding and hidden state, the norms of both, and the norm of the layer's output,
            where there is one: the tensors of `OWN`, in this order.
        blocks: Prefix of the names of tensors of each of its decoder layers.
        renamed: Parts of names in these, and transformers' names of each.
        unread: Tensors that are the target's own embedding table and head once more.
        config: Fields of `MTPConfig` that differ from their defaults.
    """

    marker: str
    own: tuple[str, ...]
    blocks: tuple[str, ...] = (".",)
    renamed: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = (".embed_tokens.weight", ".shared_head.head.weight")
    config: Mapping[str, object] = field(default_factory=dict)


# Qwen3-Next and Qwen3.5, dense and with experts; Nemotron-H; Ling 2.5 and later; DeepSeek-V3, Kimi K2 and GLM-4.5;
# MiMo; ERNIE 4.5. The first one whose tensor exists is taken.
FAMILIES = {
    "Qwen": Family(
        r"(?P<at>(?:.*\.)?mtp)\.fc\.weight",
        (".fc", ".pre_fc_norm_embedding", ".pre_fc_norm_hidden", ".norm"),
        blocks=(".layers.0.",),
    ),
    "Nemotron": Family(
        r"(?P<at>(?:.*\.)?mtp)\.layers\.0\.eh_proj\.weight",
        (".layers.0.eh_proj", ".layers.0.enorm", ".layers.0.hnorm", ".layers.1.final_layernorm"),
        blocks=(".layers.0.", ".layers.1."),
    ),
    "Bailing": Family(
        r"(?P<at>(?:.*\.)?layers\.\d+)\.final_layernorm\.weight",
        (".eh_proj", ".enorm", ".hnorm", ".final_layernorm"),
        renamed=(
            ("attention.dense.", "self_attn.o_proj."),
            ("attention.", "self_attn."),
            ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
        ),
        config={"first_embedding_is_zero": True},
    ),
    "DeepSeek": Family(
        r"(?P<at>(?:.*\.)?layers\.\d+)\.eh_proj\.weight", (".eh_proj", ".enorm", ".hnorm", ".shared_head.norm")
    ),
    "MiMo": Family(
        r"(?P<at>(?:.*\.)?mtp_layers\.\d+)\.input_proj\.weight",
        (".input_proj", ".token_layernorm", ".hidden_layernorm", ".final_layernorm"),
        config={"hidden_first": True, "first_embedding_is_zero": True},
    ),
    "ERNIE": Family(
        r"(?P<at>.*)\.mtp_linear_proj\.0\.weight",
        (".mtp_linear_proj.0", ".mtp_emb_norm.0", ".mtp_hidden_norm.0"),
        blocks=(".mtp_block.0.",),
        config={"first_embedding_is_zero": True},
    ),
}


@dataclass(frozen=True)
class FoundLayer:
    """An MTP layer in a checkpoint.

    Attributes:
        family: One of `FAMILIES`.
        own: Names of the tensors outside of decoder layers, by the drafter's names.
        blocks: Names of the tensors of each decoder layer, by the names that they have in the layer.
        count: Number of MTP layers in the checkpoint; this is the first one.
    """

    family: str
    own: dict[str, str]
    blocks: list[dict[str, str]]
    count: int = 1

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the layer in the checkpoint."""
        return [*self.own.values(), *(name for block in self.blocks for name in block.values())]

    @property
    def config(self) -> dict[str, Any]:
        """Fields of `MTPConfig` that the family says."""
        return {"family": self.family, "layers": self.count, **FAMILIES[self.family].config}


def find_layer(names: Iterable[str]) -> FoundLayer | None:
    """Return the first MTP layer among the tensors of a checkpoint, by their names; None where there is none."""
    names = list(names)
    for family, form in FAMILIES.items():
        matches = [match["at"] for name in names if (match := re.fullmatch(form.marker, name))]
        if not matches:
            continue
        # The lowest number is the first MTP layer.
        at = min(matches, key=lambda at: [int(number) for number in re.findall(r"\d+", at)])
        own = {f"{mine}.weight": f"{at}{theirs}.weight" for mine, theirs in zip(OWN, form.own, strict=False)}
        others, blocks = {*own.values(), *(at + name for name in form.unread)}, list[dict[str, str]]()
        for begins in (at + block for block in form.blocks):
            blocks.append({})
            for name in names:
                if name.startswith(begins) and name not in others:
                    mine = name[len(begins) :]
                    for theirs, here in form.renamed:
                        mine = here + mine.removeprefix(theirs) if mine.startswith(theirs) else mine
                    blocks[-1][mine] = name
        # MTP layers continue the numbering of the model's decoder layers, so only those from the first one on count.
        *_, place, first = re.split(r"\.(?=\d+\.$)", at + form.blocks[0])
        numbers = (re.match(rf"{re.escape(place)}\.(\d+)\.", name) for name in names)
        numbered = {int(number[1]) for number in numbers if number and int(number[1]) >= int(first[:-1])}
        return FoundLayer(family, own, blocks, len(numbered) // len(form.blocks))
    return None
