"""Find the MTP layer that a checkpoint holds beside its model, and load it.

transformers drops these tensors when it loads the model.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from redrafter.drafting.drafter_config import MTPConfig
from redrafter.drafting.mtp import Entries, MTPDrafter
from redrafter.errors import CheckpointError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import read_json
from redrafter.model.forward_batch import decoder_stack
from redrafter.model.patch import MODEL_ERRORS
from redrafter.model.target import Target

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Family:
    """Names that a family of models has for the tensors of an MTP layer, and the formula that goes with them.

    Attributes:
        projection: A regular expression of the name of the product that joins embedding and hidden state. Its group
            `at` is what other names begin with.
        embedding_norm: The norm of the embedding, after `at`.
        hidden_norm: The norm of the hidden state.
        norm: The norm of the layer's output.
        block: What the names of the decoder layer's tensors begin with.
        unread: Tensors that are the target's own embedding table and head once more.
        config: Fields of `MTPConfig` that differ from their defaults.
    """

    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    block: str = "."
    unread: tuple[str, ...] = (".embed_tokens.weight", ".shared_head.head.weight")
    config: Mapping[str, Any] | None = None

    def own_names(self, at: str, projection: str) -> dict[str, str]:
        """Return the names of tensors beside those of the decoder layer, by the names of the drafter's."""
        norms = {"embedding_norm": self.embedding_norm, "hidden_norm": self.hidden_norm, "norm": self.norm}
        return {"projection.weight": projection} | {
            f"{mine}.weight": f"{at}{theirs}.weight" for mine, theirs in norms.items()
        }


# Qwen3-Next and Qwen3.5, dense and with experts; DeepSeek-V3, Kimi K2 and GLM-4.5; MiMo.
FAMILIES = {
    "Qwen": Family(
        r"(?P<at>(?:.*\.)?mtp)\.fc\.weight",
        ".pre_fc_norm_embedding",
        ".pre_fc_norm_hidden",
        ".norm",
        block=".layers.0.",
    ),
    "DeepSeek": Family(r"(?P<at>(?:.*\.)?layers\.\d+)\.eh_proj\.weight", ".enorm", ".hnorm", ".shared_head.norm"),
    "MiMo": Family(
        r"(?P<at>(?:.*\.)?mtp_layers\.\d+)\.input_proj\.weight",
        ".token_layernorm",
        ".hidden_layernorm",
        ".final_layernorm",
        config={"hidden_first": True, "first_embedding_is_zero": True},
    ),
}


