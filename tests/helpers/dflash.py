"""Tiny DFlash, DFlash2 and DSpark drafters with random weights, and what a plain recomputation of a block gives."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from helpers.eagle import rotated, target_outputs
from helpers.models import HIDDEN, VOCAB
from helpers.searches import checked_searches
from redrafter import DFlashConfig, DFlashDrafter
from redrafter.drafting.dflash import DFlashProposer
from redrafter.sampling.sampler import Sampler

BLOCK, MASK = 5, VOCAB - 1
FORM = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layers": [0, 1],
}
SLIDING = {"sliding_layers": [1], "sliding_window": 6}
SELECTOR = {"selector_rank": 6, "selector_top_k": 9}

# Form -> fields of its config that differ from those above.
DFLASH_FORMS: dict[str, dict] = {
    "DFlash": {},
    "speculators'": SLIDING | {"causal": "sliding", "own_embedding": True, "own_head": True, "draft_vocab_size": 60},
    "sliding": SLIDING | {"attention_bias": True, "num_key_value_heads": 4},
    "DSpark": {"markov_rank": 6, "sample_from_anchor": True, "own_embedding": True, "own_head": True},
    "gated": {"markov_rank": 6, "markov_type": "gated"},
    "recurrent": {"markov_rank": 6, "markov_type": "rnn", "sample_from_anchor": True},
    "recurrent after the anchor": {"markov_rank": 6, "markov_type": "rnn", "num_layers": 1},
    "DFlash2": SELECTOR | SLIDING | {"causal": "sliding", "conv_kernel_size": 2, "conv_group_size": 8},
    "scaled": SELECTOR
    | {"conv_kernel_size": 3, "conv_group_size": 4, "causal": "all"}
    | {"embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 5.0},
}


def random_block_drafter(**changes: object) -> DFlashDrafter:
    """Make a tiny drafter whose weights are large enough for every part of it to matter."""
    torch.manual_seed(12)
    drafter = DFlashDrafter(DFlashConfig(**(FORM | changes))).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.randperm(VOCAB)[: len(drafter.draft_ids)].sort().values)
    return drafter


def checked_blocks() -> AbstractContextManager[None]:
    """Compare the logits of searches with a plain recomputation."""

    def keep(kept: list[Tensor], result: object, made: Tensor, noise: Tensor | None, step: int, *ids: object) -> None:
        kept[step:] = [made]  # the last that is made at each step

    def check(proposer: DFlashProposer, row: int, text: Tensor, beams: list[int], drafts: Tensor, kept: list) -> None:
        drafter = proposer.drafter
        expected = plain_block(drafter, proposer.target.model, text, drafts)
        for level, beam in enumerate(beams):
            found = kept[level][row, beam if len(kept[level][row]) > 1 else 0]
            seen = found.isfinite()  # candidates, where there is a selector
            torch.testing.assert_close(found[seen], expected[level][seen], atol=1e-3, rtol=1e-3)
            selects = drafter.candidate_selector is not None
            assert int(seen.sum()) == (drafter.config.selector_top_k if selects else len(found))

    return checked_searches(DFlashProposer, Sampler, "draft_scores", check, keep)


@torch.no_grad()
def plain_hidden(drafter: DFlashDrafter, model: torch.nn.Module, text: Tensor) -> Tensor:
    """Return the hidden states of a block after a text `[n + 1]`, from weights alone, without any cache, `[Q, D]`."""
    weights, config, length = dict(drafter.named_parameters()), drafter.config, len(text) - 1

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def convolved(x: Tensor, source: Tensor, name: str, side: int) -> Tensor:
        if f"{name}.base_kernel" not in weights:
            return x
        base = weights[f"{name}.base_kernel"]  # [2, taps, D]
        dynamic = product(source, f"{name}.kernel_projection").view(len(x), 2, base.shape[1], -1)
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(place + 1, base.shape[1])):
                kernel = base[side, tap].view(dynamic.shape[-1], -1) + dynamic[place, side, tap][:, None]
                out[place] += kernel.flatten() * x[place - tap]
        return out

    fused = norm(product(target_outputs(model, text[:-1], config.target_layers), "fc"), "hidden_norm")
    block = torch.tensor([int(text[-1])] + [config.mask_token_id] * (config.block_size - 1))
    table = weights.get("embed_tokens.weight")
    x = (model.get_input_embeddings()(block) if table is None else table[block]) * config.embedding_scale
    place = torch.arange(length + len(block))
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        inner = convolved(y, y, f"{name}.attention_conv", 0)
        joined = torch.cat([fused, inner])
        q, k, v = (
            product(part, f"{name}.self_attn.{kind}_proj").unflatten(-1, (-1, config.head_dim))
            for part, kind in ((joined, "q"), (joined, "k"), (joined, "v"))
        )
        q, k = (rotated(norm(part, f"{name}.self_attn.{kind}_norm"), config) for part, kind in ((q, "q"), (k, "k")))
        copies = config.num_attention_heads // config.num_key_value_heads
        k, v = (part.repeat_interleave(copies, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,shd->hqs", q[length:], k) / config.head_dim**0.5
        if layer in config.sliding_layers:
            scores = scores.masked_fill(place[length:, None] - place >= config.sliding_window, -torch.inf)
        if config.causal == "all" or (config.causal == "sliding" and layer in config.sliding_layers):
            scores = scores.masked_fill(place > place[length:, None], -torch.inf)
        attended = torch.einsum("hqs,shd->qhd", scores.softmax(dim=-1), v).flatten(1)
        x = x + convolved(product(attended, f"{name}.self_attn.o_proj"), y, f"{name}.attention_conv", 1)
        y = norm(x, f"{name}.post_attention_layernorm")
        inner = convolved(y, y, f"{name}.mlp_conv", 0)
        made = product(
            silu(product(inner, f"{name}.mlp.gate_proj")) * product(inner, f"{name}.mlp.up_proj"),
            f"{name}.mlp.down_proj",
        )
        x = x + convolved(made, y, f"{name}.mlp_conv", 1)
    return norm(x, "norm")


@torch.no_grad()
def plain_block(drafter: DFlashDrafter, model: torch.nn.Module, text: Tensor, drafts: Tensor) -> list[Tensor]:
    """Return the logits after the pending token and after each of some drafts, `[V']` each.

    Args:
        drafter: The drafter.
        model: The target.
        text: Committed tokens and the pending one, `[n + 1]` int64.
        drafts: Tokens drafted after them, `[k]` int64.
    """
    weights, config = dict(drafter.named_parameters()), drafter.config
    hidden, state, logits = plain_hidden(drafter, model, text), torch.zeros(config.markov_rank or 0), []
    first = 0 if config.sample_from_anchor else 1
    before = [int(text[-1])] * (1 + first) + drafts.tolist()
    for place, h in enumerate(hidden):
        made = linear(h, weights.get("lm_head.weight", model.get_output_embeddings().weight)) * config.logit_scale
        if config.logit_softcap is not None:
            made = config.logit_softcap * (made / config.logit_softcap).tanh()
        if place >= len(before):
            break
        if config.markov_rank:
            e = weights["markov_head.markov_w1.weight"][before[place]]
            if config.markov_type == "gated":
                gate = linear(torch.cat([h, e]), *(weights[f"markov_head.gate_proj.{x}"] for x in ("weight", "bias")))
                e = gate.sigmoid() * e
            elif config.markov_type == "rnn":
                joint = (weights[f"markov_head.joint_proj.{x}"] for x in ("weight", "bias"))
                gate, new, out = linear(torch.cat([state, e, h]), *joint).chunk(3)
                state, e = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), out.tanh()
            made = made + weights["markov_head.markov_w2.weight"] @ e
        if config.selector_rank:
            code = weights["candidate_selector.predecessor_codebook"][before[place]]
            code = code * (weights["candidate_selector.hidden_projection.weight"] @ h)
            made = made + weights["candidate_selector.successor_codebook"] @ code
        logits.append(made)
    return logits[first:]


def published_dir(place: Path, drafter: DFlashDrafter, kind: str, **changes: object) -> Path:
    """Write a drafter as one of `zlab`, `deepspec` and `speculators` does, and return its directory.

    changes: of its config.
    """
    config = drafter.config
    tensors = {name: x.clone() for name, x in drafter.state_dict().items()}
    if (ids := tensors.pop("draft_ids", None)) is not None:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("rms_norm_eps", "max_position_embeddings", "attention_bias")
    layer = {name: getattr(config, name) for name in names}
    kinds = ["sliding_attention" if i in config.sliding_layers else "full_attention" for i in range(config.num_layers)]
    layer |= {"model_type": "qwen3", "num_hidden_layers": config.num_layers, "layer_types": kinds}
    layer |= {"rope_theta": 10_000.0, "use_sliding_window": bool(config.sliding_layers)}
    layer |= {"sliding_window": config.sliding_window}
    draft = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layers}
    draft |= {
        name: getattr(config, name) for name in ("conv_kernel_size", "conv_group_size") if config.conv_kernel_size
    }
    draft |= {name: getattr(config, name) for name in ("selector_rank", "selector_top_k") if config.selector_rank}
    markov = {"markov_rank": config.markov_rank, "markov_head_type": config.markov_type} if config.markov_rank else {}
    if config.markov_rank:
        tensors |= {
            "confidence_head.proj.weight": torch.ones(1, HIDDEN + 6),
            "confidence_head.proj.bias": torch.ones(1),
        }
    if kind == "zlab":
        content = layer | {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
        content |= {"num_target_layers": 3, "dflash_config": draft | markov}
    elif kind == "deepspec":
        content = layer | {"architectures": ["Qwen3DSparkModel"], "block_size": config.block_size} | draft | markov
        content |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512}
    else:
        content = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dspark" if markov else "dflash2" if config.selector_rank else "dflash",
            "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/base"}},
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocab_size or VOCAB,
            "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layers],
            "mask_token_id": config.mask_token_id,
            "block_size": config.block_size,
            "sample_from_anchor": config.sample_from_anchor,
            "sliding_window_non_causal": config.causal == "none",
            **markov,
            **{name: draft[name] for name in draft if name.startswith(("conv_", "selector_"))},
        }
    place.mkdir()
    (place / "config.json").write_text(json.dumps(content | changes))
    save_file(tensors, place / "model.safetensors")
    return place
