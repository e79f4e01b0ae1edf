"""Tiny parallel drafters, and a plain recomputation of what they draft."""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from helpers.dflash import FORM
from helpers.models import VOCAB
from redrafter import ParallelConfig, ParallelDrafter

BLOCK = 4
SHAPE = {name: size for name, size in FORM.items() if name != "mask_token_id"} | {"block_size": BLOCK, "head_rank": 24}
PARALLEL_FORMS: dict[str, dict] = {
    "recurrent": {},
    "markov": {"head": "markov", "num_layers": 1},
    "independent": {"head": "none"},
    "bidirectional": {"causal": "none"},
    "sliding": {"sliding_layers": [0, 1], "sliding_window": 5},
    "shortlist": {"head_shortlist": 20, "draft_vocab_size": 60},
}


def random_parallel_drafter(**changes: object) -> ParallelDrafter:
    """Make a tiny drafter whose weights are large enough for every part of it to matter."""
    torch.manual_seed(14)
    drafter = ParallelDrafter(ParallelConfig(**(SHAPE | changes))).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(std=0.3)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.randperm(VOCAB)[: len(drafter.draft_ids)].sort().values)
    return drafter


@torch.no_grad()
def plain_logits(drafter: ParallelDrafter, hidden: Tensor, embedding: Tensor, drafts: Tensor) -> Tensor:
    """Return the logits at each position of a block from weights alone, `[K, V']`.

    Args:
        drafter: The drafter.
        hidden: Hidden states of the n committed tokens that it reads, `[n, F]`.
        embedding: Embeddings of the committed tokens and of the pending one, `[n + 1, D]`.
        drafts: Embeddings of the drafts of all positions but the last, `[K - 1, D]`.
    """
    weights, config, length = dict(drafter.named_parameters()), drafter.config, len(hidden)
    width, size, count = config.hidden_size, config.head_dim, len(drafts) + 1
    if config.causal != "all":
        count = config.block_size

    def norm(x: Tensor, name: str = "") -> Tensor:
        return rms_norm(x, x.shape[-1:], weights.get(f"{name}.weight"), config.rms_norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotated(x: Tensor, position: Tensor) -> Tensor:
        angle = position[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
        cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    last, outputs = hidden[:, :width], hidden[:, width:].unflatten(1, (-1, width))
    joined = torch.cat([last, norm(outputs).flatten(1)], dim=-1)
    fused = norm(last + product(joined, "fuse"), "entry_norm")  # [n, D]
    read, embedding = fused + product(norm(embedding[:-1]), "entry_embedding"), embedding[-1]
    x = product(torch.cat([fused[-1], norm(embedding)]), "open") + weights["slots"][:count]  # [Q, D]
    place = torch.arange(length + count)
    for number in range(config.num_layers):
        name = f"layers.{number}"
        y = norm(x, f"{name}.input_layernorm")
        sources = torch.cat([read[:-1], y]), torch.cat([read[1:], y])  # of keys, from the token before, and values
        query = rotated(
            norm(product(y, f"{name}.self_attn.q_proj").unflatten(1, (-1, size)), f"{name}.self_attn.q_norm"),
            place[length:],
        )
        key = rotated(
            norm(product(sources[0], f"{name}.self_attn.k_proj").unflatten(1, (-1, size)), f"{name}.self_attn.k_norm"),
            place[1:],
        )
        value = product(sources[1], f"{name}.self_attn.v_proj").unflatten(1, (-1, size))
        copies = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,shd->hqs", query, key) * size**-0.5
        if config.causal == "all":
            scores = scores.masked_fill(place[1:] > place[length:, None], -torch.inf)
        if number in config.sliding_layers:
            scores = scores.masked_fill(place[length:, None] - place[1:] >= config.sliding_window, -torch.inf)
        attended = torch.einsum("hqs,shd->qhd", scores.softmax(dim=-1), value).flatten(1)
        x = x + product(attended, f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = product(y, f"{name}.mlp.gate_proj"), product(y, f"{name}.mlp.up_proj")
        x = x + product(silu(gate) * up, f"{name}.mlp.down_proj")
    x = norm(x, "norm")
    state, logits = torch.zeros(width), []
    for position, token in zip(x, [embedding, *drafts], strict=False):
        out = product(position, "head.position_proj")
        if config.head != "none":
            before = [state] if config.head == "recurrent" else []
            state = torch.cat([*before, torch.zeros(width)])[:width]
            gate, new = product(torch.cat([token, *before, fused[-1]]), "head.gate").chunk(2)
            state = (1 - gate.sigmoid()) * state + gate.sigmoid() * silu(new)
            out = out + product(state, "head.state_proj")
            out = out + product(silu(product(torch.cat([position, state]), "head.inner")), "head.inner_proj")
        logits.append(product(out, "lm_head"))
    return torch.stack(logits)
