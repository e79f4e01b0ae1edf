"""Quantised bases: opened by the library that made them, decoded as without drafts, and warned of where they cannot be.

Computed in float32 by few layers, where a tree's rounding seldom carries a quantised activation to its next value, and
never does in these texts, so that equality is exact.
"""

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from helpers.command_line import merge
from helpers.models import paged, tiny_drafter, tiny_model
from helpers.quantized import keys, save_compressed
from redrafter import ReDrafter, ReDrafterWarning, UnsupportedError, boxed_pair
from redrafter.attention.mask import TreeSlots
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.quantization import quantize_model
from redrafter.formats.sources import open_base
from redrafter.model.linear_layers import is_quantized, linear_calls, shared_scales
from redrafter.model.target import Target

PROMPT, NEW = torch.tensor([[5, 6, 7, 8]]), 40
# how a base is quantised -> whether tokens share scales
COMPRESSED = {"FP8_DYNAMIC": False, "FP8": False, "W8A8": False, "FP8 per tensor": True, "FP8 keys": False}
TORCHAO = {"Int8 weights": False, "Float8 weights": False, "Int8 per row": False, "Int8 per tensor": True}
SCHEMES = {**COMPRESSED, **TORCHAO}
EXACT = [name for name, shared in SCHEMES.items() if not shared]


def save_torchao(folder: Path, name: str) -> None:
    """Save a tiny base as transformers quantises it by torchao while it loads."""
    pytest.importorskip("torchao")
    from torchao import quantization as ao
    from transformers import TorchAoConfig

    how = {
        "Int8 weights": ao.Int8WeightOnlyConfig,
        "Float8 weights": ao.Float8WeightOnlyConfig,
        "Int8 per row": ao.Int8DynamicActivationInt8WeightConfig,
        "Int8 per tensor": lambda: ao.Int8DynamicActivationInt8WeightConfig(
            granularity=[ao.PerTensor(), ao.PerRow()],
        ),
    }[name]
    plain = folder.with_name("plain")
    tiny_model("llama").save_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=TorchAoConfig(how()))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Return a function that merges the quantised base of a name with a bfloat16 drafter, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("quantized")
            (save_compressed if name in COMPRESSED else save_torchao)(folder / "base", name)
            norms = embedding_norms(tiny_model("llama").get_input_embeddings().weight)
            drafter: Any = tiny_drafter(draft_beams=3, base_embedding_norms=norms)
            drafter.to(torch.bfloat16).save_pretrained(folder / "drafter")
            made[name] = merge(folder / "base", folder / "drafter", folder / "merged")
        return made[name]

    return make


def generated(engine, **kwargs) -> torch.Tensor:
    """Return a text of `NEW` tokens."""
    return engine.generate(PROMPT, max_new_tokens=NEW, eos_token_id=[], **kwargs)


@pytest.mark.parametrize("name", EXACT)
def test_merged_pair_of_a_quantised_base_decodes_as_the_base_does(merged, name):
    engine = ReDrafter.from_pretrained(merged(name))
    engine.target.model.generation_config.eos_token_id = None
    own = engine.target.model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert own.shape == (1, PROMPT.shape[1] + NEW)
    assert torch.equal(generated(engine), own)
    assert torch.equal(generated(engine, speculate=False), own)
    # A GPU would merge layers that read the same tensor.
    assert torch.equal(generated(paged(ReDrafter.from_pretrained(merged(name)))), own)
    sampled = [generated(engine, do_sample=True, seed=3, speculate=drafts) for drafts in (True, False)]
    assert torch.equal(*sampled)


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "Int8 weights"])
def test_quantised_layers_are_no_plain_products(merged, name):
    model = AutoModelForCausalLM.from_pretrained(merged(name))
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear  # nothing of the class tells
    with linear_calls(model) as calls, torch.no_grad():
        model(PROMPT)
    assert [name for name, *_ in calls] == ["lm_head"]


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "Int8 weights"])
def test_base_and_drafter_fit_each_other_in_the_dtype_of_the_arithmetic(merged, name):
    folder = merged(name).parent
    stored = {tensor.dtype for tensor in open_base(folder / "base").tensors.values()}
    assert {torch.float8_e4m3fn, torch.int8} & stored  # it is stored quantised
    engine = ReDrafter.from_pretrained(folder / "base", folder / "drafter")
    assert {x.dtype for x in engine.drafter.parameters()} == {engine.target.dtype} == {torch.float32}
    half = ReDrafter.from_pretrained(merged(name), dtype="bfloat16")
    assert {x.dtype for x in half.drafter.parameters()} == {half.target.dtype} == {torch.bfloat16}
    assert generated(half).shape == (1, PROMPT.shape[1] + NEW)


