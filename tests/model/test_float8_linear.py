"""FP8 weights, and inputs: a quantised model decodes with drafts as without, and as `model.generate` does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.eagle import random_head
from helpers.generation import ON_BOTH_CACHES
from helpers.models import check_texts, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter, UnsupportedError, boxed_pair
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.quantization import quantize_model
from redrafter.engine.options import EngineOptions
from redrafter.features import FP8_WEIGHTS
from redrafter.kernels.float8_inputs import round_inputs
from redrafter.model.linear_layers import FusedLinears, linear_calls, same_inputs
from redrafter.model.patch import ModelPatch
from redrafter.model.quantized_layers import Float8Linear, quantize_linears, quantized_form
from redrafter.model.target import Target

NEW = 20
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def quantized(architecture: str = "llama", **changes: object) -> Any:
    """Return a tiny model with FP8 weights, which ends at no token."""
    model = tiny_model(architecture, **changes)
    quantize_model(model, architecture, "fp8")
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return a folder with a tiny base, a drafter and an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("fp8")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "base")
    norms = embedding_norms(model.get_input_embeddings().weight)
    tiny_drafter(draft_beams=3, base_embedding_norms=norms).save_pretrained(folder / "drafter")
    return folder


@ON_BOTH_CACHES
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_drafted_texts_are_those_of_plain_decoding(architecture, on):
    """On a paged cache, layers that read the same tensor are one product."""
    engine = on(with_tree(quantized(architecture), tiny_drafter(), 3, 4))
    check_texts(engine)
    assert engine.target.varlen_forward.linears_fused == (engine.memory is not None)


@pytest.mark.parametrize("biased", [False, True])
def test_a_merged_product_is_that_of_each_layer(biased):
    model = quantized("llama", attention_bias=biased)
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
        fused.add_to(patch)
        assert type(model.model.layers[0].self_attn.q_proj) is not Float8Linear
        torch.testing.assert_close(model(x).logits, before)
    assert layer.q_proj.weight_scale.data_ptr() + 4 * 32 == layer.k_proj.weight_scale.data_ptr()


@each_dtype
def test_weights_are_rounded_by_a_sixteenth_at_most(dtype):
    layer = nn.Linear(300, 40).to(dtype)
    layer.weight.data[3] = 0
    layer.weight.data[4] *= 1e-6
    found = Float8Linear(layer)
    wide = found.weight.double() * found.weight_scale.double()[:, None]
    largest = layer.weight.double().abs().amax(dim=1, keepdim=True)
    bound = (layer.weight.double().abs() / 16).maximum(largest * 2.0**-17)  # half a unit of three bits; of the least
    assert bool(((wide - layer.weight.double()).abs() <= bound).all())
    assert found.weight.dtype == torch.float8_e4m3fn


@each_dtype
@pytest.mark.parametrize("shape", [(300,), (2, 3, 300), (0, 300)])
def test_inputs_are_rounded_token_by_token(shape, dtype):
    found, x = Float8Linear(nn.Linear(300, 40).to(dtype)), torch.randn(shape).to(dtype)
    wide = (found.weight.double() * found.weight_scale.double()[:, None]).to(dtype)
    assert torch.equal(found(x), nn.functional.linear(round_inputs(x).values, wide, found.bias))
    assert not x.numel() or not torch.equal(found(x), nn.functional.linear(x, wide, found.bias))
    x, others = x.view(-1, 300)[:1], torch.full((9, 300), 1e4, dtype=dtype)  # which do not change how one is rounded
    torch.testing.assert_close(found(torch.cat([x, others]))[: len(x)], found(x))


def test_the_largest_weights_of_a_row_are_not_cut():
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = torch.tensor([[448.0, 1, 2, 3], [449.0, 1, 2, 3], [-0.5, 0.25, 0, 0.125]])
    found = Float8Linear(layer)
    assert torch.equal(found.weight_scale, torch.tensor([1.0, 2.0, 2.0**-9]))
    layer.weight.data[1, 0] = 448.0
    assert torch.equal(found(torch.eye(4)).T, layer.weight)


def test_linear_layers_take_a_quarter_of_float32_and_the_head_stays():
    model = tiny_model("llama")
    before = {name: module.weight.nbytes for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantize_model(model, "llama", "fp8")
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
    assert quantize_linears(model, "fp8") == 16
    assert model[0][0] is model[1][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_bound_and_decodes(dtype):
    model = tiny_model("llama").to(dtype)
    quantize_model(model, "llama", "fp8")
    engine = with_tree(model, tiny_drafter().to(dtype), 3, 4)
    assert engine.target.dtype == dtype
    assert engine.generate(uneven_batch()[0], max_new_tokens=NEW, do_sample=False, eos_token_id=[]).shape[1] == 31


def test_an_engine_quantises_what_it_loads(checkpoint):
    both = {"quantization": "fp8", "draft_quantization": "fp8"}
    engine = ReDrafter.from_pretrained(checkpoint / "base", checkpoint / "drafter", **both)
    assert quantized_form(engine.model)
    assert quantized_form(engine.drafter)
    assert isinstance(engine.drafter.lm_head, Float8Linear)
    check_texts(engine)
    same = {"tokenizer": boxed_pair(), "draft_tokenizer": boxed_pair()}
    engine = DraftTarget.from_pretrained(checkpoint / "base", checkpoint / "base", draft_quantization="fp8", **same)
    assert quantized_form(engine.draft_model.model)
    assert not quantized_form(engine.model)
    check_texts(engine)
    engine = PromptLookup.from_pretrained(checkpoint / "base", quantization="fp8")
    assert quantized_form(engine.model)
    check_texts(engine)


FORMS = [{}, {"rnn": False}, {"recurrence": "gated", "target_layers": (0, 1), "head_rank": 16, "context_window": 8}]
FORMS += [{"recurrence": "trtllm"}, {"num_draft_layers": 0}, None]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_fp8_drafter_changes_no_token(form):
    drafter = random_head() if form is None else tiny_drafter(**form)
    quantize_linears(drafter, "fp8", keep=(drafter.unquantized,))
    assert quantized_form(drafter)
    engine = with_tree(quantized(), drafter, 3, 4)
    if form is not None and drafter.config.rnn:
        drafter.tabulate(engine.target.embedding)  # as on a GPU
    check_texts(engine)


def test_an_fp8_drafter_drafts_about_what_it_did():
    whole, fp8 = tiny_drafter(recurrence="gated"), tiny_drafter(recurrence="gated")
    quantize_linears(fp8, "fp8", keep=(fp8.unquantized,))
    embedding, hidden = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    with torch.no_grad():
        first, second = (drafter.step(embedding, None, drafter.begin(hidden))[0] for drafter in (whole, fp8))
    assert not torch.equal(first, second)
    assert float((first - second).std() / first.std()) < 0.1


def test_unknown_quantisations_are_refused_before_anything_is_loaded():
    for engine in (ReDrafter, DraftTarget):
        for argument in ("quantization", "draft_quantization"):
            with pytest.raises(ArgumentError, match=f"{argument} must be one of fp8, .* got 'int3'"):
                engine.from_pretrained("nowhere", "nowhere", **{argument: "int3"})


def test_what_is_loaded_is_not_quantised(checkpoint):
    model = tiny_model("llama")
    for given in (model, Target(model)):
        with pytest.raises(ArgumentError, match="leave quantization out"):
            PromptLookup.from_pretrained(given, quantization="fp8")
    with pytest.raises(ArgumentError, match="leave draft_quantization out"):
        ReDrafter.from_pretrained(checkpoint / "base", tiny_drafter(), draft_quantization="fp8")


def quantized_already() -> Any:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


def partly_on_meta() -> Any:
    model = tiny_model("llama")
    model.model.layers[0].to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (quantized_already, UnsupportedError, "mine: FP8 weights .* quantised exclude .*leave out quantization='fp8'"),
        (lambda: tiny_model("gpt2"), UnsupportedError, r"mine has no linear layers .* \(--quantization fp8\)"),
        (lambda: tiny_model("llama").double(), ArgumentError, "mine has float64: add dtype='bfloat16'"),
        (partly_on_meta, UnsupportedError, "leave out device_map"),
    ],
)
def test_a_model_that_cannot_be_quantised_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        quantize_model(make(), "mine", "fp8")


def test_experts_that_stay_as_they_are_are_told():
    with pytest.warns(UserWarning, match=r"only \d+% of the weights of mine"):
        quantize_model(tiny_model("qwen3_moe"), "mine", "fp8")


def test_batch_invariance_is_refused_by_name():
    model = quantized()
    target = Target(model)
    assert FP8_WEIGHTS in target.features
    with pytest.raises(UnsupportedError, match=r"leave out quantization='fp8' \(--quantization fp8\)"):
        ReDrafter(Target(model), tiny_drafter(), options=EngineOptions(batch_invariant=True))
