"""Weights in groups of 4 and 8 bits: a quantised model decodes with drafts as without, and as `model.generate` does."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.adapters import adapted
from helpers.eagle import random_head
from helpers.generation import ON_BOTH_CACHES
from helpers.models import check_texts, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, MismatchError, PromptLookup, UnsupportedError
from redrafter.checkpoints.models import check_quantization, load_model
from redrafter.checkpoints.quantization import quantize_model
from redrafter.kernels.grouped_weight import GroupedWeight, quantize_groups
from redrafter.model.linear_layers import forward_bytes, fuse_layers
from redrafter.model.options import SCHEMES as NAMES
from redrafter.model.quantized_layers import SCHEMES, GroupedLinear, quantize_linears, quantized_form, round_to_groups
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.model.weights import NewWeights, snapshot

GREEDY = {"max_new_tokens": 12, "do_sample": False}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}


def quantized(scheme: str = "int4", architecture: str = "llama", **changes: object) -> Any:
    """Return a tiny model that is quantised at loading, and ends at no token."""
    model = tiny_model(architecture, **SIZES | changes)
    quantize_model(model, architecture, scheme)
    model.generation_config.eos_token_id = None
    return model


@ON_BOTH_CACHES
@pytest.mark.parametrize(("scheme", "architecture"), [("int4", "llama"), ("int8", "qwen3"), ("int4", "gemma2")])
def test_drafted_texts_are_those_of_plain_decoding(scheme, architecture, on):
    engine = on(with_tree(quantized(scheme, architecture), tiny_drafter(hidden_size=64), 3, 4))
    assert engine.target.rounding == 0
    check_texts(engine)


def test_a_bfloat16_model_passes_its_self_test_in_float32():
    """A kernel reads scales at their own address, not at that of a copy which the float32 mode has made and dropped."""
    model = tiny_model("llama", **SIZES).to(torch.bfloat16)
    quantize_model(model, "llama", "int4")
    assert Target(model).rounding == 0


@pytest.mark.parametrize("form", [{}, {"recurrence": "gated", "target_layers": (0, 1), "head_rank": 32}, None])
def test_a_quantised_drafter_changes_no_token(form):
    drafter = random_head(hidden_size=64) if form is None else tiny_drafter(hidden_size=64, **form)
    quantize_linears(drafter, "int4", keep=(drafter.unquantized,))
    assert quantized_form(drafter) == "int4 weights in groups of 32"
    check_texts(with_tree(quantized(), drafter, 3, 4))


def test_a_tied_head_has_8_bits_and_the_embedding_stays():
    whole, model = tiny_model("llama", **SIZES), quantized()
    assert torch.equal(model.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert model.lm_head.form == "int8 weights in groups of 32"
    assert quantized_form(model) == "int4 weights in groups of 32"
    read = sum(x.nbytes for name, x in model.state_dict().items() if "embed" not in name)
    assert forward_bytes(model) == read


def test_layers_whose_width_is_no_multiple_of_a_group_stay_as_they_are():
    model = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 4))
    assert quantize_linears(model, "int4") == 128
    assert type(model[0]) is nn.Linear
    with pytest.raises(UnsupportedError, match=r"no linear layers to quantise .* multiple of 32"):
        quantize_model(tiny_model("llama", hidden_size=40, intermediate_size=24, head_dim=10), "mine", "int4")


def test_a_weight_is_quantised_in_pieces_as_it_is_whole(monkeypatch):
    weight = torch.randn(40, 64)
    monkeypatch.setattr("redrafter.model.quantized_layers.MAX_ROUNDED_NUMBERS", 64 * 7)
    for bits in (4, 8):
        found, expected = round_to_groups(weight, bits), quantize_groups(weight, bits)
        assert torch.equal(found.dequantize(), expected.dequantize())


def layer_of(weight: GroupedWeight) -> GroupedLinear:
    features, inputs = weight.shape
    return GroupedLinear(nn.Linear(inputs, features, bias=False), weight)


def test_a_cast_leaves_codes_and_scales_and_moves_biases():
    model = nn.Sequential(nn.Linear(64, 5))
    quantize_linears(model, "int4")
    before = model[0].grouped().dequantize()
    model.to("cpu", torch.bfloat16)
    assert {name: x.dtype for name, x in model[0].state_dict().items()} == {
        "weight": torch.uint8,
        "bias": torch.bfloat16,
        "weight_scale": torch.float16,
        "weight_minimum": torch.float16,
    }
    assert torch.equal(model[0].grouped().dequantize(), before)
    assert model[0](torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


def test_layers_of_equal_groups_are_fused_with_their_scales():
    narrow, wide = (quantize_groups(torch.randn(6, 128), 4) for _ in range(2))
    layers = [layer_of(narrow), layer_of(GroupedWeight(wide.codes, wide.scale.float(), wide.minimum.float()))]
    x = torch.randn(3, 128)
    expected = torch.cat([layer.grouped().dequantize() for layer in layers])
    fused = fuse_layers(layers)
    assert torch.equal(fused.grouped().dequantize(), expected)
    assert torch.equal(torch.cat([layer.grouped().dequantize() for layer in layers]), expected)
    assert torch.allclose(fused(x), x @ expected.T, atol=1e-4)
    assert layers[1].weight.data_ptr() == fused.weight[6:].data_ptr()
    assert fuse_layers(layers).weight.data_ptr() == fused.weight.data_ptr()
    others = [quantize_groups(torch.randn(6, 128), 4, 64), quantize_groups(torch.randn(6, 128), 8)]
    others.append(GroupedWeight(narrow.codes, narrow.scale))
    assert all(fuse_layers([layers[0], layer_of(other)]) is None for other in others)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_new_weights_are_quantised_as_at_loading_and_the_tied_head_with_them(scheme):
    model, new = quantized(scheme), tiny_model("llama", **SIZES)
    with torch.no_grad():
        for x in new.parameters():
            x.mul_(-1.5)
    weights = new.state_dict()
    del weights["lm_head.weight"]
    NewWeights.for_module(model, weights, "tiny").write()
    quantize_model(new, "tiny", scheme)
    before = snapshot(model)
    assert all(torch.equal(x, before[name]) for name, x in new.state_dict().items())
    for x in model.parameters():
        x.data.zero_()
    NewWeights.for_module(model, before, "tiny").write()
    assert all(torch.equal(x, before[name]) for name, x in snapshot(model).items())


def test_new_weights_that_do_not_fit_are_refused():
    model, key = quantized(), "model.layers.0.mlp.up_proj.weight"
    before = snapshot(model)
    model.model.layers[0].mlp.up_proj.requantizes = False  # as the weights of a file
    wrong: dict[str, dict[str, Any]] = {
        f"{key}, which its file has as int4 weights in groups of 32": {key: torch.ones(96, 64)},
        rf"{key} of shape \(96, 32\) instead of \(96, 64\)": {key: torch.ones(96, 32)},
        "which does not become int4 weights": {key: torch.ones(96, 64, dtype=torch.int64)},
        f"{key}_scale of shape .* float32 instead of .* float16": {f"{key}_scale": torch.ones(96, 2)},
    }
    for message, tensors in wrong.items():
        with pytest.raises(MismatchError, match=message):
            NewWeights.for_module(model, before | tensors, "tiny")
    with pytest.raises(MismatchError, match="missing"):
        NewWeights.for_module(model, {f"{key}_scale": before[f"{key}_scale"]}, "tiny")
    del before[f"{key}_minimum"]
    with pytest.raises(MismatchError, match=f"{key} of uint8 without {key}_minimum"):
        NewWeights.for_module(model, before, "tiny")
    large = tiny_model("llama", **SIZES).state_dict()
    large["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    found = NewWeights.for_module(quantized(), large, "tiny").not_finite
    assert found == ["model.layers.1.mlp.up_proj.weight"], "scales are float16"


def test_adapters_are_added_to_the_products_of_groups(tmp_path):
    theirs = adapted(model=quantized(), target_modules=["q_proj", "down_proj"])
    theirs.save_pretrained(tmp_path)
    engine = with_tree(quantized(), tiny_drafter(hidden_size=64), 3, 3)
    engine.load_adapter("one", tmp_path)
    ids, mask = uneven_batch()
    whole, drafted = (engine.generate(ids, mask, adapter="one", speculate=x, **GREEDY) for x in (False, True))
    assert torch.equal(drafted, whole)
    assert torch.equal(whole, theirs.generate(input_ids=ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_cpu_computes_groups_in_float32_unless_asked_for_another_dtype(dtype, tmp_path):
    tiny_model("llama", **SIZES).bfloat16().save_pretrained(tmp_path)
    engine = PromptLookup.from_pretrained(tmp_path, quantization="int4", dtype=dtype)
    assert engine.target.dtype == (torch.float32 if dtype == "auto" else torch.bfloat16)
    assert quantized_form(engine.model) == "int4 weights in groups of 32"
    expected = quantize_groups(tiny_model("llama", **SIZES).model.layers[0].mlp.up_proj.weight.bfloat16(), 4)
    assert torch.equal(engine.model.model.layers[0].mlp.up_proj.dequantize(), expected.dequantize())


def test_without_a_kernel_weights_are_widened_with_a_line(tmp_path, monkeypatch):
    tiny_model("llama", **SIZES).save_pretrained(tmp_path)
    load = {"quantization": "int8", "dtype": "float32", "device": None, "trust_remote_code": False}
    fast = load_model(tmp_path, **load)
    monkeypatch.setattr("redrafter.checkpoints.quantization.is_fast", lambda device: False)
    with pytest.warns(UserWarning, match="ordinary weights with the numbers of its int8 weights in groups of 32"):
        wide = load_model(tmp_path, **load)
    assert type(wide.lm_head) is nn.Linear
    ids = uneven_batch()[0]
    assert torch.allclose(wide(ids).logits, fast(ids).logits, atol=1e-4)


def test_a_drafter_is_trained_through_the_head_of_a_quantised_base():
    base = quantized()
    with Teacher(base) as teacher:
        read = teacher.read_batch(torch.arange(8)[None])
    x = torch.randn(1, 2, 64)
    _, weight = read.fill_head((x, None))
    assert torch.equal(weight, base.lm_head.dequantize())


@pytest.mark.parametrize(
    ("stored", "word", "said"),
    [
        ({}, "awq", r"quantization='awq' \(--quantization awq\): .* is not quantised; leave it out"),
        ({"quant_method": "gptq"}, "awq", "is stored as gptq; leave it out"),
        ({"load_in_4bit": True}, "gguf", "is stored as bitsandbytes; leave it out"),
    ],
)
def test_a_word_for_another_form_of_checkpoint_is_refused_with_the_right_one(stored, word, said, tmp_path):
    model = tiny_model("llama")
    if stored:
        model.config.quantization_config = stored
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=said):
        PromptLookup.from_pretrained(tmp_path, quantization=word)


def test_every_scheme_has_a_name_of_its_own():
    assert tuple(SCHEMES) == NAMES
    with pytest.raises(ArgumentError, match="quantization must be one of fp8, int4, int8"):
        check_quantization("int3", "base")
    with pytest.raises(UnsupportedError, match="has int8 weights in groups of 32 already"):
        quantize_model(quantized("int8"), "mine", "fp8")