@dataclass(frozen=True)
class FoundLayer:
    """An MTP layer in a checkpoint.

    Attributes:
        family: One of `FAMILIES`.
        own: Names of the tensors beside the decoder layer's, by the names of the drafter's.
        block: Names of the decoder layer's tensors, by the names that they have in the layer.
    """

    family: str
    own: dict[str, str]
    block: dict[str, str]

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the layer in the checkpoint."""
        return [*self.own.values(), *self.block.values()]

    @property
    def config(self) -> dict[str, Any]:
        """Fields of `MTPConfig` that the family says."""
        return {"family": self.family, **(FAMILIES[self.family].config or {})}


def find_layer(names: Iterable[str]) -> FoundLayer | None:
    """Return the first MTP layer among the tensors of a checkpoint, by their names; None where there is none."""
    names = list(names)
    for family, form in FAMILIES.items():
        matches = [match for name in names if (match := re.fullmatch(form.projection, name))]
        if not matches:
            continue
        first = min(matches, key=lambda match: [int(number) for number in re.findall(r"\d+", match["at"])])
        at = first["at"]
        own, begins = form.own_names(at, first[0]), at + form.block
        others = {*own.values(), *(at + name for name in form.unread)}
        block = {name[len(begins) :]: name for name in names if name.startswith(begins) and name not in others}
        return FoundLayer(family, own, block)
    return None


def holds_mtp(name: str, revision: str | None = None) -> bool:
    """Return whether the checkpoint in a directory or repository holds an MTP layer.

    Of a repository that is not downloaded yet, the weights are, where they are in one file.
    """
    return find_layer(_files_by_tensor(name, revision)) is not None


def load_mtp(name: str, target: Target, revision: str | None = None) -> MTPDrafter | None:
    """Load the MTP layer of a target's checkpoint onto the target's device, in the target's dtype; None without.

    Args:
        name: Directory or hub id that the target was loaded from.
        target: The target.
        revision: Revision on the hub.

    Raises:
        CheckpointError: A tensor is missing, is not expected or has another shape.
        UnsupportedError: The target has no layer that can be the MTP layer, or is split over processes.
    """
    files = _files_by_tensor(name, revision)
    found = find_layer(files)
    if found is None:
        return None
    if target.ranks.size > 1:
        raise UnsupportedError(
            f"{name} has an MTP layer, which reads the whole head, and tensor parallelism splits it: write without "
            "drafts (--no-speculate), or give a drafter"
        )
    if missing := sorted(set(found.own.values()) - set(files)):
        raise CheckpointError(f"{name} has no {missing[0]}, so its MTP layer is not whole: {_OTHERWISE}")
    wanted = {f"block.{mine}": theirs for mine, theirs in found.block.items()} | found.own
    tensors = _read(name, revision, wanted, files)
    _widen_blocks(tensors)
    drafter = _make_drafter(name, target, found, tensors)
    floats = tuple(getattr(target.model, "_keep_in_fp32_modules_strict", None) or ())
    for mine, tensor in tensors.items():  # such as biases of experts, whose differences are small
        kept = not tensor.is_floating_point() or any(word in mine for word in floats)
        tensors[mine] = tensor.to(target.device, tensor.dtype if kept else target.dtype)
    for mine, x in drafter.state_dict().items():
        if tensors[mine].shape != x.shape:
            raise CheckpointError(
                f"{name} has {wanted.get(mine, mine)} of shape {tuple(tensors[mine].shape)} instead of "
                f"{tuple(x.shape)}, so its MTP layer cannot be loaded: {_OTHERWISE}"
            )
    drafter.load_state_dict(tensors, assign=True)
    for mine, x in (*drafter.named_parameters(), *drafter.named_buffers()):
        if x.is_meta:
            raise UnsupportedError(f"{target.name} computes {mine} of its layers when it is made: {_OTHERWISE}")
    drafter.eval().requires_grad_(False)
    _try(drafter, target)
    return drafter


_OTHERWISE = "write without drafts (--no-speculate), or give a drafter"


def _make_drafter(name: str, target: Target, found: FoundLayer, tensors: dict[str, Tensor]) -> MTPDrafter:
    """Return a drafter without weights, and join the experts of `tensors` where its layer has them joined.

    The layer is made as that of the target's which has the same tensors, and is the last of these.
    """
    model, count = target.model, target.config.num_hidden_layers
    stack = decoder_stack(model, count)
    if stack is None:
        raise UnsupportedError(f"{target.name} does not hold its layers in a list: {_OTHERWISE}")
    config = copy.deepcopy(target.config)
    config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    wrong, kinds = "", set[tuple[str, ...]]()
    for index in reversed(range(count)):
        expected = tuple(stack[index].state_dict())
        if expected in kinds:
            continue
        kinds.add(expected)
        with torch.device("meta"):
            block = type(stack[index])(config, index)
        expected = tuple(f"block.{mine}" for mine in block.state_dict())
        joined = _join_experts(tensors, expected)
        block_names = {mine for mine in joined if mine.startswith("block.")}
        missing, extra = sorted(set(expected) - block_names), sorted(block_names - set(expected))
        if not missing and not extra:
            tensors.clear()
            tensors |= joined
            return _drafter_of(target, found, block)
        if not wrong:
            what = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which its model's layers have not"
            wrong = what.replace("block.", "", 1)
    raise CheckpointError(f"the MTP layer of {name} {wrong}, so it cannot be loaded: {_OTHERWISE}")


def _try(drafter: MTPDrafter, target: Target) -> None:
    """Draft once after two tokens; refuse a layer that is called in another way."""
    inputs = torch.zeros(1, 2, target.hidden_size, dtype=target.dtype, device=target.device)
    position, entries = torch.arange(2, device=target.device)[None], Entries()
    try:
        with torch.no_grad():
            drafter.store(inputs, position, entries)
            drafter.step(inputs, position + 2, torch.ones(1, 2, 4, dtype=torch.bool, device=target.device), entries)
    except MODEL_ERRORS as error:
        raise UnsupportedError(
            f"layers of {target.name} cannot be an MTP layer here ({first_line(error)}): {_OTHERWISE}"
        ) from error


def _drafter_of(target: Target, found: FoundLayer, block: nn.Module) -> MTPDrafter:
    width = target.hidden_size
    norms = [
        module
        for name, module in block.named_modules()
        if "norm" in name.rpartition(".")[2] and getattr(getattr(module, "weight", None), "shape", None) == (width,)
    ]
    if not norms:
        raise UnsupportedError(f"{target.name} has layers without norms of {width}: {_OTHERWISE}")
    decoder: Any = target.model.get_decoder()
    name = target.model.config.name_or_path or None
    config = MTPConfig(target.vocab_size, width, base_model=name, **found.config)
    with torch.device("meta"):
        return MTPDrafter(config, block, norms[0], getattr(decoder, "rotary_emb", None))


def _join_experts(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors with those of each expert joined, `[E, ...]`, as transformers' layers have them."""
    joined = dict(tensors)
    for name in expected:
        place, _, what = name.rpartition(".")
        if name in joined or what not in ("gate_up_proj", "down_proj"):
            continue
        parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,)
        experts: list[Tensor] = []
        while all(f"{place}.{len(experts)}.{part}.weight" in joined for part in parts):
            names = [f"{place}.{len(experts)}.{part}.weight" for part in parts]
            experts.append(torch.cat([joined.pop(part) for part in names]))
        if experts:
            joined[name] = torch.stack(experts)
    return joined


