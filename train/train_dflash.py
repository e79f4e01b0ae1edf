"""Train a small DFlash, DSpark or DFlash2 drafter for minutes, and count tokens per step of its chains and trees.

It shows that acceptance is real, on the boxed base or on any other that fits the machine beside its activations:

    python train/train_dflash.py --form DSpark --data texts.jsonl --prompts prompts.jsonl --minutes 10

Each row of `--data` has a `text`, of `--prompts` a `prompt`. The drafts are fitted to the base's own distributions.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the code of this checkout, whatever is installed

import torch
from torch import Tensor

from redrafter import DFlashConfig, DFlashDrafter, ReDrafter, boxed_pair
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.drafting.dflash_layers import LayerContext
from redrafter.train.teacher import Teacher

FORMS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DSpark": {"markov_rank": 64, "sample_from_anchor": True},
    "DFlash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16},
}
DECAY = 0.85  # weight of a draft, in that of the one before it
FIRST = 8  # fewest committed tokens before a block


def new_drafter(model: Any, form: str, layers: int, block_size: int) -> DFlashDrafter:
    """Return a drafter of a form with random weights, for a base whose head sizes its attention has."""
    config, count = model.config, model.config.num_hidden_layers
    drafter = DFlashDrafter(
        DFlashConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            block_size=block_size,
            mask_token_id=config.pad_token_id or 0,
            target_layers=sorted({(count * part) // 4 - 1 for part in (1, 2, 3)} | {count - 2}),
            **FORMS[form],
        )
    )
    with torch.no_grad():
        drafter.norm.weight.copy_(model.model.norm.weight)  # hidden states are to be read as the base's own
        for name, weight in drafter.named_parameters():
            if weight.dim() == 2:
                small = "codebook" in name or "markov" in name or "kernel" in name
                weight.normal_(std=0.02 if small else weight.shape[1] ** -0.5)
    return drafter.to(model.device)


def block_loss(drafter: DFlashDrafter, model: Any, text: Tensor, hidden: Tensor, anchors: int) -> Tensor:
    """Return the cross-entropy of blocks after random tokens of texts, to the base's distributions.

    Args:
        drafter: The drafter.
        model: The base, whose embeddings and head it shares.
        text: Tokens, `[B, T]` int64.
        hidden: The hidden states that the drafter reads, `[B, T, F]`.
        anchors: Blocks in each text.
    """
    (rows, tokens), drafts, heads = text.shape, drafter.config.drafts, drafter.config.num_key_value_heads
    place, head = torch.arange(tokens, device=text.device), model.get_output_embeddings()
    sides = drafter.remember(drafter.fuse_hidden(hidden), place.expand(rows, -1))
    keys, values = (x[:, None].expand(-1, anchors, -1, -1, -1).flatten(0, 1) for x in sides)
    length = torch.randint(FIRST, tokens - drafts, (rows, anchors), device=text.device)
    there = (length[:, :, None] + torch.arange(drafts, device=text.device)).flatten(1)  # [B, A K], before each draft
    before = text.gather(1, there).view(rows * anchors, drafts)

    def read(layer: int) -> LayerContext:
        part = slice(layer * heads, (layer + 1) * heads)
        return LayerContext(keys[:, :, part], values[:, :, part], place.expand(len(keys), -1))

    opened = drafter.open_block(before[:, :1], hidden, model.get_input_embeddings())
    block = drafter.fill(opened, length.flatten(), read)[:, -drafts:]
    made, state = drafter.logits(block, head), None
    losses = [made]
    if drafter.markov_head is not None:
        added = []
        for k in range(drafts):
            more, state = drafter.markov_head(before[:, k, None], block[:, k], state)
            added.append(more)
        losses = [made + torch.cat(added, dim=1)]
    elif (selector := drafter.candidate_selector) is not None:
        code = selector.predecessor_codebook[before] * selector.hidden_projection(block)
        losses.append(made + code @ selector.successor_codebook.T)
    with torch.no_grad():
        last = hidden[..., : drafter.config.hidden_size]
        wanted = head(last.gather(1, there[:, :, None].expand(-1, -1, last.shape[-1]))).view_as(made).softmax(dim=-1)
    weight = DECAY ** torch.arange(drafts, device=text.device)
    return torch.stack([-((wanted * x.log_softmax(dim=-1)).sum(dim=-1) * weight).mean() for x in losses]).sum()


def train(
    drafter: DFlashDrafter, model: Any, texts: Tensor, part_done: Callable[[int], float], *, rows: int = 16
) -> DFlashDrafter:
    """Train a drafter on texts `[N, T]` until `part_done(steps)` is 1; the base reads them once, before the first."""
    layers = drafter.config.target_layers
    with torch.no_grad(), Teacher(model, layers) as teacher:
        hidden = torch.cat([teacher.read_batch(part.to(model.device)).hidden.bfloat16() for part in texts.split(32)])
    texts = texts.to(model.device)
    optimizer, steps, rate = torch.optim.AdamW(drafter.train().parameters(), betas=(0.9, 0.95)), 0, 3e-3
    while (part := part_done(steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min((steps + 1) / 50, 1.02 - part)
        chosen = torch.randint(len(texts), (rows,), device=model.device)
        loss = block_loss(drafter, model, texts[chosen], hidden[chosen].to(model.dtype), anchors=16)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 100 == 0:
            print(f"step {steps}, loss {loss.item():.3f}", flush=True)
    return drafter.eval()


def tokens_per_step(base: Any, drafter: Any, prompts: list[Tensor], new: int, **shape: int) -> tuple[float, float]:
    """Return the tokens per step of a shape, greedy and at temperature 1; fail unless the text is the base's own."""
    engine = ReDrafter.from_pretrained(base, drafter, tuning=None, draft_from_text=False, **shape)
    engine.pauses = False  # steps without drafts would count too
    found = []
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 1.0, "seed": 1}):
        steps = written = 0
        for ids in prompts:
            asked = {"max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None, "pad_token_id": 0} | sampling
            out = engine.generate(ids, **asked, return_dict_in_generate=True)
            assert torch.equal(out.sequences, engine.generate(ids, **asked, speculate=False))
            steps, written = steps + out.stats.steps, written + out.stats.emitted
        found.append(written / steps)
    return found[0], found[1]


def main() -> None:
    """Train, save, and print a table of tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=str(boxed_pair()), help="the base (default: the boxed one)")
    parser.add_argument("--form", choices=FORMS, default="DFlash")
    parser.add_argument("--data", required=True, help="texts to train on, JSON lines")
    parser.add_argument("--prompts", required=True, help="prompts to count tokens per step on, JSON lines")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, what the base reads included")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--texts", type=int, default=1000, help="rows of --data to read")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text")
    parser.add_argument("--new", type=int, default=64, help="tokens to write after each prompt")
    parser.add_argument("--nodes", type=int, default=26, help="nodes of a tree")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", help="directory to save the drafter in")
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = load_tokenizer(given.base)
    model = (
        load_model(given.base, dtype="auto", device=given.device, trust_remote_code=False).eval().requires_grad_(False)
    )
    texts = []
    for line in Path(given.data).read_text().splitlines()[: given.texts]:
        ids = tokenizer(json.loads(line).get("text") or " ").input_ids
        texts += [ids[first : first + given.tokens] for first in range(0, min(len(ids), 1000), given.tokens)]
    whole = torch.tensor([ids for ids in texts if len(ids) == given.tokens])
    drafter, start = new_drafter(model, given.form, given.layers, given.block_size), time.monotonic()
    train(drafter, model, whole, lambda steps: (time.monotonic() - start) / 60 / given.minutes)
    if given.output:
        drafter.save_pretrained(given.output)
    asked = [json.loads(line)["prompt"] for line in Path(given.prompts).read_text().splitlines()]
    read = [tokenizer(text, add_special_tokens=False).input_ids[-32:] for text in asked]
    prompts = torch.tensor([ids for ids in read if len(ids) == 32]).to(given.device).split(8)  # type: ignore[no-untyped-call]
    depth = drafter.config.drafts
    for name, shape in (
        ("chain", (1, depth, 1 + depth)),
        *((f"{w} beams", (w, depth, given.nodes)) for w in (3, 5, 8)),
    ):
        sizes = dict(zip(("num_beams", "draft_len_per_beam", "node_budget"), shape, strict=True))
        greedy, sampled = tokens_per_step(model, drafter, list(prompts[:8]), given.new, **sizes)
        print(f"{given.form}, {name}, {shape[2]} nodes: {greedy:.2f} greedy, {sampled:.2f} at T=1", flush=True)


if __name__ == "__main__":
    main()
