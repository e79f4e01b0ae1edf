"""Config entries for targets of tests."""

CHUNKED = {  # its layers attend within chunks
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 6,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "head_dim": 8,
}
