"""GGUF files of tiny models, written with llama.cpp's own package."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.command_line import TEMPLATE
from helpers.models import tiny_model, with_spread_weights
from helpers.tokenizers import TEXTS, byte_level
from redrafter import DrafterConfig, RecurrentDrafter
from redrafter.checkpoints.drafters import embedding_norms

CONTROL, NORMAL = 3, 1  # types of tokens
LAYER = {  # names of a Llama's weights in its layers, and llama.cpp's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


# By format: the bytes at which blocks have float16 numbers, and what these are when weights have a spread of about 1.
HALVES = {
    gguf.GGMLQuantizationType[name]: numbers
    for name, numbers in {
        "Q4_0": {0: 1 / 5},
        "Q4_1": {0: 1 / 5, 2: -1.5},
        "Q4_K": {0: 1 / 280, 2: 1 / 37},
        "Q5_0": {0: 1 / 9},
        "Q5_1": {0: 1 / 9, 2: -1.7},
        "Q5_K": {0: 1 / 560, 2: 1 / 36},
        "Q6_K": {208: 1 / 1370},
        "Q8_0": {0: 1 / 74},
    }.items()
}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, spread: float = 0.2) -> np.ndarray:
    """Return the bytes of a random matrix in a format, which gguf quantises to or not, `[rows, N]` uint8."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(rows + columns + kind)
    blocks = random.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    for at, number in HALVES[kind].items():
        halves = spread * number * random.uniform(0.5, 1.5, (rows, columns // weights, 1))
        blocks[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def quantize_k(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Round a matrix to a format with blocks of 256 weights, which gguf only reads, and return its bytes, `[F, N]`."""

    def half(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16).view(np.uint8).reshape(*x.shape, 2)

    with np.errstate(divide="ignore", invalid="ignore"):
        if kind.name == "Q6_K":
            groups = weight.reshape(len(weight), -1, 16, 16)
            scale = np.abs(groups).max(3) / 31
            d = (scale.max(2) / 127).astype(np.float16).astype(np.float32)
            scale = np.nan_to_num(scale / d[..., None]).round().clip(0, 127)
            codes = np.nan_to_num(groups / (d[..., None] * scale)[..., None]).round().clip(-32, 31) + 32
            codes = codes.astype(np.uint8).reshape(*d.shape, 256)
            halves, quarters = codes.reshape(*d.shape, 2, 2, 64), codes.reshape(*d.shape, 2, 4, 32)
            low = halves[..., 0, :] & 15 | halves[..., 1, :] << 4
            high = ((quarters >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(3, dtype=np.uint8)
            parts = [low, high, scale.astype(np.int8).view(np.uint8), half(d)]
        else:
            most = 15 if kind.name == "Q4_K" else 31
            groups = weight.reshape(len(weight), -1, 8, 32)
            minimum = np.maximum(-groups.min(3), 0)
            scale = np.maximum(groups.max(3) + minimum, 0) / most
            d, dmin = ((x.max(2) / 63).astype(np.float16).astype(np.float32) for x in (scale, minimum))
            scale, minimum = (np.nan_to_num(x / y[..., None]).round() for x, y in ((scale, d), (minimum, dmin)))
            codes = np.nan_to_num((groups + (dmin[..., None] * minimum)[..., None]) / (d[..., None] * scale)[..., None])
            codes, scale, minimum = (
                x.round().clip(0, top).astype(np.uint8) for x, top in ((codes, most), (scale, 63), (minimum, 63))
            )
            scales = [x[..., :4] | x[..., 4:] >> 4 << 6 for x in (scale, minimum)]
            scales.append(scale[..., 4:] & 15 | (minimum[..., 4:] & 15) << 4)
            fifth = ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
            fours = (codes & 15)[..., ::2, :] | (codes & 15)[..., 1::2, :] << 4
            parts = [half(d), half(dmin), *scales, *([fifth] if most == 31 else []), fours]
    blocks = np.concatenate([x.reshape(*d.shape, -1) for x in parts], axis=2)
    return blocks.reshape(len(weight), -1)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    architecture: str = "llama",
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    end_of_turn: int | None = None,
) -> Path:
    """Write a Llama and a byte-level tokenizer as llama.cpp's converter does, and return the file."""
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in tokenizer.all_special_tokens else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    writer.add_chat_template(tokenizer.chat_template)

    def add(name: str, weight: Tensor) -> None:
        kind = matrices if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        make = quantize_k if kind in HALVES and kind.name.endswith("K") else gguf.quantize
        writer.add_tensor(name, make(weight.detach().float().numpy(), kind), raw_dtype=kind)

    weights = model.state_dict()
    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, name in LAYER.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if name in heads:  # llama.cpp turns neighbouring numbers of a head, transformers its halves
                weight = weight.unflatten(0, (heads[name], 2, -1)).transpose(1, 2).reshape(weight.shape)
            add(f"blk.{layer}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def split_gguf(file: Path, folder: Path, parts: int) -> None:
    """Write a GGUF file as `m-00001-of-N.gguf` and the others, as llama-gguf-split does."""
    source = gguf.GGUFReader(file)
    size = -(-len(source.tensors) // parts)
    for number in range(parts):
        writer = gguf.GGUFWriter(folder / f"m-{number + 1:05}-of-{parts:05}.gguf", "llama")
        writer.kv_data[0].clear()
        for key, field in source.fields.items() if number == 0 else ():
            if not key.startswith("GGUF."):
                kind, *items = field.types
                writer.add_key_value(key, field.contents(), kind, items[0] if items else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(source.tensors))
        for tensor in source.tensors[number * size : (number + 1) * size]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def make_models(folder: Path) -> Path:
    """Write `hf`, a Llama of dequantised weights, `file.gguf`, the same in Q8_0, and a `drafter` for both."""
    tokenizer = byte_level(TEXTS, 300)
    tokenizer.chat_template = TEMPLATE
    shape = {"vocab_size": 300, "intermediate_size": 64, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    model = with_spread_weights(tiny_model("llama", **shape, pad_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(dequantised(parameter, gguf.GGMLQuantizationType.Q8_0))
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    write_gguf(folder / "file.gguf", model, tokenizer, matrices=gguf.GGMLQuantizationType.Q8_0)
    torch.manual_seed(0)
    norms = embedding_norms(model.get_input_embeddings().weight)
    config = DrafterConfig(vocab_size=300, hidden_size=32, base_embedding_norms=norms)
    RecurrentDrafter(config).save_pretrained(folder / "drafter")
    return folder


def dequantised(weight: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Return a weight as it comes back from a format."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().float().numpy(), kind), kind))
