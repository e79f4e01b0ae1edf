"""Weights of GGUF files as they are stored: numbers, places in a model, texts, and what reads them otherwise."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, GGUFTensor, LlamaTensorProcessor

from helpers.command_line import TEMPLATE, printed
from helpers.models import check_texts, tiny_drafter, tiny_model, with_spread_weights, with_tree
from helpers.tokenizers import TEXTS, byte_level

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Format

from helpers.gguf_files import HALVES, random_blocks, write_gguf
from redrafter.checkpoints import models
from redrafter.checkpoints.gguf_weights import AT_ONCE, dequantize, join_rows, read_parts
from redrafter.checkpoints.models import load_model
from redrafter.errors import CheckpointError
from redrafter.model.quantized_layers import GroupedLinear
from redrafter.model.teacher import TeacherOutput

LOAD = {"dtype": "float32", "device": "cpu", "trust_remote_code": False}
SHAPE = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


@pytest.fixture
def fast(monkeypatch):
    """Have products of grouped weights count as fast, which without a compiler they do not."""
    monkeypatch.setattr("redrafter.checkpoints.gguf_weights.is_fast", lambda device: True)


def write(folder, kind, **changes):
    tokenizer = byte_level(TEXTS, 300)
    tokenizer.chat_template = TEMPLATE
    model = with_spread_weights(tiny_model("llama", **SHAPE | HEADS | ENDS | changes))
    return write_gguf(folder / "a.gguf", model, tokenizer, matrices=kind)


def stock(file) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def assert_same_weights(model, expected, *, layers):
    """Compare all weights with those of a model of ordinary layers; `layers` is the number of grouped ones."""
    wide = expected.state_dict()
    grouped = {name: layer for name, layer in model.named_modules() if isinstance(layer, GroupedLinear)}
    assert len(grouped) == layers
    for name, layer in grouped.items():
        assert torch.equal(layer.grouped().dequantize(), wide.pop(f"{name}.weight"))
        assert not layer.requantizes
    own = model.state_dict()
    assert all(torch.equal(own[name], x) for name, x in wide.items())


class Tensor(gguf.ReaderTensor):
    """A tensor as `GgufModel` has it."""

    def __new__(cls, data, kind):
        columns = gguf.quant_shape_from_byte_shape(data.shape, kind)[::-1]
        return super().__new__(cls, "x", kind, np.array(columns), data.size, data.size, 0, data, None)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_numbers_are_those_of_gguf_bit_by_bit(kind):
    data = random_blocks(kind, AT_ONCE // 512 + 3, 512)
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    tensor, rows = Tensor(data, kind), np.random.default_rng(0).permutation(len(data))
    weight = join_rows(list(read_parts(tensor)))
    assert torch.equal(weight.dequantize(), expected)
    assert (weight.bits, weight.group) == (4 if kind.name[1] == "4" else 8, 16 if kind.name == "Q6_K" else 32)
    assert torch.equal(join_rows(list(read_parts(tensor, rows))).dequantize(), expected[rows])
    assert torch.equal(dequantize(tensor, torch.bfloat16, rows), expected[rows].bfloat16())
    experts = Tensor(data[:4].reshape(2, 2, -1), kind)
    assert torch.equal(dequantize(experts), expected[:4].view(2, 2, -1))
    one = random_blocks(kind, 1, gguf.GGML_QUANT_SIZES[kind][0])  # a block, whose parts are contiguous where they are
    assert torch.equal(dequantize(Tensor(one, kind)), torch.from_numpy(gguf.dequantize(one, kind)))
    assert expected.std() == pytest.approx(0.2, rel=0.5)


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_layers_have_the_codes_of_their_file_and_the_table_is_widened(kind, fast, tmp_path):
    tied = kind in (Format.Q5_0, Format.Q4_K)
    file = write(tmp_path, kind, tie_word_embeddings=tied)
    model = load_model(file, **LOAD)
    assert_same_weights(model, stock(file), layers=15)  # a tied head has the numbers of the table, as codes
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert model.lm_head.weight.dtype.itemsize == 1


@pytest.mark.parametrize("kind", [Format.Q4_K, Format.Q6_K], ids=lambda kind: kind.name)
def test_drafted_texts_are_those_of_plain_decoding(kind, fast, tmp_path):
    model = load_model(write(tmp_path, kind, tie_word_embeddings=True), **LOAD)
    model.generation_config.eos_token_id = None
    engine = with_tree(model, tiny_drafter(vocab_size=300, hidden_size=256), 3, 4)
    check_texts(engine)
    assert engine.target.rounding == 0


def double(self, weights, name, **_):
    return GGUFTensor(weights * 2 if "ffn_up" in name else weights, name, {})


def transpose(self, weights, name, **_):
    return GGUFTensor(np.ascontiguousarray(weights.T) if "ffn_down" in name else weights, name, {})


def cut(self, weights, name, **_):
    return GGUFTensor(weights.reshape(-1, 256)[:, ::-1] if weights.ndim == 2 else weights, name, {})


@pytest.mark.parametrize(("process", "layers"), [(double, 13), (transpose, 13), (cut, 0)])
def test_what_a_version_of_transformers_computes_with_weights_is_dequantised(
    process, layers, fast, tmp_path, monkeypatch
):
    processor = type("Processor", (LlamaTensorProcessor,), {"process": process})
    monkeypatch.setitem(TENSOR_PROCESSORS, "llama", processor)
    file = write(tmp_path, Format.Q4_K)
    assert_same_weights(load_model(file, **LOAD), stock(file), layers=layers)


def test_formats_without_groups_are_dequantised_and_others_of_the_file_are_not(fast, tmp_path):
    file = write(tmp_path, Format.BF16)
    assert_same_weights(load_model(file, **LOAD), stock(file), layers=0)


@pytest.mark.parametrize(
    "asked", [{"quantization_config": GgufConfig(dequantize=True)}, {"device_map": "cpu", "device": None}]
)
def test_a_base_is_widened_where_that_is_asked_for(asked, fast, tmp_path):
    file = write(tmp_path, Format.Q4_1)
    assert_same_weights(load_model(file, **LOAD | asked), stock(file), layers=0)


def test_a_base_is_widened_where_there_is_no_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr("redrafter.checkpoints.gguf_weights.is_fast", lambda device: False)
    file = write(tmp_path, Format.Q4_1)
    model = load_model(file, **LOAD | {"dtype": "auto"})
    assert model.dtype == torch.bfloat16
    assert_same_weights(model, stock(file).bfloat16(), layers=0)


@pytest.mark.parametrize(("asked", "stored"), [(None, False), ("gguf", True), ("int4", False)])
def test_a_gpu_computes_weights_as_they_are_stored_if_that_is_asked_for(asked, stored, tmp_path, monkeypatch):
    class Chosen(Exception):
        pass

    def choose(_, *, device, as_stored):
        assert (device, as_stored) == ("cuda", stored)
        raise Chosen

    monkeypatch.setattr(models, "GgufWeights", choose)
    with pytest.raises(Chosen):
        load_model(write(tmp_path, Format.Q4_0), **LOAD | {"device": "cuda", "quantization": asked})


def test_auto_is_float32_on_a_cpu(fast, tmp_path):
    model = load_model(write(tmp_path, Format.Q4_1), **LOAD | {"dtype": "auto"})
    assert {x.dtype for x in model.parameters()} == {torch.float32, torch.uint8}


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_scheme_of_loading_quantises_the_dequantised_weights(scheme, fast, tmp_path):
    file = write(tmp_path, Format.Q4_0)
    model = load_model(file, quantization=scheme, **LOAD)
    expected = load_model(file, quantization=scheme, **LOAD | {"quantization_config": GgufConfig(dequantize=True)})
    same = expected.state_dict()
    assert all(torch.equal(x.view(torch.uint8), same[key].view(torch.uint8)) for key, x in model.state_dict().items())


def test_a_drafter_is_trained_through_a_head_of_codes(fast, tmp_path):
    head = load_model(write(tmp_path, Format.Q6_K), **LOAD).lm_head
    x = torch.randn(2, 256)
    _, weight = TeacherOutput(x, x, torch.zeros(2, 300), head=head).fill_head((x, None))
    assert torch.allclose(x @ weight.T, head(x), atol=1e-4)


def test_info_says_in_what_each_format_is_computed(tmp_path):
    model = printed("info", str(write(tmp_path, Format.Q6_K, tie_word_embeddings=False)), "--json")["model"]
    assert model["computed_as"] == (
        "15 tensors Q6_K (91.7% of the weights): 8-bit codes, groups of 16; 1 tensor Q6_K (8.2% of the weights): "
        "dequantised; 5 tensors F32 (0.1% of the weights): as they are"
    )
    assert model["loaded_as"].startswith("float32 on a CPU, else bfloat16")


@pytest.mark.parametrize("options", [{}, {"quantization_config": GgufConfig(dequantize=True)}])
def test_a_file_with_scales_that_are_not_finite_is_refused_by_tensor(options, fast, tmp_path):
    file = write(tmp_path, Format.Q4_0)
    reader = gguf.GGUFReader(file, "r+")
    tensor = next(each for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    tensor.data[0, 1] = 0x7E  # the high byte of a scale
    reader.data.flush()
    with pytest.raises(CheckpointError, match=rf"{file}: scales or minima of its tensor blk.1.ffn_up.weight are not"):
        load_model(file, **LOAD, **options)
