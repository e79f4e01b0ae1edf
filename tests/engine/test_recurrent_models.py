"""Engines on models with recurrent states: a draft model's states are rolled back too, and rows come and go."""

import copy

import pytest
import torch

from helpers.generation import ON_BOTH_CACHES, same_undrafted
from helpers.models import tiny_drafter, tiny_model, uneven_batch
from helpers.recurrent import generated_alone, recurrent_model
from redrafter import DraftTarget, PromptLookup, ReDrafter, UnsupportedError

NEW = 24
IDS, MASK = uneven_batch()
ONE = torch.tensor([[5]]), torch.tensor([[1]])  # a prompt of one token
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
PAIRS = [("qwen3_next", "qwen3_next"), ("mamba", "mamba"), ("lfm2", "jamba"), ("mamba2", "falcon_h1")]
SHAPES = {"chain": {}, "tree": {"num_beams": 3}, "adaptive": {"adaptive": True}}


@pytest.mark.parametrize(
    ("architecture", "draft_architecture", "shape", "batch"),
    [
        *(("lfm2", "lfm2", shape, (IDS, MASK)) for shape in ("chain", "tree", "adaptive")),
        *((*pair, "chain", (IDS, MASK)) for pair in PAIRS),
        ("qwen3_next", "qwen3_next", "chain", ONE),
        ("qwen3_next", "qwen3_next", "tree", ONE),
    ],
)
def test_a_hybrid_drafts_for_a_hybrid(architecture, draft_architecture, shape, batch):
    model, draft = recurrent_model(architecture), copy.deepcopy(recurrent_model(draft_architecture))
    engine = DraftTarget.from_pretrained(model, draft, **SHAPES[shape])
    out = engine.generate(*batch, **GREEDY)
    assert torch.equal(out.sequences, generated_alone(model, *batch, NEW))
    if architecture == draft_architecture and shape == "chain":
        assert out.stats.tokens_per_step > 4.5  # all drafts hold, or its states are not what they should be
    same_undrafted(engine, *batch, max_new_tokens=NEW, do_sample=True, seed=3)


@ON_BOTH_CACHES
@pytest.mark.parametrize("architecture", ["lfm2", "mamba2"])
@pytest.mark.parametrize("drafts", ["drafter", "draft model"])
def test_drafts_are_copied_from_the_text_too(architecture, on, drafts):
    """Chains of copies hang on nodes of any level, as their states must."""
    model = copy.deepcopy(recurrent_model(architecture))
    model.generation_config.eos_token_id = None
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    if drafts == "drafter":
        drafter = tiny_drafter(hidden_size=hidden, vocab_size=vocabulary)
        engine = on(ReDrafter.from_pretrained(model, drafter, num_beams=3, draft_len_per_beam=3, node_budget=6))
    else:
        small = tiny_model("llama", vocab_size=vocabulary, max_position_embeddings=384)
        engine = on(DraftTarget.from_pretrained(model, small, num_beams=3, draft_len=3, node_budget=6))
    engine.pauses, copied, draw = False, 0, torch.Generator().manual_seed(1)
    for seed in range(3):
        part = torch.randint(3, 90, (1, 9), generator=draw).repeat(1, 4)
        how = {"max_new_tokens": 30, "do_sample": seed > 0, "seed": seed, "temperature": 0.5}
        text = torch.cat([engine.generate(part, speculate=False, **how), part], dim=1)  # which may repeat itself
        out = engine.generate(text, **how, return_dict_in_generate=True)
        assert torch.equal(out.sequences, engine.generate(text, speculate=False, **how))
        copied += out.stats.copied
    assert copied > 3


def test_rows_come_and_go():
    model = recurrent_model("lfm2")
    ids, mask = uneven_batch(rows=5)
    engine = PromptLookup.from_pretrained(model, max_batch_size=2)
    limits = [3, 20, 8, 2, 14]
    expected = generated_alone(model, ids, mask, max(limits))
    for row in range(5):  # others beside it end earlier and later
        out = engine.generate(ids[row:], mask[row:], max_new_tokens=limits[row], do_sample=False)
        assert torch.equal(out, expected[row:, : ids.shape[1] + limits[row]])


def test_batch_invariance_is_refused():
    with pytest.raises(UnsupportedError, match="batch_invariant=True and layers with recurrent states exclude"):
        PromptLookup.from_pretrained(recurrent_model("lfm2"), batch_invariant=True)
