"""Mistakes of callers: what an engine answers, and where its warnings point."""

import warnings

import pytest
import torch
from transformers import AutoTokenizer

from helpers.models import tiny_drafter, tiny_model
from redrafter import ArgumentError, PromptLookup, ReDrafter, ReDrafterWarning, boxed_pair
from redrafter.checkpoints.models import load_model

CONTEXT = 32


@pytest.fixture(scope="module")
def engine():
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    return PromptLookup.from_pretrained(model)


def test_a_prompt_that_is_no_tensor_is_answered_with_what_to_write(engine):
    encoded = AutoTokenizer.from_pretrained(boxed_pair())("Once", return_tensors="pt")
    for given, says in (
        (encoded, r"write generate\(\*\*inputs\)"),
        ("Once", r"engine\.generate\(\*\*tokenizer\(text"),
        ([[1, 2]], r"torch\.tensor"),
    ):
        with pytest.raises(ArgumentError, match=says):
            engine.generate(given)


def test_a_dtype_has_the_names_that_people_give_it():
    for name in ("fp16", "torch.float16"):
        model = load_model(boxed_pair(), dtype=name, device=None, trust_remote_code=False)
        assert model.dtype == torch.float16
    with pytest.raises(ArgumentError, match=r"dtype=.fp8. is none of auto, .*quantization=.fp8."):
        ReDrafter.from_pretrained(boxed_pair(), dtype="fp8")


def test_a_directory_without_a_config_is_named(tmp_path):
    with pytest.raises(Exception, match=r"has no config\.json; give the directory that save_pretrained wrote"):
        ReDrafter.from_pretrained(tmp_path)


def test_an_engine_is_shown_with_its_model_and_the_sizes_of_its_tree():
    shown = repr(ReDrafter.from_pretrained(boxed_pair()))
    assert shown == "ReDrafter(LlamaForCausalLM, float32, cpu, num_beams=5, draft_len_per_beam=5, nodes=12)"


def test_a_warning_points_at_the_line_that_called_the_library(engine):
    ids = torch.ones(1, CONTEXT - 1, dtype=torch.long)
    own = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls = (
        lambda: ReDrafter.from_pretrained(engine.model, tiny_drafter(trained_draft_len=2), draft_len_per_beam=9),
        lambda: engine.generate(ids, **own),
        lambda: engine.model.generate(ids, custom_generate=engine.custom_generate(), **own),  # through transformers
    )
    for call in calls:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            call()
        [ours] = [each for each in warned if each.category is ReDrafterWarning]
        assert (ours.filename, ours.lineno) == (__file__, call.__code__.co_firstlineno), ours.message
