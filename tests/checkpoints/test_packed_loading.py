"""Bases that AWQ, GPTQ, compressed-tensors or torchao has packed, loaded without these packages."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig, TorchAoConfig

from helpers.models import tiny_drafter, tiny_model
from helpers.packed import AWQ, GPTQ, TORCHAO, as_awq, as_compressed, as_gptq, save_packed
from redrafter import CheckpointError, ReDrafter, ReDrafterWarning, UnsupportedError
from redrafter.checkpoints import quantization
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.packed_loading import packed_arguments
from redrafter.model.linear_layers import is_quantized
from redrafter.model.quantized_layers import GroupedLinear, quantize_linears

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FORMATS = {
    "awq": (AWQ, as_awq),
    "gptq": (GPTQ, as_gptq),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, as_gptq),
}
PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Have grouped layers on every device."""
    monkeypatch.setattr(quantization, "is_fast", lambda device: True)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_bases_decode_as_transformers_does_with_their_numbers(tmp_path, name):
    plain = tiny_model("llama", **SIZES)
    save_packed(tmp_path, plain, *FORMATS[name])
    norms = embedding_norms(plain.get_input_embeddings().weight)
    drafter = tiny_drafter(hidden_size=64, draft_beams=3, base_embedding_norms=norms)
    engine = ReDrafter.from_pretrained(tmp_path, drafter, dtype="float32")
    grouped = [x for x in engine.target.model.modules() if isinstance(x, GroupedLinear)]
    assert len(grouped) == 7 * plain.config.num_hidden_layers
    assert not is_quantized(engine.target.model.config)
    expected = plain.generate(PROMPT, max_new_tokens=30, do_sample=False, eos_token_id=None)
    for speculate in (True, False):
        assert torch.equal(engine.generate(PROMPT, max_new_tokens=30, eos_token_id=[], speculate=speculate), expected)
    assert torch.equal(engine.target.model.generate(PROMPT, max_new_tokens=30, eos_token_id=None), expected)


def load(folder, **options):
    """Load a model in float32, on the CPU."""
    return load_model(folder, **({"dtype": "float32", "device": None, "trust_remote_code": False} | options))


def grouped_layers(model) -> list[str]:
    """Return the names of grouped layers."""
    return [name for name, layer in model.named_modules() if isinstance(layer, GroupedLinear)]


def logits(model) -> torch.Tensor:
    """Return the logits of the prompt."""
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_biases_and_merged_projections(tmp_path, kind):
    plain = tiny_model(kind, **SIZES)
    with torch.no_grad():
        for name, bias in plain.named_parameters():
            bias.normal_() if name.endswith("bias") else None
    model = load(save_packed(tmp_path, plain, GPTQ, as_gptq))
    assert len(grouped_layers(model)) == 3 * (4 if kind == "phi3" else 7)
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)


def test_without_a_kernel_all_weights_are_dequantised(tmp_path, monkeypatch):
    plain = tiny_model("llama", **SIZES).half()
    save_packed(tmp_path, plain)
    assert load(tmp_path, dtype="auto").dtype == torch.float32  # activations
    monkeypatch.setattr(quantization, "is_fast", lambda device: False)
    with pytest.warns(ReDrafterWarning, match="int4 weights in groups of 32"):
        model = load(tmp_path, dtype="float16")
    assert not grouped_layers(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)


def test_layers_with_permuted_groups_are_dequantised_with_a_warning(tmp_path):
    plain = tiny_model("llama", **SIZES)
    save_packed(tmp_path, plain, GPTQ | {"desc_act": True}, as_gptq)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    state[f"{name}.g_idx"] = state[f"{name}.g_idx"].flip(0).contiguous()
    for part in ("scales", "qzeros"):
        state[f"{name}.{part}"] = state[f"{name}.{part}"].flip(0).contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(ReDrafterWarning, match="1 packed weights of .* such as model.layers.1.mlp.down_proj.weight"):
        model = load(tmp_path)
    assert len(grouped_layers(model)) == 20
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_bases_of_compressed_tensors_equal_those_that_it_loads_itself(tmp_path, bits):
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    entries = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    entries |= {"ignore": ["lm_head"], "quantization_status": "compressed", "bits": bits}
    save_packed(tmp_path, tiny_model("llama", **SIZES), entries, as_compressed)
    ours = load(tmp_path)
    assert len(grouped_layers(ours)) == 21
    theirs = load(tmp_path, quantization_config=CompressedTensorsConfig())
    assert not grouped_layers(theirs)
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-2)  # float16 there


def test_bases_of_torchao_equal_those_that_it_loads_itself(tmp_path):
    ao = pytest.importorskip("torchao.quantization")
    plain, folder = tmp_path / "plain", tmp_path / "packed"
    tiny_model("llama", **SIZES).save_pretrained(plain)
    kwargs = {"quantization_config": TorchAoConfig(ao.Int8WeightOnlyConfig())}
    AutoModelForCausalLM.from_pretrained(plain, **kwargs).save_pretrained(folder)
    ours, theirs = load(folder), load(folder, **kwargs)
    assert len(grouped_layers(ours)) == 21
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)


