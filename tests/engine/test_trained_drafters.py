"""Drafters of every kind that are trained for a minute on the boxed base, through the step that drafts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import DynamicCache

from helpers.models import DRAFTER_ALONE
from helpers.mtp import random_mtp
from redrafter import EagleConfig, EagleDrafter, ReDrafter, boxed_pair
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.mtp import MTPDrafter
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.tree.sizes import TreeShape

LINES = (Path(__file__).parent.parent / "data" / "held_out.jsonl").read_text().splitlines()
NEW_TOKENS, TRAIN_TEXTS = 80, 340
TEXTS, ANCHORS, DEPTH = 8, 48, 3  # texts of a step, anchors of a head in each, drafts after each anchor
LENGTHS = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """Write what follows the first and the last tokens of the prompts with the boxed pair, two texts each: `[N, T]`."""
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())
    prompts = [tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids for line in LINES]
    ids = torch.tensor([part for prompt in prompts if len(prompt) > 16 for part in (prompt[:16], prompt[-16:])])
    return engine.generate(ids, do_sample=False, **LENGTHS)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(
        load_model(boxed_pair(), dtype="float32", device=None, trust_remote_code=False).eval().requires_grad_(False)
    )


def trained(
    drafter: DrafterModel, target: Target, texts: Tensor, steps: int, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> DrafterModel:
    """Train a drafter on texts `[N, T]`, of whose rows, hidden states and embeddings `loss` is called with some."""
    with torch.no_grad(), Teacher(target.model, getattr(drafter.config, "target_layers", None) or []) as teacher:
        read = [teacher.read_batch(part) for part in texts.split(20)]
        # The next tokens are read from drafted states as the base reads them from its own.
        drafter.norm.weight.copy_(target.model.model.norm.weight)
    hidden, embedding = (torch.cat([getattr(part, name) for part in read]).float() for name in ("hidden", "embedding"))
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(texts), (TEXTS,))
        optimizer.zero_grad()
        loss(texts[rows], hidden[rows], embedding[rows]).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return drafter.eval().requires_grad_(False)


def head_loss(head: EagleDrafter, text: Tensor, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the cross-entropy of the drafts after random anchors, each draft reading the hidden state of the last."""
    (rows, tokens), groups = text.shape, head.config.num_attention_heads // head.config.num_key_value_heads
    fused, row = head.fuse_hidden(hidden), torch.arange(rows)[:, None]
    length = torch.randint(8, tokens - DEPTH, (rows, ANCHORS))  # committed tokens of each anchor
    past = head.read_past(embedding, fused, torch.full((rows,), tokens))
    hides = torch.arange(tokens - 1) >= length.repeat_interleave(groups, dim=1)[:, None, :, None] - 1  # [B, 1, A g, S]
    past = past._replace(bias=torch.zeros(hides.shape).masked_fill(hides, -torch.inf))
    carried, path, loss = fused[row, length - 1], None, torch.zeros(())
    for k in range(DEPTH):
        logits, carried, path = head.step(embedding[row, length + k], carried, length - 1 + k, path, past)
        loss = loss + 0.8**k * cross_entropy(logits.flatten(0, 1), text[row, length + k + 1].flatten())
    return loss


