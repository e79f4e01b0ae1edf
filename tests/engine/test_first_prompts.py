"""The first prompts of a call are read by a captured step without rows, and change no token."""

import pytest
import torch

from helpers.generation import noted, same_as_model, same_undrafted
from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead
from redrafter import DraftTarget
from redrafter.scheduler.prefill import Prefiller
from redrafter.scheduler.running_batch import RunningBatch

NEW = 12


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=2048, eos_token_id=None)


@pytest.fixture
def made(monkeypatch):
    """Launch ahead as on a GPU, and note the rooms of steps without rows and the prompts that forwards read alone."""
    launch_ahead(monkeypatch)
    forwards = noted(monkeypatch, Prefiller, "forward", lambda _, prefiller, chunks, caches: len(chunks))
    rooms = noted(
        monkeypatch,
        RunningBatch,
        "step",
        lambda _, batch, chunks=(): sum(count for _, count in chunks) if chunks and not batch.rows else None,
    )
    return forwards, rooms


def batch(*lengths):
    """Return left-padded prompts of so many tokens and their mask."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        made = torch.Generator().manual_seed(length + row)
        ids[row, -length:], mask[row, -length:] = torch.randint(3, VOCAB, (length,), generator=made), 1
    return ids, mask


@pytest.mark.parametrize(
    "lengths", [[1], [15], [16], [17], [60], [500], [512], [513], [1, 17], [60] * 8, [15, 16, 17], [500, 60]], ids=str
)
def test_a_call_writes_what_plain_decoding_writes(model, made, lengths):
    engine, prompts = paged(with_tree(model, tiny_drafter(), 3, 3), 400), batch(*lengths)
    same_as_model(engine, *prompts, max_new_tokens=NEW)
    forwards, rooms = made
    assert [room for room in rooms if room] == ([] if sum(lengths) > 512 else [sum(lengths)])
    assert sum(forwards) == (len(lengths) if sum(lengths) > 512 else 0)
    for sampling in ({"do_sample": False}, {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 20}):
        same_undrafted(engine, *prompts, max_new_tokens=NEW, **sampling)


def test_a_prompt_that_shares_a_prefix_is_read_behind_it(model, made):
    engine, (ids, mask) = paged(with_tree(model, tiny_drafter(), 3, 3), 400), batch(100)
    expected = same_as_model(engine, ids, mask, max_new_tokens=NEW)
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False), expected)
    first, again = [room for room in made[1] if room]
    assert first == 100
    assert again < 40  # all whole blocks but those of the last tokens


def test_scores_and_logits_of_the_first_token_are_those_of_plain_decoding(model, made):
    engine, prompts = paged(with_tree(model, tiny_drafter(), 3, 3), 400), batch(60, 17)
    asked = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    asked |= {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.3}
    found = engine.generate(*prompts, **asked)
    expected = model.generate(prompts[0], attention_mask=prompts[1], **asked)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=1e-4, rtol=1e-4)
    assert any(made[1])
    assert not made[0]


def test_a_draft_model_reads_prompts_in_forwards_of_their_own(model, made):
    draft = tiny_model("llama", num_hidden_layers=1, eos_token_id=None, max_position_embeddings=2048)
    engine, prompts = paged(DraftTarget.from_pretrained(model, draft), 400), batch(60, 17)
    same_as_model(engine, *prompts, max_new_tokens=NEW)
    assert made[0]
    assert not any(made[1])