def _widen_blocks(tensors: dict[str, Tensor]) -> None:
    """Multiply weights in FP8 by the scales of their blocks, as DeepSeek-V3 stores them, in place, without scales."""
    for scales in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        scale, name = tensors.pop(scales).float(), scales.removesuffix("_scale_inv")
        weight = tensors[name].float()
        # The last blocks of both dimensions may be cut; all blocks are of one power of two.
        sizes = [1 << ((size - 1) // count).bit_length() for size, count in zip(weight.shape, scale.shape, strict=True)]
        for dim, size in enumerate(sizes):
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, weight.shape[dim])
        tensors[name] = (weight * scale).bfloat16()


def _files_by_tensor(name: str, revision: str | None) -> dict[str, str]:
    """Return the names of a checkpoint's tensors, each with the name of the file that has it."""
    index = _find(name, INDEX_FILE, revision)
    if index is not None:
        files = read_json(index).get("weight_map")
        return files if isinstance(files, dict) else {}
    weights = _find(name, WEIGHTS_FILE, revision)
    if weights is None:
        return {}
    try:
        with safe_open(weights, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{weights} is cut short or no safetensors file: {first_line(error)}") from error


def _find(name: str, file: str, revision: str | None) -> Path | None:
    found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _read(name: str, revision: str | None, wanted: Mapping[str, str], files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors by the drafter's names; `wanted` has the checkpoint's names, and `files` where these are."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[theirs] for theirs in wanted.values()}):
        path = _find(name, file, revision)
        if path is None:
            raise CheckpointError(f"{name} has no {file}, where its index says that its MTP layer is: {_OTHERWISE}")
        with safe_open(path, framework="pt") as stored:
            for mine, theirs in wanted.items():
                if files[theirs] == file:
                    tensors[mine] = stored.get_tensor(theirs)
    return tensors
