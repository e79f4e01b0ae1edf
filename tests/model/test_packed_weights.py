"""Weights as AWQ, GPTQ, compressed-tensors and torchao store them, read into the numbers that these compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.packed import AWQ, GPTQ, as_awq, as_gptq, pack
from redrafter.model.packed_weights import PackedWeight, find_layout

F, D = 16, 128


def numbers(bits: int, group: int, *, dtype: torch.dtype = torch.float16, symmetric: bool = False) -> PackedWeight:
    """Return random codes, scales and codes of zero."""
    torch.manual_seed(bits * group)
    groups = (F, D // group)
    zero = torch.full(groups, 1 << bits - 1) if symmetric else torch.randint(1 << bits, groups)
    codes = torch.randint(1 << bits, (F, D)).to(torch.uint8)
    return PackedWeight(bits, codes, (torch.rand(groups) / 50 + 1e-3).to(dtype), zero.int())


def exact(weight: PackedWeight) -> Tensor:
    """Return the numbers of a weight, each rounded once."""
    size = D // weight.scale.shape[1]
    steps = weight.codes.double() - weight.zero.double().repeat_interleave(size, 1)
    return (steps * weight.scale.double().repeat_interleave(size, 1)).to(weight.scale.dtype)


def read(entries: dict[str, Any], tensors: dict[str, Tensor]) -> PackedWeight:
    """Return the weight that a checkpoint with these settings and tensors has."""
    layout = find_layout(entries)
    assert layout is not None
    assert tensors.keys() <= set(layout.names)
    return layout.read(tensors)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("entries, less", [(AWQ, 0), (GPTQ, 1), (GPTQ | {"checkpoint_format": "gptq_v2"}, 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_weights_are_what_awq_and_gptq_compute(entries, less, bits, group):
    if bits == 8 and entries is AWQ:
        return
    weight = numbers(bits, group)
    weight = replace(weight, zero=weight.zero.clamp(min=less))  # the first format cannot store a zero of 0
    tensors = as_awq(weight) if entries is AWQ else as_gptq(weight, less)
    grouped = read(entries | {"bits": bits}, tensors).grouped()
    assert grouped is not None
    assert (grouped.bits, grouped.group) == (bits, group)
    assert torch.equal(grouped.dequantize(torch.float16), exact(weight))
    assert all(x.stride() == (x.shape[1], 1) for x in (grouped.codes, grouped.scale, grouped.minimum))


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_weights_have_no_minima(bits):
    weight = numbers(bits, 32, symmetric=True)
    grouped = read(GPTQ | {"bits": bits}, as_gptq(weight, 1)).grouped()
    assert (grouped.bits, grouped.minimum, grouped.scale.dtype) == (bits, None, torch.float16)
    assert torch.equal(grouped.dequantize(torch.float16), exact(weight))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_whose_groups_are_permuted_are_dequantised(bits):
    weight = numbers(bits, 32)
    order = torch.randperm(D)
    weight = replace(weight, zero=weight.zero.clamp(min=1), group_of=(torch.arange(D) // 32)[order])
    stored = read(GPTQ | {"bits": bits}, as_gptq(weight, 1))
    assert stored.grouped() is None
    sorted_codes = replace(weight, codes=weight.codes[:, order.argsort()], group_of=None)
    assert torch.equal(stored.dequantize().half(), exact(sorted_codes)[:, order])


def test_scales_with_all_bits_of_float32_stay_exact():
    for bits, fits in ((4, True), (8, False)):
        weight = numbers(bits, 32, dtype=torch.float32)
        grouped = weight.grouped()
        assert (grouped is not None) == fits
        dense = weight.dequantize() if grouped is None else grouped.dequantize()
        assert torch.equal(dense, exact(weight))
    assert numbers(8, 32, dtype=torch.float32, symmetric=True).grouped() is not None


def test_groups_that_no_kernel_has_are_dequantised_or_get_8_bits():
    assert numbers(4, 16).grouped().bits == 8
    assert numbers(4, 8).grouped() is None
    assert torch.equal(numbers(4, 8).dequantize().half(), exact(numbers(4, 8)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "bits, form, how",
    [
        (4, "pack-quantized", {"strategy": "group", "group_size": 32}),
        (4, "pack-quantized", {"strategy": "group", "group_size": 64, "symmetric": False}),
        (8, "pack-quantized", {"strategy": "channel"}),
        (8, "pack-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}),
        (8, "int-quantized", {"strategy": "channel"}),
    ],
)
def test_weights_are_what_compressed_tensors_computes(bits, form, how, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=bits, **how))
    weight = numbers(bits, how.get("group_size", D), dtype=dtype)
    state = {"weight": exact(weight), "weight_scale": weight.scale}
    if not how.get("symmetric", True):
        state["weight_zero_point"] = (weight.zero - (1 << bits - 1)).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    groups = {"group_0": {"weights": scheme.weights.model_dump(), "input_activations": None}}
    ours = read({"quant_method": "compressed-tensors", "format": form, "config_groups": groups}, stored)
    theirs = compressor.decompress(stored, scheme)["weight"]
    assert torch.equal(ours.dequantize().to(dtype), theirs)
    grouped = ours.grouped()
    if grouped is None:
        assert (dtype, bits, how.get("symmetric")) == (torch.float32, 8, False)
    else:
        assert torch.equal(grouped.dequantize(dtype), theirs)


def test_permuted_groups_of_compressed_tensors_are_dequantised():
    weight = replace(numbers(4, 32), group_of=(torch.arange(D) // 32)[torch.randperm(D)].int())
    group = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    entries = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    tensors = {"weight_packed": pack(weight.codes, 4), "weight_scale": weight.scale, "weight_g_idx": weight.group_of}
    tensors |= {"weight_shape": torch.tensor([F, D]), "weight_zero_point": (weight.zero - 8).to(torch.int8)}
    stored = read(entries, tensors)
    assert stored.grouped() is None
    assert torch.equal(stored.dequantize(), weight.dequantize())
    tensors["weight_g_idx"] = torch.full((D,), -1, dtype=torch.int32)  # as the package initialises it
    assert torch.equal(read(entries, tensors).dequantize().half(), exact(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_8_bits_are_what_torchao_computes(dtype):
    ao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    for granularity in (ao.PerRow(), ao.PerTensor(), ao.PerGroup(32)):
        layer = torch.nn.Linear(D, F).to(dtype)
        ao.quantize_(layer, ao.Int8WeightOnlyConfig(granularity=granularity))
        theirs: Any = layer.weight
        parts = {"qdata": theirs.qdata, "scale": theirs.scale, "zero_point": theirs.zero_point}
        stored = read(torchao("Int8WeightOnlyConfig"), {f"_weight_{key}": x for key, x in parts.items()})
        assert torch.equal(stored.grouped().dequantize(dtype), theirs.dequantize())
        assert torch.equal(stored.dequantize().to(dtype), theirs.dequantize())


def torchao(kind: str, **data: object) -> dict[str, Any]:
    """Return the settings that transformers writes for a config of torchao."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def test_plain_weights_of_4_bits_of_torchao_are_scale_times_signed_code_plus_zero():
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (F, D))
    scale, zero = torch.rand(D // 32, F).bfloat16() / 50, torch.randn(D // 32, F).bfloat16() / 20
    data = (codes[:, ::2] & 15 | codes[:, 1::2] << 4).to(torch.int8)
    entries = torchao("Int4WeightOnlyConfig", int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"})
    grouped = read(entries, {"_weight_qdata": data, "_weight_scale": scale, "_weight_zero_point": zero}).grouped()
    wide = [x.T.double().repeat_interleave(32, 1) for x in (scale, zero)]
    assert grouped.bits == 4
    assert torch.equal(grouped.dequantize(torch.bfloat16), (codes * wide[0] + wide[1]).float().bfloat16())


W8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
W8A8 = W8 | {"input_activations": {"num_bits": 8, "dynamic": True}}


def test_a_scheme_of_weights_alone_is_read():
    entries = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": W8}}
    assert find_layout(entries) is not None


@pytest.mark.parametrize(
    "entries",
    [
        {"quant_method": "fp8"},
        AWQ | {"version": "gemv"},
        GPTQ | {"bits": 3},
        GPTQ | {"checkpoint_format": "marlin"},
        GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}},
        GPTQ | {"bits": [4]},
        GPTQ | {"dynamic": {"a": None}},
        torchao("Float8WeightOnlyConfig"),
        torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"),
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {}}},
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": W8A8}},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"W4A16": ["Linear"]}},
    ],
)
def test_other_layouts_are_left_to_their_package(entries):
    assert find_layout(entries) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"scales": torch.ones(D // 32, F - 1)},
        {"scales": torch.ones(D // 32, F, dtype=torch.int32)},
        {"qzeros": torch.zeros(7, F // 8, dtype=torch.int32)},
        {"qweight": torch.zeros(D // 8, F)},
    ],
)
def test_tensors_of_other_sizes_or_dtypes_are_refused(wrong):
    with pytest.raises((RuntimeError, ValueError)):
        read(GPTQ, as_gptq(replace(numbers(4, 32), zero=numbers(4, 32).zero.clamp(min=1)), 1) | wrong).grouped()
