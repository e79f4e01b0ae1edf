"""Tiny configs of any architecture: its default config, shrunk by the names of the fields."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

__all__ = ["CONTEXT", "VOCAB", "WINDOWS", "tiny_config"]

VOCAB, HIDDEN, LAYERS, CONTEXT = 97, 32, 4, 512
HEADS, KEY_VALUE_HEADS, HEAD_DIM, ROTARY_DIM = 4, 2, 8, 4

_NAMES: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
    (
        HIDDEN,
        """hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim input_embedding_size
        output_embedding_size attention_hidden_size lru_width pronunciation_embed_dim shape_embed_dim
        backbone_hidden_size mamba_d_ssm adapter_in_dim adapter_input_size adapter_out_dim""",
    ),
    (
        48,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff d_inner n_inner
        intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size feed_forward_size""",
    ),
    (
        16,
        """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size hidden_size_per_layer_input
        prompt_mid_dim router_hidden_size o_lora_rank hc_lowrank laurel_rank adapter_rank ple_embed_dim""",
    ),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_decoder_layers encoder_layers
        num_encoder_layers""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        num_decoder_attention_heads encoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
        linear_num_key_heads linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads""",
    ),
    (24, "index_n_heads"),  # of few, all are often negative, and scores of 0 are tied
    (
        KEY_VALUE_HEADS,
        """num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads indexer_kv_heads
        num_query_groups""",
    ),
    (
        HEAD_DIM,
        """head_dim global_head_dim swa_head_dim dim_head d_head kv_channels attention_head_size
        attention_head_dim query_pre_attn_scalar v_head_dim qk_nope_head_dim kv_lora_rank d_rel index_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim""",
    ),
    (ROTARY_DIM, """qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size gated_norm_rank"""),
    (
        4,
        """num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num
        encoder_hash_byte_group_vocab""",
    ),
    (HEAD_DIM + ROTARY_DIM, "q_lora_rank qk_head_dim"),
    (
        2,
        """num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group hc_mult o_groups
        altup_num_inputs num_layers_per_stack max_window_layers eos_token_id sep_token_id forced_eos_token_id""",
    ),
    (
        1,
        """topk_group first_k_dense_replace num_shared_experts n_shared_experts bos_token_id start_token_id
        decoder_start_token_id cls_token_id""",
    ),
    (
        CONTEXT,
        """max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
        max_target_positions max_source_positions""",
    ),
    (0, "pad_token_id"),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}
FILLED = {"head_dim", "num_key_value_heads", "num_experts_per_tok"}  # where a default config leaves them out
# How far back a layer looks, or by which step of positions it changes what it does.
WINDOWS = [
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window_size",
    "local_attention",
    "keep_window_size",
    "local_attention_window_len",
    "attention_chunk_size",
    "floor_scale",
    "log_scaling_n_floor",
    "rel_extent",
    "index_topk",
    "relative_max_distance",
    "position_bias_max_distance",
]

# By model type: where one field follows from others, or a default config makes no model.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 32)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "attn_layer_period": 2, "attn_layer_offset": 0},
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, window: int | None = 4, **changes: Any) -> PreTrainedConfig:
    """Return a config of that type whose model is tiny.

    Args:
        model_type: The name under which transformers registers it.
        window: What every window or chunk becomes; with None, those that a default config has become 4.
        changes: Fields that the config is to have besides, known to its class or not.
    """
    return AutoConfig.for_model(model_type, **shrunk(default_config(model_type), window) | changes)


def default_config(model_type: str) -> PreTrainedConfig:
    """Return the config of that type without arguments."""
    if model_type == "gemma4_assistant":  # the only one that refuses its own defaults
        text = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 30}
        return AutoConfig.for_model(model_type, text_config=text | {"num_kv_shared_layers": 30})
    return AutoConfig.for_model(model_type)


def shrunk(default: PreTrainedConfig, window: int | None) -> dict[str, Any]:
    """Return the fields that make a default config tiny, those of the configs inside it included."""
    fields = vars(default)
    latent = "qk_rope_head_dim" in fields
    layers = next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), 0)
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name in WINDOWS:
            if value is not None or window is not None:
                changes[name] = window or 4
        elif name == "use_sliding_window":
            changes[name] = window is not None
        elif name == "is_decoder":
            changes[name] = True
        elif isinstance(value, PreTrainedConfig):
            changes[name] = shrunk(value, window) | ({"model_type": value.model_type} if value.model_type else {})
        elif latent and name in ("head_dim", "num_key_value_heads"):
            changes[name] = ROTARY_DIM if name == "head_dim" else HEADS
        elif name == "num_kv_shared_layers" and value == layers:
            changes[name] = LAYERS
        elif name in SIZES and (value is not None or name in FILLED):
            changes[name] = SIZES[name] if value != 0 else 0
        elif name == "num_kv_shared_layers" and value:
            changes[name] = 1
        elif name == "layer_types" and value and window and _alike(fields):
            changes[name] = ["full_attention", "sliding_attention"] * (LAYERS // 2)
        elif isinstance(value, list | tuple) and len(value) == layers > LAYERS and len(_kinds(value)) > 1:
            changes[name] = [_kinds(value)[layer % len(_kinds(value))] for layer in range(LAYERS)]
    return changes | EXCEPTIONS.get(default.model_type, {})


def _alike(fields: dict[str, Any]) -> bool:
    """Whether no layer of a default config has the window that a config of its kind may have."""
    windowed = "sliding_window" in fields and "use_sliding_window" not in fields
    return windowed and set(fields["layer_types"]) == {"full_attention"}


def _kinds(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values, in order of first appearance."""
    return list({repr(value): value for value in values}.values())
