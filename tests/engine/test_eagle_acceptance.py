"""An EAGLE-3 head that is trained for a minute on the boxed base, through the step that drafts."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from redrafter import EagleConfig, EagleDrafter, ReDrafter, boxed_pair
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.train.teacher import Teacher

LINES = (Path(__file__).parent.parent / "data" / "held_out.jsonl").read_text().splitlines()
NEW_TOKENS, TRAIN_TEXTS = 80, 340
STEPS, TEXTS, ANCHORS, DEPTH = 500, 8, 48, 3  # texts of a step, anchors in each, drafts after each


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """Write what follows the first and the last tokens of the prompts with the boxed pair, two texts each: `[N, T]`."""
    engine, tokenizer = ReDrafter.from_pretrained(boxed_pair()), load_tokenizer(boxed_pair())
    prompts = [tokenizer(json.loads(line)["prompt"], add_special_tokens=False).input_ids for line in LINES]
    ids = torch.tensor([part for prompt in prompts if len(prompt) > 16 for part in (prompt[:16], prompt[-16:])])
    return engine.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


def trained_head(texts: Tensor) -> EagleDrafter:
    """Train a head for the boxed base on texts `[N, T]`, from random weights."""
    torch.manual_seed(0)
    model = load_model(boxed_pair(), dtype="auto", device=None, trust_remote_code=False).eval()
    config = EagleConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        intermediate_size=288,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    layers = config.target_layers_of(model.config.num_hidden_layers)
    with torch.no_grad(), Teacher(model, layers) as teacher:
        read = [teacher.read(part) for part in texts.split(20)]
    hidden, embedding = (torch.cat([getattr(part, name) for part in read]) for name in ("hidden", "embedding"))
    head = EagleDrafter(config).train()
    with torch.no_grad():  # the next tokens are read from drafted states as the base reads them from its own
        head.lm_head.weight.copy_(model.lm_head.weight)
        head.norm.weight.copy_(model.model.norm.weight)
    optimizer = torch.optim.AdamW(head.parameters(), lr=6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(texts), (TEXTS,))
        loss = draft_loss(head, texts[rows], hidden[rows], embedding[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return head.eval()


def draft_loss(head: EagleDrafter, text: Tensor, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the cross-entropy of the drafts after random anchors, each draft reading the hidden state of the last."""
    (rows, tokens), groups = text.shape, head.config.num_attention_heads // head.config.num_key_value_heads
    fused, row = head.fuse_hidden(hidden), torch.arange(rows)[:, None]
    length = torch.randint(8, tokens - DEPTH, (rows, ANCHORS))  # committed tokens of each anchor
    past = head.read_past(*head.remember(embedding, fused), torch.full((rows,), tokens))
    hides = torch.arange(tokens - 1) >= length.repeat_interleave(groups, dim=1)[:, None, :, None] - 1  # [B, 1, A g, S]
    past = past._replace(bias=torch.zeros(hides.shape).masked_fill(hides, -torch.inf))
    carried, path, loss = fused[row, length - 1], None, torch.zeros(())
    for k in range(DEPTH):
        logits, carried, path = head.step(embedding[row, length + k], carried, length - 1 + k, path, past)
        loss = loss + 0.8**k * cross_entropy(logits.flatten(0, 1), text[row, length + k + 1].flatten())
    return loss


@pytest.mark.slow
def test_a_trained_head_is_accepted(texts):
    head = trained_head(texts[:TRAIN_TEXTS])
    engine = ReDrafter.from_pretrained(boxed_pair(), head, num_beams=5, draft_len_per_beam=4, node_budget=21)
    held_out = texts[TRAIN_TEXTS:, :16]
    out = engine.generate(
        held_out, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, texts[TRAIN_TEXTS:])
    assert out.stats.tokens_per_step > 1.7  # 1.95
