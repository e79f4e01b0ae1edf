"""Padded pairs that are saved: other programs read them as what they are, and they compute what was saved."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import padded_model
from helpers.command_line import printed
from helpers.models import assert_close_by_scale
from helpers.packed import as_compressed, quantize
from packed_checkpoint import GROUP, W4A16, pack
from padded_model import SHAPES
from padding import PadShape
from redrafter import ReDrafter, boxed_pair
from redrafter.checkpoints.models import load_model
from redrafter.model.packed_weights import PackedWeight, find_layout

IDS = torch.tensor([[5, 9, 14, 3, 22, 8, 301, 77]])


def numbers_of(parts: dict[str, torch.Tensor]) -> PackedWeight:
    """Read a packed weight slowly: 8 codes a word, of which the first has the lowest bits."""
    words, features = parts["weight_packed"].long(), int(parts["weight_shape"][1])
    codes = (words[:, :, None] >> torch.arange(0, 32, 4) & 15).flatten(1)[:, :features].to(torch.uint8)
    scale = parts["weight_scale"]
    return PackedWeight(4, codes, scale, torch.full_like(scale, 8, dtype=torch.int32))


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Return a function that runs the script on the boxed pair, with shapes of its own, and returns the exit code."""
    monkeypatch.setitem(SHAPES, "twice", PadShape(192, 320, 41, 6, 2, 32, 2048))
    monkeypatch.setitem(SHAPES, "wider", PadShape(192, 320, 41, 6, 2, 32, 2304))

    def run(words: str) -> int:
        words = words.replace("DIR", str(tmp_path / "pair"))
        monkeypatch.setattr(sys, "argv", ["padded_model.py", "--device", "cpu", *words.split()])
        return padded_model.main()

    return run


@pytest.mark.variant  # loads the boxed pair
def test_a_saved_pair_writes_and_speculates_as_the_small_one(script, tmp_path):
    assert script("--save DIR --pad-to twice") == 0
    folder = tmp_path / "pair"
    assert {path.stat().st_mode for path in folder.glob("*/*.safetensors")} == {
        (folder / "base/config.json").stat().st_mode
    }
    names = [boxed_pair()], [folder / "base", folder / "drafter"]
    pairs = [ReDrafter.from_pretrained(*each, dtype="float32", num_beams=3, node_budget=12) for each in names]
    outs = [pair.generate(IDS, max_new_tokens=40, return_dict_in_generate=True) for pair in pairs]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].stats == outs[1].stats
    assert outs[0].stats.accepted > 3


@pytest.mark.variant  # the same
def test_a_padded_base_in_4_bits_is_recognised_and_computes_what_its_numbers_say(script, tmp_path):
    assert script("--save DIR --pad-to twice --w4a16") == 0
    base = tmp_path / "pair" / "base"
    assert "compressed-tensors pack-quantized, 4 bits in groups of 32" in str(printed("info", str(base), "--json"))
    packed, plain = load_file(base / "model.safetensors"), {}
    for name, x in packed.items():
        layer, _, part = name.rpartition(".")
        if part == "weight":
            plain[name] = x
        elif part == "weight_packed":
            parts = {part: packed[f"{layer}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
            plain[f"{layer}.weight"] = numbers_of(parts).dequantize()
    ours = load_model(base, dtype="float32", device=None, trust_remote_code=False)
    config = ours.config.__class__.from_dict({**ours.config.to_dict(), "quantization_config": None})
    expected = AutoModelForCausalLM.from_config(config).eval()
    assert not expected.load_state_dict(plain, strict=False).unexpected_keys
    with torch.no_grad():
        assert_close_by_scale(ours(IDS).logits, expected(IDS).logits, 2e-5)
    assert not plain["model.layers.40.mlp.down_proj.weight"].any()  # padding stays exact


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--save DIR", "--save needs --pad-to"),
        ("--save DIR --pad-to twice --quantization int8", "neither --quantization"),
        ("--save . --pad-to twice", "--save .: it exists"),
        ("--save DIR --pad-to wider", "wider adds ids, which a checkpoint cannot mask: it has 2304, the base 2048"),
        ("--w4a16 --pad-to twice", "--w4a16 needs --save"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(script, capsys, words, message):
    assert script(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_closer_than_rounded_ones_and_their_layout_is_the_formats(dtype):
    torch.manual_seed(0)
    weight = torch.randn(2050, 3 * GROUP).mul(torch.rand(2050, 1)).to(dtype)
    weight[7] = 0
    weight[9, 1:] = 0  # one number decides
    parts = pack(weight)
    found, layout = numbers_of(parts), find_layout(W4A16)
    assert layout is not None
    assert torch.equal(layout.read(parts).dequantize(), found.dequantize())
    assert torch.equal(parts["weight_packed"], as_compressed(found)["weight_packed"])
    assert parts["weight_scale"].dtype == dtype
    assert torch.equal(found.scale.half().float(), found.scale.float())
    error, rounded = (
        (x.dequantize() - weight.float()).square().sum() for x in (found, quantize(weight, 4, symmetric=True))
    )
    assert error < 0.85 * rounded
    assert not found.dequantize()[7].any()
    assert found.grouped().minimum is None
