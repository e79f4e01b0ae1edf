"""FP8 weights, and inputs: a quantised model decodes with drafts as without, and as `model.generate` does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import redrafter.attention.mask
from helpers.eagle import random_head
from helpers.models import paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter, UnsupportedError, boxed_pair
from redrafter.attention.mask import visible_slots
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.models import quantize_drafter, quantize_model
from redrafter.engine.options import EngineOptions
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.model.batch_invariance import support_of
from redrafter.model.linear_layers import (
    Float8Linear,
    FusedLinears,
    float8_scheme,
    linear_calls,
    quantize_linears,
    same_inputs,
)
from redrafter.model.patch import ModelPatch
from redrafter.model.target import Target

NEW = 20
ARCHITECTURES = ["llama", "gemma2", "qwen3"]
SCHEMES = ["fp8", "fp8_dynamic"]
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}


def quantized(architecture: str = "llama", scheme: str = "fp8", **changes: object) -> Any:
    """Return a tiny model with FP8 weights, which ends at no token."""
    model = tiny_model(architecture, **changes)
    quantize_model(model, architecture, quantization=scheme)
    model.generation_config.eos_token_id = None
    return model


def own_text(model: Any) -> torch.Tensor:
    ids, mask = uneven_batch()
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def check(engine: Any) -> None:
    """Fail unless drafts change no token, and greedy texts are those of `model.generate`."""
    ids, mask = uneven_batch()
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False), own_text(engine.model))
    sampled = [engine.generate(ids, mask, max_new_tokens=NEW, speculate=s, **SAMPLING) for s in (True, False)]
    assert torch.equal(*sampled)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return a folder with a tiny base, a drafter and an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("fp8")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "base")
    norms = embedding_norms(model.get_input_embeddings())
    tiny_drafter(draft_beams=3, base_embedding_norms=norms).save_pretrained(folder / "drafter")
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafted_texts_are_those_of_plain_decoding(architecture, scheme):
    check(with_tree(quantized(architecture, scheme), tiny_drafter(), 3, 4))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_that_read_the_same_tensor_are_one_product(architecture, scheme):
    model = quantized(architecture, scheme)
    before = own_text(model)
    engine = paged(with_tree(model, tiny_drafter(), 3, 4))
    ids, mask = uneven_batch()
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False), before)
    assert engine.target.varlen_forward.linears_fused


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_merged_product_is_that_of_each_layer(biased, scheme):
    model = quantized("llama", scheme, attention_bias=biased)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    x = torch.arange(8)[None]
    with torch.no_grad(), linear_calls(model) as calls:
        before = model(x).logits
    groups = same_inputs(calls)
    assert ["q_proj", "k_proj", "v_proj"] in [[name.split(".")[-1] for name in group] for group in groups]
    fused = FusedLinears(model, groups)
    layer = model.model.layers[0].self_attn
    with ModelPatch() as patch, torch.no_grad():
        fused.apply(patch)
        assert type(model.model.layers[0].self_attn.q_proj) is not Float8Linear
        torch.testing.assert_close(model(x).logits, before)
    assert layer.q_proj.weight_scale.data_ptr() + 4 * 32 == layer.k_proj.weight_scale.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_by_a_sixteenth_at_most(dtype):
    layer = nn.Linear(300, 40).to(dtype)
    layer.weight.data[3] = 0
    layer.weight.data[4] *= 1e-6
    found = Float8Linear(layer)
    wide = found.weight.double() * found.weight_scale.double()[:, None]
    largest = layer.weight.double().abs().amax(dim=1, keepdim=True)
    bound = (layer.weight.double().abs() / 16).maximum(
        largest * 2.0**-17
    )  # half a unit of three bits; of the least ones
    assert bool(((wide - layer.weight.double()).abs() <= bound).all())
    assert found.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(3, 300).to(dtype)
    torch.testing.assert_close(found(x), nn.functional.linear(x, wide.to(dtype), layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300,), (2, 3, 300), (0, 300)])
def test_inputs_are_rounded_where_they_shall_be(shape, dtype):
    layer = nn.Linear(300, 40).to(dtype)
    weights_alone, found = Float8Linear(layer), Float8Linear(layer, rounds_inputs=True)
    x = torch.randn(shape).to(dtype)
    assert torch.equal(found(x), weights_alone(round_inputs(x).values))
    assert not x.numel() or not torch.equal(found(x), weights_alone(x))


def test_other_tokens_of_a_forward_do_not_change_how_one_is_rounded():
    layer = Float8Linear(nn.Linear(16, 16, bias=False), rounds_inputs=True)
    x = torch.randn(1, 16)
    torch.testing.assert_close(layer(torch.cat([x, 1e4 * torch.randn(9, 16)]))[:1], layer(x))


def test_the_largest_weights_of_a_row_are_not_cut():
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = torch.tensor([[448.0, 1, 2, 3], [449.0, 1, 2, 3], [-0.5, 0.25, 0, 0.125]])
    found = Float8Linear(layer)
    assert torch.equal(found.weight_scale, torch.tensor([1.0, 2.0, 2.0**-9]))
    assert torch.equal(
        found(torch.eye(4)).T, torch.tensor([[448.0, 1, 2, 3], [448.0, 1, 2, 3], [-0.5, 0.25, 0, 0.125]])
    )


def test_linear_layers_take_a_quarter_of_float32_and_the_head_stays():
    model = tiny_model("llama")
    before = {name: module.weight.nbytes for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantize_model(model, "llama")
    for name, size in before.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, Float8Linear) == (name != "lm_head")
        assert layer.weight.nbytes == (size if name == "lm_head" else size // 4)


def test_a_cast_leaves_weights_and_scales_and_moves_biases():
    layer = Float8Linear(nn.Linear(6, 5))
    before = layer.weight.float() * layer.weight_scale[:, None]
    layer.to("cpu", torch.bfloat16)
    dtypes = layer.weight.dtype, layer.weight_scale.dtype, layer.bias.dtype
    assert dtypes == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    assert torch.equal(layer.weight.float() * layer.weight_scale[:, None], before)
    assert layer(torch.randn(2, 6).bfloat16()).dtype == torch.bfloat16


def test_a_layer_that_stands_in_two_places_stays_one():
    shared = nn.Linear(4, 4)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert quantize_linears(model) == 16
    assert model[0][0] is model[1][0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_bound_and_decodes(dtype, scheme):
    model = tiny_model("llama").to(dtype)
    quantize_model(model, "llama", quantization=scheme)
    engine = with_tree(model, tiny_drafter().to(dtype), 3, 4)
    assert engine.target.dtype == dtype
    assert engine.generate(uneven_batch()[0], max_new_tokens=NEW, do_sample=False, eos_token_id=[]).shape[1] == 31


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_engine_quantises_base_and_drafter_as_it_loads(checkpoint, scheme):
    engine = ReDrafter.from_pretrained(
        checkpoint / "base", checkpoint / "drafter", quantization=scheme, draft_quantization=scheme
    )
    assert float8_scheme(engine.model) == scheme
    assert float8_scheme(engine.drafter) == scheme
    assert isinstance(engine.drafter.lm_head, Float8Linear)
    check(engine)


FORMS = [{}, {"rnn": False}, {"recurrence": "gated", "target_layers": (0, 1), "head_rank": 16, "context_window": 8}]


@pytest.mark.parametrize("form", [*FORMS, {"recurrence": "trtllm"}, {"num_draft_layers": 0}], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_drafter_changes_no_token(form, scheme):
    drafter = tiny_drafter(**form)
    quantize_drafter(drafter, scheme)
    assert float8_scheme(drafter)
    drafter.join_recurrence()  # as on a GPU
    check(with_tree(quantized(), drafter, 3, 4))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_drafter_drafts_about_what_it_did(scheme):
    whole, fp8 = tiny_drafter(recurrence="gated"), tiny_drafter(recurrence="gated")
    quantize_drafter(fp8, scheme)
    embedding, hidden = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    with torch.no_grad():
        first, second = (drafter.step(embedding, None, drafter.begin(hidden))[0] for drafter in (whole, fp8))
    assert not torch.equal(first, second)
    assert float((first - second).std() / first.std()) < 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_eagle_head_changes_no_token(scheme):
    model = quantized()
    head = random_head()
    quantize_drafter(head, scheme)
    check(with_tree(model, head, 3, 4))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_draft_model_changes_no_token(checkpoint, scheme):
    same = {"tokenizer": boxed_pair(), "draft_tokenizer": boxed_pair()}
    engine = DraftTarget.from_pretrained(checkpoint / "base", checkpoint / "base", draft_quantization=scheme, **same)
    assert float8_scheme(engine.draft_model.model) == scheme
    assert float8_scheme(engine.model) is None
    check(engine)


def test_prompt_lookup_takes_an_fp8_base(checkpoint):
    engine = PromptLookup.from_pretrained(checkpoint / "base", quantization="fp8")
    assert float8_scheme(engine.model)
    check(engine)


@pytest.mark.parametrize("argument", ["quantization", "draft_quantization"])
def test_unknown_quantisations_are_refused_before_anything_is_loaded(checkpoint, argument):
    with pytest.raises(ArgumentError, match=f"{argument} must be 'fp8', 'fp8_dynamic' or None, got 'int4'"):
        ReDrafter.from_pretrained("nowhere", checkpoint / "drafter", **{argument: "int4"})
    with pytest.raises(ArgumentError, match=f"{argument} must be 'fp8', 'fp8_dynamic' or None, got 'int4'"):
        DraftTarget.from_pretrained("nowhere", "nowhere", **{argument: "int4"})


def test_what_is_loaded_is_not_quantised(checkpoint):
    model = tiny_model("llama")
    with pytest.raises(ArgumentError, match="quantization: for a model that is loaded by name"):
        PromptLookup.from_pretrained(model, quantization="fp8")
    with pytest.raises(ArgumentError, match="quantization: for a model that is loaded by name"):
        PromptLookup.from_pretrained(Target(model), quantization="fp8")
    with pytest.raises(ArgumentError, match="draft_quantization: for a model that is loaded by name"):
        ReDrafter.from_pretrained(checkpoint / "base", tiny_drafter(), draft_quantization="fp8")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_is_quantised_already_is_refused(scheme):
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedError, match=f"mine is quantised already: leave out quantization='{scheme}'"):
        quantize_model(model, "mine", quantization=scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_without_linear_layers_is_refused(scheme):
    with pytest.raises(UnsupportedError, match=rf"mine has no linear layers .* \(--quantization {scheme}\)"):
        quantize_model(tiny_model("gpt2"), "mine", quantization=scheme)


def test_a_dtype_that_is_not_multiplied_with_fp8_is_refused():
    with pytest.raises(ArgumentError, match="mine has float64: add dtype='bfloat16'"):
        quantize_model(tiny_model("llama").double(), "mine")


def test_a_model_that_is_not_in_memory_is_refused():
    model = tiny_model("llama")
    model.model.layers[0].to("meta")
    with pytest.raises(UnsupportedError, match="leave out device_map"):
        quantize_model(model, "mine")


def test_a_deep_model_whose_inputs_are_rounded_is_bound_unless_its_tree_sees_too_much(monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    quantize_model(model, "boxed", quantization="fp8_dynamic")
    Target(model)

    def all_visible(length, depth, ancestors, *more):
        return visible_slots(length, depth, torch.ones_like(ancestors), *more)

    monkeypatch.setattr(redrafter.attention.mask, "visible_slots", all_visible)
    with pytest.raises(UnsupportedError, match="other logits"):
        Target(model)


def test_experts_that_stay_as_they_are_are_told():
    with pytest.warns(UserWarning, match=r"only \d+% of the weights of mine"):
        quantize_model(tiny_model("qwen3_moe"), "mine")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariance_is_refused_by_name(scheme):
    model = quantized(scheme=scheme)
    target = Target(model)
    assert "its weights are FP8" in str(support_of(target, target.paged_shapes).reason)
    with pytest.raises(UnsupportedError, match=rf"leave out quantization='{scheme}' \(--quantization {scheme}\)"):
        ReDrafter(Target(model), tiny_drafter(), options=EngineOptions(batch_invariant=True))
