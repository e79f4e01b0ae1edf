"""Prompts that are refused, with what is wrong with them, and those at the edge of what is taken."""

import pytest
import torch

from helpers.models import CONTEXT, VOCAB, uneven_batch
from redrafter import ArgumentError

IDS, MASK = uneven_batch()
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize(
    ("ids", "mask", "named"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, "prompt is empty"),
        (torch.zeros(0, 3, dtype=torch.long), None, "prompt is empty"),
        (torch.tensor([5, 6]), None, r"\[batch, length\]"),
        ([[5, 6]], None, "list"),
        (torch.tensor([[0.5]]), None, "integer"),
        (torch.tensor([[5, VOCAB]]), None, f"token id {VOCAB} is out of range"),
        (torch.tensor([[5, -1]]), None, "token id -1"),
        (IDS, MASK[:, 1:], "shape of input_ids"),
        (IDS, MASK[:2], "shape of input_ids"),
        (IDS, MASK.flip(1), "left-padded"),
        (IDS, MASK * 0, "no token"),
        (torch.full((1, CONTEXT), 5), None, f"{CONTEXT} tokens and the target's context is {CONTEXT}"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_named(engine, ids, mask, named):
    with pytest.raises(ArgumentError, match=named):
        engine.generate(ids, mask, **GREEDY)


def test_ids_may_be_of_either_integer_width(llama, engine):
    expected = llama.generate(IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(engine.generate(IDS.int(), MASK.bool(), **GREEDY), expected)


def test_a_prompt_one_short_of_the_context_writes_one_token(llama, engine):
    ids = torch.full((1, CONTEXT - 1), 5)
    assert engine.generate(ids, max_length=CONTEXT, do_sample=False).shape[1] == CONTEXT
