"""Engines on models with recurrent states: a draft model's states are rolled back too, and rows come and go."""

import copy

import pytest
import torch

from helpers.generation import same_undrafted
from helpers.models import uneven_batch
from helpers.recurrent import generated_alone, recurrent_model
from redrafter import DraftTarget, PromptLookup, UnsupportedError

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


def test_batch_invariance_is_refused():
    with pytest.raises(UnsupportedError, match="batch_invariant=True and layers with recurrent states exclude"):
        PromptLookup.from_pretrained(recurrent_model("lfm2"), batch_invariant=True)
