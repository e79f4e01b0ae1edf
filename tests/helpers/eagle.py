"""Tiny EAGLE-3 heads with random weights, and their logits as a plain recomputation of the whole text gives them."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from helpers.models import HIDDEN, VOCAB
from helpers.searches import checked_searches
from redrafter import EagleConfig, EagleDrafter
from redrafter.drafting.eagle import EagleProposer

LAYERS = [0, 1]  # of a target with three
FORM = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "target_layers": LAYERS,
    "max_position_embeddings": 96,
}

# Form -> fields of its config that differ from those above.
EAGLE_FORMS: dict[str, dict] = {
    "published": {"draft_vocab_size": 40},
    "speculators": {"draft_vocab_size": 60, "norm_before_residual": True, "qk_norm": True, "own_embedding": True},
    "every id": {"attention_bias": True, "mlp_bias": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "joined norm": {"norm_before_fc": True, "num_key_value_heads": 4, "head_dim": 6},
    "narrow": {"width": 24, "own_embedding": True, "target_layers": [0, 1, 2]},
    "yarn": {
        "rope": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24}
    },
}


def random_head(**changes: object) -> EagleDrafter:
    """Make a tiny head whose weights are large enough for every part of it to matter."""
    torch.manual_seed(11)
    head = EagleDrafter(EagleConfig(**(FORM | changes))).eval()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    if head.draft_ids is not None:
        head.draft_ids.copy_(torch.randperm(VOCAB)[: len(head.draft_ids)].sort().values)
    return head


def checked_drafts() -> AbstractContextManager[None]:
    """Compare the logits of searches with a plain recomputation."""

    def check(proposer: EagleProposer, row: int, text: Tensor, beams: list[int], drafts: Tensor, kept: list) -> None:
        expected = plain_logits(proposer.drafter, proposer.target.model, text, drafts)
        for level, beam in enumerate(beams):
            torch.testing.assert_close(kept[level][0][row, beam], expected[level], atol=1e-3, rtol=1e-3)

    return checked_searches(EagleProposer, EagleDrafter, "step", check)


@torch.no_grad()
def target_outputs(model: torch.nn.Module, text: Tensor, layers: list[int]) -> Tensor:
    """Return the outputs of a model's layers at each token of a text `[T]`, joined to `[T, layers D]`."""
    states = model(input_ids=text[None], output_hidden_states=True).hidden_states  # the embeddings, then each layer's
    return torch.cat([states[layer + 1][0] for layer in layers[:-1]] + [_output(model, text, layers[-1])], dim=-1)


def _output(model: torch.nn.Module, text: Tensor, layer: int) -> Tensor:
    """Return the output of one layer, `[T, D]`; of the last one, transformers gives what follows the final norm."""
    outputs = []
    hook = model.get_decoder().layers[layer].register_forward_hook(lambda *args: outputs.append(args[2]))
    model(input_ids=text[None])
    hook.remove()
    output = outputs[0]
    return (output[0] if isinstance(output, tuple) else output)[0]


