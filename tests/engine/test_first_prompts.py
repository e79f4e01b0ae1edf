"""The first prompts of a call are read by a step without rows as long as they are short, and change no token."""

import pytest

from helpers.generation import noted, same_as_model, same_undrafted
from helpers.models import paged, prompts_of, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead
from redrafter.scheduler.prefill import Prefiller


@pytest.mark.parametrize(("lengths", "alone"), [([1, 17], 0), ([512], 0), ([513], 1), ([500, 60], 2)], ids=str)
def test_prompts_of_a_call_are_read_together_or_alone_by_their_length(lengths, alone, monkeypatch):
    launch_ahead(monkeypatch)
    forwards = noted(monkeypatch, Prefiller, "forward", lambda read, prefiller, chunks, *_: len(chunks))
    model = tiny_model("llama", max_position_embeddings=2048, eos_token_id=None)
    engine, prompts = paged(with_tree(model, tiny_drafter(), 3, 3), 400), prompts_of(lengths)
    same_as_model(engine, *prompts, max_new_tokens=12)
    assert sum(forwards) == alone
    same_undrafted(engine, *prompts, max_new_tokens=12, do_sample=True, seed=5, temperature=0.9, top_k=20)