def test_a_packed_base_is_quantised_once(tmp_path):
    save_packed(tmp_path, tiny_model("llama", **SIZES))
    with pytest.raises(UnsupportedError, match="int4 weights in groups of 32 already"):
        load(tmp_path, quantization="fp8")


FAULTS = {
    "it has no scales": lambda state: state.pop(f"{UP}.scales"),
    "its shape is (128, 32) instead of (128, 64)": lambda state: [
        change(state, part, lambda x: x[: len(x) // 2]) for part in ("qweight", "g_idx")
    ],
    "its scales and codes of zero are not 128 by the number of its groups": lambda state: change(
        state, "scales", lambda x: x[:, 1:]
    ),
    "its scales or offsets are not all finite": lambda state: change(
        state, "scales", lambda x: x.index_fill(0, torch.tensor([1]), float("nan"))
    ),
    "its codes are torch.float32": lambda state: change(state, "qweight", Tensor.float),
    "g_idx does not name one of its 2 groups": lambda state: change(state, "g_idx", lambda x: x - 1),
    "g_idx does not name one of its 2 groups for": lambda state: change(state, "g_idx", lambda x: x + 1),
    "g_idx does not name one of its 2 groups for each": lambda state: change(state, "g_idx", lambda x: x[1:]),
}
UP = "model.layers.0.mlp.up_proj"


def change(state, part, how):
    """Change a tensor of a layer in a checkpoint."""
    state[f"{UP}.{part}"] = how(state[f"{UP}.{part}"]).contiguous()


@pytest.mark.parametrize("said", FAULTS)
def test_tensors_that_make_no_weight_are_refused_by_file_and_name(said, tmp_path):
    save_packed(tmp_path, tiny_model("llama", **SIZES), GPTQ, as_gptq)
    state = load_file(file := tmp_path / "model.safetensors")
    FAULTS[said](state)
    save_file(state, file, {"format": "pt"})
    line = f"{file} cannot be read: the gptq weight {UP}.weight: {said}"
    with pytest.raises(CheckpointError, match=rf"^{re.escape(line)}.*; download the checkpoint again, or quantise"):
        load(tmp_path)


def test_fewer_scales_than_output_features_are_refused(tmp_path):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    entries = {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 4}
    entries |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    save_packed(tmp_path, tiny_model("llama", **SIZES), entries, as_compressed)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    state[name] = state[name][:-1].contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"compressed-tensors weight .*up_proj.weight: its scales"):
        load(tmp_path)


@pytest.mark.parametrize("entries", ["awq", ["awq"], GPTQ | {"bits": ["4"]}])
def test_a_damaged_config_is_refused_by_name(tmp_path, entries):
    save_packed(tmp_path, tiny_model("llama", **SIZES))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entries}))
    with pytest.raises(CheckpointError):
        load(tmp_path)


@pytest.mark.parametrize("scheme", [None, "int4", "fp8"])
def test_a_base_with_quantised_weights_is_not_saved(scheme, tmp_path):
    plain = tiny_model("llama", **SIZES)
    plain.save_pretrained(tmp_path) if scheme else save_packed(tmp_path, plain)
    with pytest.raises(UnsupportedError, match=r"is not saved with its .* keep the checkpoint"):
        load(tmp_path, quantization=scheme).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_drafter_with_quantised_weights_is_not_saved(tmp_path):
    drafter = tiny_drafter(hidden_size=64)
    quantize_linears(drafter, "int8")
    with pytest.raises(UnsupportedError, match="the drafter is not saved"):
        drafter.save_pretrained(tmp_path / "saved")


def test_a_packed_base_that_is_dequantised_is_saved_as_an_ordinary_one(tmp_path, monkeypatch):
    save_packed(tmp_path, tiny_model("llama", **SIZES))
    monkeypatch.setattr(quantization, "is_fast", lambda device: False)
    with pytest.warns(ReDrafterWarning, match="ordinary weights"):
        model = load(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(saved), logits(model))


def test_numbers_of_a_file_keep_their_bits_whatever_the_dtype(tmp_path):
    plain = tiny_model("llama", **SIZES)
    model = load(save_packed(tmp_path, plain, GPTQ, as_gptq), dtype="bfloat16")
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight_scale.dtype == torch.float16
    assert torch.equal(layer.dequantize(), plain.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    "kind, entries, how, ours",
    [
        ("llama", AWQ, {}, True),
        ("llama", AWQ, {"quantization_config": AwqConfig()}, False),
        ("mixtral", AWQ, {}, False),
        ("gpt_neox", AWQ, {}, False),  # AutoAWQ scales its activations
        ("gpt_neox", GPTQ, {}, True),
        ("llama", TORCHAO, {}, True),
        ("llama", TORCHAO, {"files": "pytorch_model.bin"}, False),
    ],
)
def test_what_is_read_here_is_found_by_config_and_files(kind, entries, how, ours, tmp_path):
    config = tiny_model(kind).config
    config.quantization_config = entries
    config.save_pretrained(tmp_path)
    (tmp_path / how.pop("files", "model.safetensors")).touch()
    assert (packed_arguments(tmp_path, how, trust_remote_code=False) is not None) == ours