@torch.no_grad()
def plain_logits(head: EagleDrafter, model: torch.nn.Module, text: Tensor, drafts: Tensor) -> Tensor:
    """Return what a head says after a text `[n + 1]` and each of some drafts `[k]`, `[k + 1, V']`, without a cache.

    The whole text is computed anew for each draft, entry by entry: entry t reads the target's outputs at token t and
    the embedding of token t + 1, under a causal mask. An entry past the text reads the hidden state that the one before
    made.
    """
    weights, config = dict(head.named_parameters()), head.config
    whole = torch.cat([text, drafts])
    table = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    features = target_outputs(model, text[:-1], config.target_layers_of(model.config.num_hidden_layers))
    if config.norm_before_fc:
        features = norm(features, "input_norm")
    if config.fc_norm:
        parts = features.chunk(config.num_target_layers, dim=-1)
        features = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
    hidden = product(features, "fc")  # [n, D], grows by an entry for each draft
    logits = []
    for count in range(len(drafts) + 1):
        tokens = whole[1 : len(text) + count]
        e, h = norm(table[tokens], "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")
        joined = torch.cat([e, h], dim=-1)
        heads = [
            product(joined, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, config.head_dim)) for name in "qkv"
        ]
        if config.qk_norm:
            heads[:2] = [norm(x, f"midlayer.self_attn.{name}_norm") for x, name in zip(heads, "qk", strict=False)]
        query, key = (rotated(x, config) for x in heads[:2])
        copies = config.num_attention_heads // config.num_key_value_heads
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, heads[2]))
        scores = torch.einsum("thd,shd->hts", query, key) / config.head_dim**0.5
        causal = torch.ones_like(scores[0], dtype=torch.bool).tril()
        attended = torch.einsum("hts,shd->thd", scores.masked_fill(~causal, -torch.inf).softmax(dim=-1), value)
        x = (h if config.norm_before_residual else hidden) + product(attended.flatten(1), "midlayer.self_attn.o_proj")
        y = norm(x, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(product(y, "midlayer.mlp.gate_proj")) * product(y, "midlayer.mlp.up_proj")
        x = x + product(gate, "midlayer.mlp.down_proj")
        logits.append(product(norm(x[-1], "norm"), "lm_head"))
        made = norm(x[-1:], "norm") if config.norm_output else x[-1:]
        hidden = torch.cat([hidden, made])
    return torch.stack(logits)


def rotated(x: Tensor, config: EagleConfig) -> Tensor:
    """Rotate heads `[T, h, d]` by their positions, as transformers' Llama does."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    llama = LlamaConfig(
        hidden_size=config.width,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    sines = LlamaRotaryEmbedding(llama).to(x.device)(x, torch.arange(len(x), device=x.device)[None])
    return apply_rotary_pos_emb(x[None], x[None], *sines, unsqueeze_dim=2)[0][0]


def published_tensors(head: EagleDrafter, layer: str) -> dict[str, Tensor]:
    """Return a head's tensors as both formats name them. layer: what the format calls the decoder layer."""
    tensors = {name.replace("midlayer.", f"{layer}."): x.clone() for name, x in head.state_dict().items()}
    if (ids := tensors.pop("draft_ids", None)) is not None:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return tensors


def _layer_fields(config: EagleConfig) -> dict[str, object]:
    names = (
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    shared = {name: getattr(config, name) for name in (*names, "max_position_embeddings", "attention_bias")}
    rope = dict(config.rope)
    theta, scaling = rope.pop("rope_theta"), None if rope["rope_type"] == "default" else rope
    layer = {"model_type": "qwen3"} if config.qk_norm else {"model_type": "llama", "mlp_bias": config.mlp_bias}
    layer |= {"hidden_size": config.width, "num_hidden_layers": 1, "rope_theta": theta, "rope_scaling": scaling}
    return shared | layer


def speculators_dir(place: Path, head: EagleDrafter, **changes: object) -> Path:
    """Write a head as vllm-project/speculators does, and return its directory. changes: of its config."""
    config, layers = head.config, head.config.target_layers
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/base", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": _layer_fields(config),
        "target_hidden_size": None if config.width == config.hidden_size else config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": None if layers is None else [layer + 1 for layer in layers],
        "dtype": "float32",
        **{name: getattr(config, name) for name in flags},
    }
    content["draft_vocab_size"] = config.draft_vocab_size or config.vocab_size
    return _write(place, content | changes, published_tensors(head, "layers.0"))


def eagle_dir(place: Path, head: EagleDrafter, *, pickled: bool = False, **changes: object) -> Path:
    """Write a head as SafeAILab/EAGLE and SpecForge do, and return its directory. changes: of its config."""
    config, layers = head.config, head.config.target_layers
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "torch_dtype": "float32",
        **_layer_fields(config),
    }
    if layers is not None:
        content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    if config.width != config.hidden_size:
        content["target_hidden_size"] = config.hidden_size
    if config.fc_norm:
        content["fc_norm"] = True
    return _write(place, content | changes, published_tensors(head, "midlayer"), pickled=pickled)


def _write(place: Path, config: dict[str, object], tensors: dict[str, Tensor], *, pickled: bool = False) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, place / "pytorch_model.bin")
    else:
        save_file(tensors, place / "model.safetensors")
    return place
