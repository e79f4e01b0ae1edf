"""Find the MTP layer that a checkpoint holds in addition to its model, and load it.

transformers drops these tensors when it loads the model.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from redrafter.attention.tree_attention import replacement_for
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.checkpoints.merged import find_file
from redrafter.checkpoints.mtp_layer import FoundLayer, find_layer
from redrafter.drafting.mtp import MTPConfig, MTPDrafter
from redrafter.drafting.mtp_attention import ATTENTION_NAME, Past
from redrafter.drafting.paged_entries import PagedEntries
from redrafter.errors import CheckpointError, UnsupportedError, first_line, warn
from redrafter.files.checkpoint_kind import read_json
from redrafter.files.headers import INDEX_FILE, WEIGHTS_FILE, read_file_headers
from redrafter.files.stored_tensors import map_tensor
from redrafter.model.forward_batch import decoder_stack
from redrafter.model.patch import MODEL_ERRORS
from redrafter.model.quantized_layers import multiply_blocks
from redrafter.model.target import Target


def holds_mtp(name: str) -> bool:
    """Return whether the checkpoint in a directory or repository holds an MTP layer.

    Of a repository that is not downloaded yet, the weights are, where they are in one file.
    """
    return find_layer(_files_by_tensor(name, None)) is not None


def load_mtp(name: str, target: Target, revision: str | None = None) -> MTPDrafter | None:
    """Load the MTP layer of a target's checkpoint onto the target's device, in the target's dtype; None without.

    Args:
        name: Directory or hub id that the target was loaded from.
        target: The target.
        revision: Revision on the hub.

    Raises:
        CheckpointError: A tensor is missing, is not expected or has another shape.
        UnsupportedError: The target has no layer that can be the MTP layer.
    """
    files = _files_by_tensor(name, revision)
    found = find_layer(files)
    if found is None:
        return None
    if missing := sorted(set(found.own.values()) - set(files)):
        raise CheckpointError(f"{name} has no {missing[0]}, so its MTP layer is not whole: {_OTHERWISE}")
    wanted = found.own | {
        f"blocks.{number}.{mine}": theirs for number, block in enumerate(found.blocks) for mine, theirs in block.items()
    }
    if found.count > 1:
        # As vLLM does. Layers that draft further tokens each would read the outputs of those before them at all tokens.
        warn(f"{name} has {found.count} MTP layers: the first one drafts all tokens, the others are not used")
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
    # Assigned, since the module is on the meta device and dtypes may differ by tensor.
    drafter.load_state_dict(tensors, assign=True)
    for mine, x in (*drafter.named_parameters(), *drafter.named_buffers()):
        if x.is_meta:
            raise UnsupportedError(f"{target.name} computes {mine} of its layers when it is made: {_OTHERWISE}")
    drafter.eval().requires_grad_(False)
    # A layer of an unknown model may need arguments that are not passed here: fail at loading, not while serving.
    _try(drafter, target)
    return drafter


_OTHERWISE = "write without drafts (--no-speculate), or give a drafter"


def _make_drafter(name: str, target: Target, found: FoundLayer, tensors: dict[str, Tensor]) -> MTPDrafter:
    """Return a drafter without weights, and join the experts of `tensors` where its layers have them joined."""
    stack = decoder_stack(target.model, target.config.num_hidden_layers)
    if stack is None:
        raise UnsupportedError(f"{target.name} does not hold its layers in a list: {_OTHERWISE}")
    config = copy.deepcopy(target.config)
    config._attn_implementation = replacement_for(target.config._attn_implementation, ATTENTION_NAME)
    blocks = [_make_block(name, stack, config, tensors, f"blocks.{number}.") for number in range(len(found.blocks))]
    width, decoder = target.hidden_size, cast("Any", target.model.get_decoder())
    norms = [
        module
        for name, module in blocks[0].named_modules()
        if "norm" in name.rpartition(".")[2] and getattr(getattr(module, "weight", None), "shape", None) == (width,)
    ]
    if not norms:
        raise UnsupportedError(f"{target.name} has layers without norms of {width}: {_OTHERWISE}")
    base = target.model.config.name_or_path or None
    form = MTPConfig(vocab_size=target.vocab_size, hidden_size=width, base_model=base, **found.config)
    with torch.device("meta"):
        drafter = MTPDrafter(form, blocks, norms[0], getattr(decoder, "rotary_emb", None))
    if "norm.weight" not in found.own:
        drafter.norm = nn.Identity()
    return drafter


def _make_block(
    name: str, stack: nn.ModuleList, config: PretrainedConfig, tensors: dict[str, Tensor], begins: str
) -> nn.Module:
    """Return a decoder layer like the last one in the stack that has the tensors `begins...`."""
    wrong, kinds = "", set[tuple[str, ...]]()
    # From the last layer: in models whose layers differ, an MTP layer is mostly like the last ones.
    for index in reversed(range(len(stack))):
        if (kind := tuple(stack[index].state_dict())) in kinds:
            continue
        kinds.add(kind)
        make: Any = type(stack[index])
        with torch.device("meta"):
            block: nn.Module = make(config, index)
        expected = {begins + mine for mine in block.state_dict()}
        joined = _join_experts(tensors, expected)
        found = {mine for mine in joined if mine.startswith(begins)}
        missing, extra = sorted(expected - found), sorted(found - expected)
        if not missing and not extra:
            tensors.clear()
            tensors |= joined
            return block
        if not wrong:
            what = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which its model's layers have not"
            wrong = what.replace(begins, "", 1)
    raise CheckpointError(f"the MTP layer of {name} {wrong}, so it cannot be loaded: {_OTHERWISE}")


def _try(drafter: MTPDrafter, target: Target) -> None:
    """Draft once after two tokens; refuse a layer that is called in another way."""
    inputs = torch.zeros(1, 2, target.hidden_size, dtype=target.dtype, device=target.device)
    position = torch.arange(2, device=target.device)[None]
    try:
        pool = KVCachePool([drafter.stored_layer(target, False).shape], 2)
        cache = PagedCache(pool, torch.ones(1, 1, dtype=torch.int32, device=target.device))
        entries = PagedEntries.from_cache(cache, torch.full_like(position[0, :1], 2))
        seen = torch.ones(1, 2, 2, dtype=torch.bool, device=target.device)
        with torch.no_grad():
            drafter.step(inputs, position, Past(entries, entries.rows(seen, position), 0))
    except MODEL_ERRORS as error:
        message = f"layers of {target.name} cannot be an MTP layer here ({first_line(error)}): {_OTHERWISE}"
        raise UnsupportedError(message) from error


def _join_experts(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors with the experts' stacked, `[E, ...]`, as in transformers' layers."""
    joined = dict(tensors)
    for name in expected:
        place, _, what = name.rpartition(".")
        if name in joined or what not in ("gate_up_proj", "up_proj", "down_proj"):
            continue
        parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,)
        experts: list[Tensor] = []
        # Checkpoints store experts one by one, and transformers' layers read them as one tensor.
        while all(f"{place}.{len(experts)}.{part}.weight" in joined for part in parts):
            names = [f"{place}.{len(experts)}.{part}.weight" for part in parts]
            experts.append(torch.cat([joined.pop(part) for part in names]))
        if experts:
            joined[name] = torch.stack(experts)
    return joined


