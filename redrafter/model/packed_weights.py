"""Weights of 4 and 8 bits as AWQ, GPTQ, compressed-tensors and torchao store them, read without these packages.

Every layout has the same numbers: codes, and for groups of input features a scale and the code of zero. Most weights
fit `GroupedWeight` without a change; others are dequantised. Both have the values that the package itself computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from redrafter.errors import CheckpointError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import scheme_name
from redrafter.kernels.grouped_weight import BLOCK, HALF, GroupedWeight, narrowest, pack_codes
from redrafter.model.quantized_layers import round_to_groups

MIDDLE = {4: 8, 8: 128}  # by bits, the unsigned code of the signed code 0


@dataclass(frozen=True)
class PackedWeight:
    """The numbers of a quantised weight with F output and D input features: `(codes - zero) * scale + offset`.

    Attributes:
        bits: Bits of a code: 4 or 8.
        codes: Codes, `[F, D]` uint8.
        scale: Scale of each group, `[F, G]`, in the dtype of the file.
        zero: Code of zero of each group, `[F, G]` integers.
        offset: What is added in each group, `[F, G]`; None for zeros.
        group_of: Group of each input feature, `[D]` integers; None for groups of neighbours.
    """

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor
    offset: Tensor | None = None
    group_of: Tensor | None = None

    def __post_init__(self) -> None:
        shape = (len(self.codes), self.scale.shape[-1] if self.scale.dim() else 0)
        if not all(x.shape == shape for x in (self.scale, self.zero, self.offset) if x is not None):
            raise ValueError(f"its scales and codes of zero are not {len(self.codes)} by the number of its groups")
        if not self.scale.is_floating_point():
            raise ValueError(f"its scales are {self.scale.dtype}")
        if not all(bool(x.isfinite().all()) for x in (self.scale, self.offset) if x is not None):
            raise ValueError("its scales or offsets are not all finite")
        ids = self.group_of
        if ids is not None and (ids.shape != self.codes.shape[1:] or ids.min() < 0 or ids.max() >= shape[1]):
            raise ValueError(f"g_idx does not name one of its {shape[1]} groups for each input feature")

    def dequantize(self) -> Tensor:
        """Return the weight, `[F, D]` float32, not rounded to the dtype of the scales as the packages do."""
        features, groups = self.codes.shape[1], self.scale.shape[1]
        group_of = self._neighbours(features // groups) if self.group_of is None else self.group_of
        wide = (self.codes.float() - self.zero.float()[:, group_of]) * self.scale.float()[:, group_of]
        return wide if self.offset is None else wide + self.offset.float()[:, group_of]

    def grouped(self) -> GroupedWeight | None:
        """Return the same numbers as a `GroupedWeight`; None where they do not fit one."""
        features, groups = self.codes.shape[1], self.scale.shape[1]
        size, rest = divmod(features, groups)
        in_order = self.group_of is None or torch.equal(self.group_of.int(), self._neighbours(size))
        if rest or size % HALF or not in_order:
            return None
        scale, offset = self.scale.float(), self.offset
        lowest, codes = (0, self.codes) if self.bits == 4 else (MIDDLE[8], (self.codes ^ MIDDLE[8]).view(torch.int8))
        zero = self.zero - lowest
        minimum = -zero * scale if offset is None else offset.float() - zero * scale
        # Products of a code or the code of zero with a scale are exact in float32 if they have at most 24 bits.
        exact = not (scale.contiguous().view(torch.int32) & (1 << self.bits) - 1).any()
        exact = exact and (offset is None or torch.equal(minimum + zero * scale, offset.float()))
        kept: Tensor | None = minimum
        if self.bits == 4 and exact and size % BLOCK == 0:
            codes = pack_codes(codes)
            if offset is None and bool((zero == MIDDLE[4]).all()):
                kept = None
        elif self.bits == 4:  # as 8 bits, which have space for the difference of two codes
            codes, kept = codes.to(torch.int8) - zero.to(torch.int8).repeat_interleave(size, dim=1), offset
        elif not zero.any():
            kept = offset
        elif not exact:
            return None
        scale, kept = _contiguous(narrowest(scale)), None if kept is None else _contiguous(narrowest(kept))
        return GroupedWeight(codes.contiguous(), scale, kept)

    def _neighbours(self, size: int) -> Tensor:
        """Return the group of each input feature, `[D]` int32, for groups of neighbours."""
        return torch.arange(self.codes.shape[1], dtype=torch.int32, device=self.codes.device) // size


class Layout(NamedTuple):
    """The layout in which a checkpoint stores a weight: names of tensors, and the function that reads them.

    Attributes:
        names: What the names of its tensors have in place of `weight`.
        read: Reads the weight from the tensors by these names, which need not all be there.
    """

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Tensor]], PackedWeight]


def find_layout(entries: Mapping[str, Any]) -> Layout | None:
    """Return the layout of weights that a `quantization_config` describes.

    None for one that is not read here: with other bits or quantised activations, or of another package.
    """
    find = _FIND.get(str(entries.get("quant_method")))
    try:
        return None if find is None else find(entries)
    except (AttributeError, TypeError):  # entries of other types, whose faults the package names
        return None


def reason_of(error: Exception) -> str:
    """Return why a weight cannot be read, of the error that `Layout.read` raised."""
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else first_line(error)


def pack_matrices(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a drafter's tensors with its matrices in 8 bits, and the `quantization_config` that describes them.

    The format is compressed-tensors' `int-quantized`. Matrices whose rows are no multiple of `BLOCK` stay as they are.
    """
    whole = [x for x in tensors if x.endswith(".weight") and tensors[x].dim() == 2 and not tensors[x].shape[1] % BLOCK]
    packed = dict(tensors)
    for name in whole:
        weight = round_to_groups(tensors[name], 8)
        packed |= {name: weight.codes, f"{name}_scale": weight.scale}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK}
    groups = {"group_0": {"targets": [name.removesuffix(".weight") for name in whole], "weights": weights}}
    return packed, {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


def widen_packed(tensors: Mapping[str, Tensor], entries: Any, directory: Path) -> dict[str, Tensor]:
    """Return a drafter's tensors with its packed weights as ordinary ones, in the dtype of its other numbers.

    Args:
        tensors: The tensors of its checkpoint.
        entries: The `quantization_config` there; None for a drafter that is not quantised.
        directory: The checkpoint.

    Raises:
        CheckpointError: A packed weight lacks a part, or has one of another shape.
        UnsupportedError: The layout is not read here.
    """
    if entries is None:
        return dict(tensors)
    settings = entries if isinstance(entries, Mapping) else {"quant_method": entries}
    scheme = scheme_name(settings)
    if (layout := find_layout(settings)) is None:
        raise UnsupportedError(
            f"{directory} is quantised ({scheme}), which is not read of drafters: give the drafter that was quantised; "
            "redrafter convert --dtype int8 saves it in 8 bits"
        )
    wide, packed = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name, x in tensors.items():
        layer, _, part = name.rpartition(".")
        if part not in layout.names or (part == "weight" and x.is_floating_point()):
            wide[name] = x
        else:
            packed.setdefault(layer, {})[part] = x
    dtype = next((x.dtype for x in wide.values() if x.is_floating_point()), torch.bfloat16)
    for layer, parts in packed.items():
        try:
            wide[f"{layer}.weight"] = layout.read(parts).dequantize().to(dtype)
        except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            message = f"{directory} cannot be read: the {scheme} weight of {layer}: {reason_of(error)}"
            raise CheckpointError(message) from error
    return wide


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in 32-bit words, or in bytes, `[R, C]`, of which each has its first one in its lowest bits."""
    octets = _octets(words)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)


def _octets(words: Tensor) -> Tensor:
    if words.is_floating_point():
        raise ValueError(f"its codes are {words.dtype}")
    return _contiguous(words).view(torch.uint8)


def _contiguous(x: Tensor) -> Tensor:
    # Of one row or column, `contiguous` would keep strides that no view in another dtype can have.
    return x.clone(memory_format=torch.contiguous_format)


def _awq(entries: Mapping[str, Any]) -> Layout | None:
    form = entries.get("version") or entries.get("checkpoint_format") or "gemm"
    gemm = entries.get("bits") == 4 and str(form).lower() == "gemm"
    return Layout(("qweight", "qzeros", "scales"), _read_awq) if gemm else None


def _read_awq(tensors: Mapping[str, Tensor]) -> PackedWeight:
    def unpack(words: Tensor) -> Tensor:  # of features in the order 0 2 4 6 1 3 5 7
        octets = _octets(words.T)
        octets = rearrange(octets, "word (d odd pair) -> word pair odd d", odd=2, pair=2).contiguous()
        return rearrange([octets & 15, octets >> 4], "half word pair odd d -> (word pair half odd) d")

    return PackedWeight(4, unpack(tensors["qweight"]), tensors["scales"].T, unpack(tensors["qzeros"]).int())


def _gptq(entries: Mapping[str, Any]) -> Layout | None:
    bits, form = entries.get("bits"), entries.get("checkpoint_format") or "gptq"
    one_size = not any("bits" in rule for rule in (entries.get("dynamic") or {}).values())
    if bits not in MIDDLE or form not in ("gptq", "gptq_v2") or not one_size:
        return None
    # The first version of the format stores the codes of zero less one.
    added = 0 if form == "gptq_v2" else sum(1 << place for place in range(0, 32, bits))
    return Layout(("qweight", "qzeros", "scales", "g_idx"), partial(_read_gptq, bits=bits, added=added))


def _read_gptq(tensors: Mapping[str, Tensor], bits: int, added: int) -> PackedWeight:
    codes, zero = _unpack(tensors["qweight"].T, bits), _unpack(tensors["qzeros"] + added, bits).T.int()
    group_of = tensors.get("g_idx")
    return PackedWeight(bits, codes, tensors["scales"].T, zero, group_of=group_of)


def _compressed_tensors(entries: Mapping[str, Any]) -> Layout | None:
    groups = list((entries.get("config_groups") or {}).values())
    fits = groups and not any(entries.get(key) for key in ("kv_cache_scheme", "sparsity_config", "transform_config"))
    for group in groups:
        weights, form = group.get("weights") or {}, group.get("format") or entries.get("format")
        fits = fits and not (group.get("input_activations") or group.get("output_activations"))
        fits = fits and form in ("pack-quantized", "int-quantized") and weights.get("num_bits") in MIDDLE
        fits = fits and weights.get("type") == "int" and weights.get("strategy") in ("group", "channel")
    # The longest names come first, as transformers 5.17 takes the first one that a name begins with.
    parts = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight"
    return Layout(parts, _read_compressed) if fits else None


def _read_compressed(tensors: Mapping[str, Tensor]) -> PackedWeight:
    scale, zero, group_of = tensors["weight_scale"], tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
    if (packed := tensors.get("weight_packed")) is None:
        bits, codes = 8, tensors["weight"].view(torch.uint8) ^ MIDDLE[8]
    else:
        features = int(tensors["weight_shape"][1])
        bits = packed.shape[1] * 32 // features
        codes = _unpack(packed, bits)[:, :features]
    if zero is None:
        zero = torch.full_like(scale, MIDDLE[bits], dtype=torch.int32)
    else:
        packed_zero = zero.dtype == torch.int32
        zero = _unpack(zero.T, bits).T[: len(scale)].int() if packed_zero else zero.int() + MIDDLE[bits]
    unset = group_of is None or bool((group_of < 0).all())  # as the package initialises it
    return PackedWeight(bits, codes, scale, zero, group_of=None if unset else group_of)


def _torchao(entries: Mapping[str, Any]) -> Layout | None:
    settings = (entries.get("quant_type") or {}).get("default") or {}
    form = (settings.get("_data") or {}).get("int4_packing_format", "plain")
    plain = str(form["_data"] if isinstance(form, Mapping) else form).lower() == "plain"
    parts = "_weight_qdata", "_weight_scale", "_weight_zero_point"
    kinds = ("Int8WeightOnlyConfig", "Int4WeightOnlyConfig") if plain else ("Int8WeightOnlyConfig",)
    return Layout(parts, _read_torchao) if settings.get("_type") in kinds else None


def _read_torchao(tensors: Mapping[str, Tensor]) -> PackedWeight:
    data, scale, zero = tensors["_weight_qdata"], tensors["_weight_scale"], tensors.get("_weight_zero_point")
    if zero is not None and zero.is_floating_point():  # Int4Tensor: signed codes, and what the code 0 means
        codes = _unpack(data, 4) ^ MIDDLE[4]
        return PackedWeight(4, codes, scale.T, torch.full_like(scale.T, MIDDLE[4], dtype=torch.int32), zero.T)
    scale = scale.expand(len(data), -1)  # from one number where the whole weight has one
    shift = torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero.expand(len(data), -1).int()
    return PackedWeight(8, data.view(torch.uint8) ^ MIDDLE[8], scale, shift + MIDDLE[8])


_FIND: Mapping[str, Callable[[Mapping[str, Any]], Layout | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "torchao": _torchao,
}