def test_dtype_of_a_quantised_embedding_is_that_of_what_it_gives():
    class StoredInFP8(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight.float()[ids]

    model: Any = tiny_model("llama")
    table = StoredInFP8(*model.get_input_embeddings().weight.shape)
    model.set_input_embeddings(table.to(torch.float8_e4m3fn))
    assert model.dtype == torch.float8_e4m3fn
    target = Target(model)
    assert target.dtype == target.embedding(PROMPT).dtype == torch.float32


def test_weights_that_are_unpacked_in_the_first_forward_can_still_be_worked_on(merged):
    model = AutoModelForCausalLM.from_pretrained(merged("FP8_DYNAMIC"))
    Target(model)
    assert not any(x.is_inference() for x in model.parameters())


@pytest.mark.parametrize("name", SCHEMES)
def test_one_warning_names_the_scheme_whose_scales_tokens_share(merged, name):
    folder = merged(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = ReDrafter.from_pretrained(folder)
    ours = [each for each in caught if each.category is ReDrafterWarning]  # so that the program shows it
    # A scheme whose scales are of single tokens may round inside its layers, which has a warning of its own.
    assert len(ours) <= 1
    assert ["per-tensor" in str(each.message) for each in ours if "rounds numbers" not in str(each.message)] == (
        [True] if SCHEMES[name] else []
    )
    if SCHEMES[name]:
        library = "compressed-tensors" if name in COMPRESSED else "torchao"
        assert ours[0].filename == __file__
        for said in ("LlamaForCausalLM", f"quantised with {library}, ", "per-tensor"):
            assert said in str(ours[0].message)
        assert generated(engine).shape == (1, PROMPT.shape[1] + NEW)  # and it runs


@pytest.mark.parametrize("own", [False, True], ids=["compressed-tensors", "our fp8"])
def test_a_deep_base_whose_inputs_are_rounded_is_bound_unless_its_tree_sees_too_much(tmp_path, monkeypatch, own):
    model = AutoModelForCausalLM.from_pretrained(boxed_pair(), dtype=torch.float32)
    if own:
        quantize_model(model, "boxed", "fp8")
    else:
        save_compressed(tmp_path, "FP8 per tensor", model)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    warned = nullcontext if own else partial(pytest.warns, UserWarning, match="per-tensor")
    with warned():
        Target(model)

    seen = TreeSlots.seen

    def all_seen(slots, kind):
        return seen(replace(slots, ancestors=torch.ones_like(slots.ancestors)), kind)

    monkeypatch.setattr(TreeSlots, "seen", all_seen)
    with pytest.raises(UnsupportedError, match="other logits"):
        Target(model)


def groups(**activations: object) -> dict:
    """Return a config of compressed-tensors that quantises activations so."""
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], **activations}}}


def inputs(**args: object) -> dict:
    """Return a config of compressed-tensors with these arguments for input activations in FP8."""
    return groups(input_activations={"num_bits": 8, "type": "float", **args})


