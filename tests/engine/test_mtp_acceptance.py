"""An MTP layer that is trained for a minute on the boxed base, through the step that drafts."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from helpers.models import DRAFTER_ALONE
from helpers.mtp import random_mtp
from redrafter import ReDrafter, boxed_pair
from redrafter.cache.kv_cache import LayerShape
from redrafter.checkpoints.merged import TreeShape
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.drafting.mtp import DraftedEntries, MTPDrafter, Past
from redrafter.model.target import Target
from redrafter.train.teacher import Teacher

LINES = (Path(__file__).parent.parent / "data" / "held_out.jsonl").read_text().splitlines()
NEW_TOKENS, TRAIN_TEXTS = 80, 340
STEPS, TEXTS, DEPTH = 400, 8, 3  # texts of a step, drafts after each of their tokens


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """Write what follows the first and the last tokens of the prompts with the boxed pair, two texts each: `[N, T]`."""
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())
    prompts = [tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids for line in LINES]
    ids = torch.tensor([part for prompt in prompts if len(prompt) > 16 for part in (prompt[:16], prompt[-16:])])
    return engine.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


def trained_layer(target: Target, texts: Tensor) -> MTPDrafter:
    """Train a layer for a target on texts `[N, T]`, from random weights."""
    torch.manual_seed(0)
    with torch.no_grad(), Teacher(target.model, []) as teacher:
        read = [teacher.read(part) for part in texts.split(20)]
    hidden, embedding = (torch.cat([getattr(part, name) for part in read]).float() for name in ("hidden", "embedding"))
    layer = random_mtp(target).train().requires_grad_(True)
    shape = layer.stored_layer(target, False).shape
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.05) if weight.dim() > 1 else weight.fill_(1)
        layer.norm.weight.copy_(target.model.model.norm.weight)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(texts), (TEXTS,))
        loss = draft_loss(layer, shape, target.head.weight.detach(), texts[rows], hidden[rows], embedding[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return layer.eval().requires_grad_(False)


def draft_loss(
    layer: MTPDrafter, shape: LayerShape, head: Tensor, text: Tensor, hidden: Tensor, embedding: Tensor
) -> Tensor:
    """Return the cross-entropy of the drafts after every token, each reading the hidden state of the last draft."""
    rows, tokens = text.shape
    count = tokens - DEPTH - 1
    entries, carried, loss = DraftedEntries(), hidden[:, :count], torch.zeros(())
    own = torch.eye(count, dtype=torch.bool).expand(rows, -1, -1)
    seen = own.new_ones(count, count).tril().expand(rows, -1, -1)
    for k in range(DEPTH):
        position = (torch.arange(count) + k).expand(rows, -1)
        # All entries are as of drafts, in room of each step's own: what is read again for gradients must not change.
        room = (torch.zeros(rows, shape.heads, (k + 1) * count, width) for width in (shape.key_dim, shape.value_dim))
        past = Past(*room, seen.new_zeros(rows, 0))
        carried = layer.step(layer.join(embedding[:, k + 1 : k + 1 + count], carried), position, seen, past, entries)
        logits = linear(carried, head)
        loss = loss + 0.8**k * cross_entropy(logits.flatten(0, 1), text[:, k + 2 : k + 2 + count].flatten())
        seen = torch.cat([seen, own], dim=-1)
    return loss


@pytest.mark.slow
def test_a_tree_of_a_trained_layer_is_accepted_more_than_its_chain(texts):
    model = load_model(boxed_pair(), dtype="float32", device=None, trust_remote_code=False).eval()
    target = Target(model)
    layer, held_out = trained_layer(target, texts[:TRAIN_TEXTS]), texts[TRAIN_TEXTS:, :16]
    arguments = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    for draws in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 1}):
        found = {}
        for shape in ((1, 4, 5), (3, 4, 13)):
            engine = ReDrafter(target, layer, TreeShape(*shape), options=DRAFTER_ALONE)
            engine.pauses = False
            out = engine.generate(held_out, **arguments, **draws)
            found[shape[0]] = out.stats.tokens_per_step
            assert torch.equal(
                out.sequences, engine.generate(held_out, **arguments, **draws, speculate=False).sequences
            )
        print(draws, found)
        assert found[1] > 1.2
        assert found[3] > 1.1 * found[1]
