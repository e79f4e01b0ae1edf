"""Drafters that others have quantised: FP8 weights are read, others are refused by name, and none is read wrongly."""

import json
from functools import partial
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.conversion import convert, refused, weights
from helpers.dflash import DFLASH_FORMS, published_dir, random_block_drafter
from helpers.eagle import EAGLE_FORMS, eagle_dir, random_head, speculators_dir
from helpers.generation import same_undrafted
from redrafter import DFlashDrafter, EagleDrafter, ReDrafter

BLOCK = [16, 24]  # rows and columns; does not divide all weights
GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", **GROUPS}
BLOCKS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": BLOCK}}}}
METHODS: dict[str, dict] = {  # settings of a quantisation by what shares a scale
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "row": COMPRESSED,
    "block": {"quant_method": "fp8", "weight_block_size": BLOCK},
    "compressed block": COMPRESSED | BLOCKS,
}


def largest(weight: Tensor, shared: str) -> Tensor:
    """Return the largest magnitude of the numbers that share a scale, as the shape in which scales are stored."""
    if shared == "tensor":
        return weight.abs().max()
    if shared == "row":
        return weight.abs().amax(dim=1, keepdim=True)
    rows, columns = (ceil(size / step) for size, step in zip(weight.shape, BLOCK, strict=True))
    parts = [part.abs().max() for band in weight.split(BLOCK[0]) for part in band.split(BLOCK[1], dim=1)]
    return torch.stack(parts).view(rows, columns)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each number of a weight."""
    if scale.dim() < 2 or scale.shape[1] == 1 != ceil(shape[1] / BLOCK[1]):
        return scale.expand(shape)
    whole = scale.repeat_interleave(BLOCK[0], dim=0).repeat_interleave(BLOCK[1], dim=1)
    return whole[: shape[0], : shape[1]]


def quantize(source: Path, shared: str, *, outside: bool = False) -> dict[str, Tensor]:
    """Quantise the linear layers of a drafter's directory; return its tensors as they are to be read.

    `outside` writes ModelOpt's own file in place of the entry in config.json.
    """
    tensors, expected = weights(source), {}
    suffix = "weight_scale_inv" if shared == "block" else "weight_scale"
    for name in [name for name in tensors if "_proj.weight" in name]:
        scale = largest(tensors[name], shared) / 448
        low = (tensors[name] / spread(scale, tensors[name].shape)).to(torch.float8_e4m3fn)
        expected[name] = low.float() * spread(scale, low.shape)
        tensors |= {name: low, name.replace("weight", suffix): scale}
        tensors[name.replace("weight", "input_scale")] = torch.ones(())
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if outside:
        (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        (source / "config.json").write_text(json.dumps(config | {"quantization_config": METHODS[shared]}))
    return expected


@pytest.mark.parametrize("shared", METHODS)
@pytest.mark.parametrize(
    ("write", "make", "kind"),
    [
        (speculators_dir, partial(random_head, **EAGLE_FORMS["published"]), EagleDrafter),
        (partial(published_dir, kind="zlab"), partial(random_block_drafter, **DFLASH_FORMS["DFlash"]), DFlashDrafter),
    ],
    ids=["EAGLE-3", "DFlash"],
)
def test_fp8_weights_are_read_as_products_with_their_scales(write, make, kind, shared, tmp_path, capsys):
    expected = quantize(write(tmp_path / "theirs", make()), shared)
    found = kind.from_pretrained(convert(tmp_path / "ours", drafter=tmp_path / "theirs", to="drafter")).state_dict()
    assert len(expected) > 5
    for name, weight in expected.items():
        assert torch.equal(found[name.replace("layers.0.", "midlayer.") if kind is EagleDrafter else name], weight), (
            name
        )


def test_a_quantised_head_drafts_for_its_base_with_the_same_tokens(base, tmp_path):
    source = speculators_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    quantize(source, "tensor", outside=True)
    engine = ReDrafter.from_pretrained(base, source)
    same_undrafted(engine, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=20, do_sample=False)


PACKED = {"weight_packed": torch.ones(32, 16, dtype=torch.uint8), "weight_global_scale": torch.ones(1)}
OTHERS = {  # tensors of a layer that are quantised in another way
    "nvfp4-pack-quantized": PACKED | {"weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn)},
    "int-quantized": {"weight": torch.ones(32, 32, dtype=torch.int8), "weight_scale": torch.ones(32, 1)},
    "NVFP4": {"weight": torch.ones(32, 16, dtype=torch.uint8), "weight_scale_2": torch.ones(())},
}


@pytest.mark.parametrize("method", OTHERS)
def test_weights_quantised_otherwise_are_refused_by_name(method, base, tmp_path, capsys):
    settings = {"quant_method": "compressed-tensors", "format": method}
    source = eagle_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]), quantization_config=settings)
    tensors, layer = weights(source), "midlayer.mlp.gate_proj"
    del tensors[f"{layer}.weight"]
    save_file(tensors | {f"{layer}.{name}": x for name, x in OTHERS[method].items()}, source / "model.safetensors")
    error = refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
    assert f"is quantised (compressed-tensors {method}: {layer}." in error
    assert "give the drafter that it was made from" in error


@pytest.mark.parametrize(
    ("change", "says"),
    [({"scale": None}, "in 8 bits, and no"), ({"scale": torch.ones(3, 1)}, "are no scales of all, of the rows")],
    ids=["no scale", "another shape"],
)
def test_a_weight_without_its_scale_is_named(change, says, tmp_path, capsys):
    source = speculators_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    quantize(source, "row")
    tensors, name = weights(source), "layers.0.mlp.up_proj.weight_scale"
    del tensors[name]
    save_file(tensors | ({} if change["scale"] is None else {name: change["scale"]}), source / "model.safetensors")
    assert says in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")


@pytest.mark.parametrize(
    "settings",
    ["fp8", ["fp8"], {"config_groups": 5}, {"config_groups": {"a": 5}}, {"weight_block_size": 5}],
    ids=str,
)
def test_settings_of_a_quantisation_that_cannot_be_are_named(settings, tmp_path, capsys):
    source = eagle_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]), quantization_config=settings)
    assert "settings of a quantisation that" in refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")


def test_scales_that_are_not_finite_are_named(tmp_path, capsys):
    source = speculators_dir(tmp_path / "theirs", random_head(**EAGLE_FORMS["published"]))
    quantize(source, "row")
    tensors = weights(source)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name][0] = torch.nan
    save_file(tensors, source / "model.safetensors")
    error = refused(capsys, drafter=source, to="drafter", output=tmp_path / "out")
    assert f"numbers that are not finite in {name}" in error