def ao(kind: str, **data: object) -> dict:
    """Return a config of torchao of that kind, with these fields."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


ROW, TENSOR = ({"_type": kind, "_version": 1, "_data": {}} for kind in ("PerRow", "PerTensor"))
FP8, INT8 = "Float8DynamicActivationFloat8WeightConfig", "Int8DynamicActivationInt8WeightConfig"
NVFP4 = "NVFP4DynamicActivationNVFP4WeightConfig"
INT8_PARTS = {"_default": None, "re:.*mlp.*": ao(INT8, granularity=[TENSOR, ROW])["quant_type"]["default"]}

OWN = {
    "per token": inputs(dynamic=True, strategy="token"),
    "group unnamed": inputs(dynamic=True, group_size=128),
    "static": inputs(dynamic=False, strategy="tensor"),
    "local": inputs(dynamic="local", strategy="tensor_group", group_size=16),
    "no activations": groups(input_activations=None, output_activations=None),
    "preset": {"quant_method": "compressed-tensors", "config_groups": {"FP8_DYNAMIC": ["Linear"]}},
    "static keys": keys(dynamic=False, strategy="tensor"),
    "ao fp8 rows": ao(FP8, granularity=[ROW, ROW]),
    "ao int8": ao(INT8),
    "ao int8 weights per tensor": ao(INT8, granularity=[ROW, TENSOR]),
    "ao static": ao("Int8StaticActivationInt8WeightConfig", granularity=TENSOR),
    "ao nvfp4 static": ao(NVFP4, use_dynamic_per_tensor_scale=False),
    "bnb 4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
    "bnb 8 without outliers": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "unknown": {"quant_method": "of tomorrow", "dynamic": True},
}
TOKENS_SHARE = "compressed-tensors, dynamic per-{}"
AO_SHARES, BNB = "torchao, {} with dynamic per-tensor activations", "bitsandbytes, LLM.int8(), whose outlier columns"
OUTPUTS = {"dynamic": True, "strategy": "tensor"}
SHARED = {  # config -> what it is called
    "strategy unnamed": (inputs(dynamic=True), TOKENS_SHARE.format("tensor activations")),
    "outputs": (
        groups(input_activations=None, output_activations=OUTPUTS),
        TOKENS_SHARE.format("tensor activations"),
    ),
    "keys per token": (keys(dynamic=True, strategy="token"), TOKENS_SHARE.format("token keys and values")),
    "ao fp8 unnamed": (ao(FP8), AO_SHARES.format(FP8)),
    "ao int8 tensor": (ao(INT8, granularity=TENSOR), AO_SHARES.format(INT8)),
    "ao nvfp4": (ao(NVFP4), AO_SHARES.format(NVFP4)),
    "ao by layer": (ao("FqnToConfig", fqn_to_config=INT8_PARTS), AO_SHARES.format(INT8)),
    "bnb 8 unnamed": ({"load_in_8bit": True}, f"{BNB} are found over all tokens"),
    "bnb 8, an object": (BitsAndBytesConfig(load_in_8bit=True), f"{BNB} are found over all tokens"),
}


def config_with(quantization: object) -> Any:
    """Return a stand-in for a model's config with this quantisation."""
    inner = SimpleNamespace()
    return SimpleNamespace(quantization_config=quantization, get_text_config=lambda decoder: inner)


@pytest.mark.parametrize("name", OWN)
def test_scales_of_a_token_s_own_are_told(name):
    config = config_with(OWN[name])
    assert is_quantized(config)
    assert shared_scales(config) is None


@pytest.mark.parametrize("name", SHARED)
def test_scales_that_tokens_share_are_named(name):
    settings, called = SHARED[name]
    assert shared_scales(config_with(settings)) == called
    outer = config_with(None)
    outer.get_text_config = lambda decoder: config_with(settings)  # of a model that also sees
    assert is_quantized(outer)
    assert shared_scales(outer) == called


def test_torchao_s_own_names_and_defaults_are_those_read_here():
    pytest.importorskip("torchao")
    from torchao import quantization as ao
    from transformers import TorchAoConfig

    fp8 = ao.Float8DynamicActivationFloat8WeightConfig
    expected = [(fp8(), True), (fp8(granularity=ao.PerRow()), False)]
    expected += [(ao.Int8DynamicActivationInt8WeightConfig(), False), (ao.Float8WeightOnlyConfig(), False)]
    for quantization, shared in expected:
        config = TorchAoConfig(quantization)
        assert (shared_scales(config_with(config)) is not None) == shared
        written = json.loads(json.dumps(config.to_dict()))
        assert shared_scales(config_with(written)) == shared_scales(config_with(config))
