"""Calls of `generate` with more prompts than are decoded side by side, and with steps launched ahead of the host."""

import pytest
import torch

from helpers.generation import ON_BOTH_CACHES, Steps, noted
from helpers.models import paged, tiny_drafter, uneven_batch
from helpers.scheduling import launch_ahead
from redrafter import ReDrafter
from redrafter.engine.options import EngineOptions
from redrafter.model.target import Target
from redrafter.scheduler.prefill import Prefiller
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.tree.sizes import TreeShape

ENDS = [2, 5, 11, 30, 31, 32, 40]
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 4, "top_p": 0.9, "temperature": [0.5 + row / 10 for row in range(11)]},
    "penalised": {"do_sample": True, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "constants": {
        "do_sample": True,
        "seed": 5,
        "logit_bias": {4: 3.0, 6: -100.0},
        "bad_words_ids": [[5, 7], [17, 3]],
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [13, 60],
        "begin_suppress_tokens": [9, 61],
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-4,
        "exponential_decay_length_penalty": (5, 1.1),
        "forced_eos_token_id": 2,
    },
    "of the host": {
        "do_sample": False,
        "prefix_allowed_tokens_fn": lambda row, text: [2 + (row + int(text[-1]) + step) % 50 for step in range(9)],
        "logits_processor": [lambda ids, scores: scores + (ids[:, -1:] == 7)],
    },
}
SLOW = pytest.mark.filterwarnings("ignore:.*your own code runs in Python")


def engine_of(llama, max_batch_size: int = 256) -> ReDrafter:
    options = EngineOptions(max_batch_size=max_batch_size)
    return ReDrafter(Target(llama), tiny_drafter(), TreeShape(3, 3, 10), options=options)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_ahead(monkeypatch)


@SLOW
@pytest.mark.parametrize("way", WAYS)
@ON_BOTH_CACHES
def test_no_step_has_more_rows_than_allowed_and_none_of_a_row_that_has_ended(llama, monkeypatch, on, way):
    ended = lambda step, batch, *_: [sequence.ended for sequence in batch.rows]  # noqa: E731
    rows = noted(monkeypatch, RunningBatch, "prepare_step", ended)
    ids, mask = uneven_batch(rows=11)
    on(engine_of(llama, 4)).generate(ids, mask, max_new_tokens=30, eos_token_id=ENDS, **WAYS[way])
    assert max(map(len, rows)) == 4
    assert not any(ended for step in rows for ended in step)
    assert len({len(step) for step in rows}) > 1


def test_prompts_are_read_together_while_others_are_decoded(llama, monkeypatch):
    sizes = noted(monkeypatch, Prefiller, "forward", lambda read, prefiller, chunks, *_: len(chunks))
    ids, mask = uneven_batch(rows=21)
    engine_of(llama, 8).generate(ids, mask, max_new_tokens=30, eos_token_id=ENDS, do_sample=False)
    assert sizes[0] == 8
    assert sum(sizes) == 21
    assert min(sizes[1:-1]) >= 2


@SLOW
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at_once", [3, 11])
def test_steps_that_are_launched_ahead_change_no_token(llama, at_once, way):
    ids, mask = uneven_batch(rows=11)
    arguments = {"max_new_tokens": 30, "eos_token_id": ENDS} | WAYS[way]
    expected = engine_of(llama).generate(ids, mask, speculate=False, **arguments)
    engine = paged(engine_of(llama, at_once))
    for _ in range(2):
        out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
        assert torch.equal(out.sequences, expected)
    assert out.stats.emitted == sum(row.emitted for row in out.stats.rows)


@pytest.mark.usefixtures("ahead")
def test_scores_are_those_of_the_tokens_when_steps_are_launched_ahead(llama):
    ids, mask = uneven_batch(rows=5)
    arguments = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2, "return_dict_in_generate": True}
    arguments |= {"output_scores": True, "output_logits": True, "eos_token_id": ENDS}
    expected = engine_of(llama).generate(ids, mask, speculate=False, **arguments)
    out = paged(engine_of(llama, 2)).generate(ids, mask, **arguments)
    assert torch.equal(out.sequences, expected.sequences)
    for mine, theirs in zip((*out.scores, *out.logits), (*expected.scores, *expected.logits), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_streamer_hears_of_every_row_in_turn(llama):
    steps, (ids, mask) = Steps(), uneven_batch(rows=5)
    out = engine_of(llama, 2).generate(ids, mask, max_new_tokens=9, do_sample=False, streamer=steps)
    assert steps.ends == 1
    for row, tokens in steps.texts.items():
        assert out[row, ids.shape[1] :][: len(tokens)].tolist() == tokens
    assert sorted(steps.texts) == [0, 1, 2, 3, 4]


def test_a_deadline_ends_rows_that_wait_too(llama):
    ids, mask = uneven_batch(rows=5)
    out = engine_of(llama, 2).generate(ids, mask, max_new_tokens=60, max_time=1e-6, do_sample=False, eos_token_id=None)
    assert out.shape == (5, ids.shape[1] + 1)
    kept = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    late = engine_of(llama, 2).generate(ids, mask, max_new_tokens=60, max_time=1e-6, eos_token_id=None, **kept)
    assert torch.equal(late.sequences, out)
    for columns in (late.scores, late.logits):
        assert [column.shape for column in columns] == [(5, 97)]
        assert torch.equal(columns[0][:2].argmax(-1), out[:2, -1])


@ON_BOTH_CACHES
def test_an_interrupted_call_leaves_an_engine_that_works(llama, on):
    ids, mask = uneven_batch(rows=5)
    engine = on(engine_of(llama, 2))
    expected = engine.generate(ids, mask, max_new_tokens=9, do_sample=False)

    class Interrupts(Steps):
        def put_step(self, *args: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids, mask, max_new_tokens=9, do_sample=False, streamer=Interrupts())
    assert torch.equal(engine.generate(ids, mask, max_new_tokens=9, do_sample=False), expected)
    if engine.memory is not None:
        assert engine.memory.blocks.num_free_blocks == engine.memory.blocks.num_blocks


def test_progress_is_shown_when_asked_for(llama, capfd):
    ids, mask = uneven_batch(rows=5)
    engine_of(llama, 2).generate(ids, mask, max_new_tokens=4, do_sample=False)
    assert capfd.readouterr().err == ""
    engine_of(llama, 2).generate(ids, mask, max_new_tokens=4, do_sample=False, progress=True)
    assert "5/5" in capfd.readouterr().err