def _widen_blocks(tensors: dict[str, Tensor]) -> None:
    """Multiply weights in FP8 by the scales of their blocks, as DeepSeek-V3 stores them, in place, without scales."""
    for scales in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        scale, name = tensors.pop(scales), scales.removesuffix("_scale_inv")
        counts = zip(tensors[name].shape, scale.shape, strict=True)
        block = [1 << ((size - 1) // count).bit_length() for size, count in counts]  # powers of two
        tensors[name] = multiply_blocks(tensors[name], scale, block).bfloat16()


def _files_by_tensor(name: str, revision: str | None) -> dict[str, str]:
    """Return the names of a checkpoint's tensors, each with the name of the file that has it."""
    index = find_file(name, INDEX_FILE, revision)
    if index is not None:
        files = read_json(index).get("weight_map")
        return files if isinstance(files, dict) else {}
    weights = find_file(name, WEIGHTS_FILE, revision)
    if weights is None:
        return {}
    return dict.fromkeys(read_file_headers(weights), WEIGHTS_FILE)


def _read(name: str, revision: str | None, wanted: Mapping[str, str], files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors by the drafter's names; `wanted` has the checkpoint's names, and `files` where these are."""
    tensors: dict[str, Tensor] = {}
    # Only files with the MTP layer are downloaded.
    for file in sorted({files[theirs] for theirs in wanted.values()}):
        path = find_file(name, file, revision)
        if path is None:
            raise CheckpointError(f"{name} has no {file}, where its index says that its MTP layer is: {_OTHERWISE}")
        tensors |= {ours: map_tensor(path, theirs) for ours, theirs in wanted.items() if files[theirs] == file}
    return tensors
