"""Configs of Llama and Qwen2 from Hugging Face's form to TensorRT-LLM's, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from redrafter.errors import CheckpointError, UnsupportedError, first_line

__all__ = ["MODEL_TYPES", "to_hf_config", "to_trtllm_config"]

BASE_CONFIG_KEY = "redrafter_base_config"  # key of Hugging Face's config, for the way back
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "QWenForCausalLM": "qwen2",
    "ReDrafterForCausalLM": "llama",  # written by TensorRT-LLM's first converter, for Llama only
}


def to_trtllm_config(config: PretrainedConfig, dtype: str, tp: int) -> dict[str, Any]:
    """Convert the config of a Llama or Qwen2 to TensorRT-LLM's.

    Args:
        config: Hugging Face's config.
        dtype: Number format of the tensors, such as "float16".
        tp: Number of ranks.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    qwen = config.model_type == "qwen2"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "architecture": MODEL_TYPES[config.model_type],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": head_size,
        "hidden_act": config.hidden_act,
        "intermediate_size": config.intermediate_size,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_embedding_dim": head_size,
        "rotary_base": theta,
        "rotary_scaling": None if kind == "default" else rope | {"type": kind},
        "qk_layernorm": False,
        "attn_bias": qwen or getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "tie_word_embeddings": config.tie_word_embeddings,
        **({"qwen_type": "qwen2"} if qwen else {}),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp, "gpus_per_node": 8, "cp_size": 1, "tp_size": tp, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": None},
        BASE_CONFIG_KEY: {
            k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
        },
    }


def to_hf_config(config: Mapping[str, Any], tied: bool, directory: Path) -> PretrainedConfig:
    """Convert TensorRT-LLM's config of a base to Hugging Face's.

    Args:
        config: TensorRT-LLM's config.
        tied: Whether the head is the embedding table.
        directory: Where the checkpoint is, for error messages.

    Raises:
        UnsupportedError: When the base is no Llama or Qwen2.
        CheckpointError: When the config does not describe a base.
    """
    try:
        if values := config.get(BASE_CONFIG_KEY):
            hf_config: PretrainedConfig = AutoConfig.for_model(**values)
            hf_config.dtype = config["dtype"]
            return hf_config
        architecture = config.get("base_model_architecture", config["architecture"])
        model_type = _ARCHITECTURES.get(architecture)
        if model_type is None or config.get("qwen_type", "qwen2") != "qwen2":
            kind = config.get("qwen_type", architecture)
            raise UnsupportedError(f"{directory} holds a {kind}; of TensorRT-LLM's, only Llama and Qwen2 can be read")
        scaling, width = dict(config.get("rotary_scaling") or {}), config.get("head_size")
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        rope = {"rope_type": kind, "rope_theta": config.get("rotary_base", 10000.0), **scaling}
        same_keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        biases = {"attention_bias": config.get("attn_bias", False), "mlp_bias": config.get("mlp_bias", False)}
        return AutoConfig.for_model(
            model_type,
            **{key: config[key] for key in same_keys},
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            hidden_act=config.get("hidden_act", "silu"),
            bos_token_id=None,
            eos_token_id=None,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rms_norm_eps=config.get("norm_epsilon", 1e-5),
            rope_parameters=rope,
            tie_word_embeddings=tied,
            dtype=config["dtype"],
            architectures=[MODEL_TYPES[model_type]],
            **(biases if model_type == "llama" else {}),
            **({"head_dim": width} if width and width * config["num_attention_heads"] != config["hidden_size"] else {}),
        )
    except UnsupportedError:
        raise
    except Exception as error:  # transformers checks some of it, with errors of its own
        raise CheckpointError(f"{directory / 'config.json'} does not describe a base: {first_line(error)}") from error