def layer_loss(layer: MTPDrafter, head: Tensor, text: Tensor, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the cross-entropy of the drafts after every token, each reading the hidden state of the last draft."""
    rows, tokens = text.shape
    count = tokens - DEPTH - 1
    entries, carried, loss = DynamicCache(), hidden[:, :count], torch.zeros(())
    own = torch.eye(count, dtype=torch.bool).expand(rows, -1, -1)
    seen = own.new_ones(count, count).tril().expand(rows, -1, -1)
    block, config = layer.blocks[0], layer.blocks[0].self_attn.config
    ours, config._attn_implementation = config._attn_implementation, "sdpa"  # ours stores entries without gradients
    for k in range(DEPTH):
        position, x = (
            (torch.arange(count) + k).expand(rows, -1),
            layer.join(embedding[:, k + 1 : k + 1 + count], carried),
        )
        given = {"position_ids": position, "position_embeddings": layer.rotary(x, position), "past_key_values": entries}
        carried = layer.norm(block(x, attention_mask=seen[:, None], **given))
        logits = linear(carried, head)
        loss = loss + 0.8**k * cross_entropy(logits.flatten(0, 1), text[:, k + 2 : k + 2 + count].flatten())
        seen = torch.cat([seen, own], dim=-1)
    config._attn_implementation = ours
    return loss


@pytest.mark.slow
def test_a_trained_head_is_accepted(target, texts):
    torch.manual_seed(0)
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.model.config.hidden_size}
    form = {"intermediate_size": 288, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layers = EagleConfig(**sizes, **form).target_layers_of(target.model.config.num_hidden_layers)
    head = EagleDrafter(EagleConfig(**sizes, **form, target_layers=layers))
    head.lm_head.weight.data.copy_(target.model.lm_head.weight)
    trained(head, target, texts[:TRAIN_TEXTS], 500, lambda *read: head_loss(head, *read))
    engine = ReDrafter.from_pretrained(boxed_pair(), head, num_beams=5, draft_len_per_beam=4, node_budget=21)
    out = engine.generate(texts[TRAIN_TEXTS:, :16], do_sample=False, return_dict_in_generate=True, **LENGTHS)
    assert torch.equal(out.sequences, texts[TRAIN_TEXTS:])
    assert out.stats.tokens_per_step > 1.7  # 1.95


@pytest.mark.slow
def test_a_tree_of_a_trained_layer_is_accepted_more_than_its_chain(target, texts):
    torch.manual_seed(0)
    layer = random_mtp(target).requires_grad_(True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.05) if weight.dim() > 1 else weight.fill_(1)
    head, held_out = target.head.weight.detach(), texts[TRAIN_TEXTS:, :16]
    trained(layer, target, texts[:TRAIN_TEXTS], 400, lambda *read: layer_loss(layer, head, *read))
    for draws in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 1}):
        arguments, found = LENGTHS | draws | {"return_dict_in_generate": True}, {}
        for shape in ((1, 4, 5), (3, 4, 13)):
            engine = ReDrafter(target, layer, TreeShape(*shape), options=DRAFTER_ALONE)
            engine.pauses = False
            out = engine.generate(held_out, **arguments)
            found[shape[0]] = out.stats.tokens_per_step
            assert torch.equal(out.sequences, engine.generate(held_out, **arguments, speculate=False).sequences)
        assert found[1] > 1.2
        assert found[3] > 1.1 * found[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dflash", "dspark", "dflash2"])
def test_a_tree_of_trained_blocks_is_accepted_more_than_their_chain(form, target, texts):
    config = TrainConfig(form=form, num_layers=2, draft_len=4, steps=80, lr=6e-3, cpu=True, log_every=40)
    drafter, losses = new_drafter(target.model, config), []
    order, rows = torch.Generator().manual_seed(0), texts[:TRAIN_TEXTS]
    mask = torch.ones(TEXTS, texts.shape[1], dtype=torch.bool)
    batches = ((rows[torch.randint(len(rows), (TEXTS,), generator=order)], mask) for _ in range(config.steps))
    train(target.model, drafter, batches, config, progress=lambda numbers: losses.append(numbers.loss))
    assert losses[-1] < 0.7 * losses[0]
    held_out, own = texts[TRAIN_TEXTS:, :16], Target(target.model)
    for draws in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 1}):
        arguments, found = LENGTHS | draws | {"return_dict_in_generate": True}, []
        for shape in ((1, 4, 5), (5, 4, 16)):
            engine = ReDrafter(own, drafter, TreeShape(*shape), options=DRAFTER_ALONE)
            engine.pauses = False
            out = engine.generate(held_out, **arguments)
            found.append(out.stats.tokens_per_step)
            assert torch.equal(out.sequences, engine.generate(held_out, **arguments, speculate=False).sequences)
        assert found[0] > 1.05
        assert found[1] > 1.08 * found[0]
