"""Serving models with recurrent states: rows come, go, move and are preempted, and each has its own state."""

import pytest

from helpers.models import paged, uneven_batch
from helpers.recurrent import generated_alone, recurrent_model
from helpers.scheduling import alone, launch_ahead, make_sequence, nothing_is_held, random_sequences, run, scheduler
from redrafter import DraftTarget, Engine
from redrafter.cache.block_manager import BlockManager
from redrafter.drafting.prompt_lookup import PromptLookupProposer
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.row_caches import PagedRows

GREEDY = SamplingParams(temperature=0)


def engine_of(architecture: str) -> Engine:
    """Return an engine whose drafts are often right: the model drafts for itself, as a tree."""
    target = Target(recurrent_model(architecture))
    return DraftTarget(target, Target(recurrent_model(architecture)), draft_len=3, num_beams=2)


@pytest.fixture(scope="module", params=["lfm2", "mamba2"])
def engine(request) -> Engine:
    return engine_of(request.param)


def test_steps_that_are_launched_ahead_write_the_same(engine, monkeypatch):
    launch_ahead(monkeypatch)
    sequences = random_sequences(6, seed=3, max_new_tokens=16)
    served = scheduler(engine)
    assert not served.mixed_prefill
    run(served, sequences, 1)
    for each in sequences:
        assert each.sink.tokens == alone(engine, each)


def test_more_sequences_than_there_are_states_wait(engine):
    sequences = random_sequences(12, seed=1, max_new_tokens=12)
    served = scheduler(engine)
    assert served.graphs.store.rows < len(sequences)
    run(served, sequences)
    for each in sequences:
        assert each.sink.tokens == alone(engine, each)
    nothing_is_held(served)


def test_drafts_are_as_good_after_a_prompt_that_was_read_in_chunks(engine):
    accepted = []
    for limit in (4096, 20):
        sequence = make_sequence([5 + 7 * n % 60 for n in range(60)], 20, GREEDY)
        run(scheduler(engine, max_num_tokens=limit), [sequence])
        accepted.append(sequence.stats.accepted)
    assert accepted[0] == accepted[1]


def test_no_prefix_is_reused(engine):
    sequences = [make_sequence([7] * (3 * BLOCK_SIZE), 8, GREEDY) for _ in range(2)]
    served = scheduler(engine)
    for each in sequences:
        run(served, [each])
    assert [each.reused for each in sequences] == [0, 0]
    assert sequences[0].sink.tokens == sequences[1].sink.tokens == alone(engine, sequences[0])


def test_a_row_that_moves_without_its_state_is_seen(monkeypatch):
    engine = engine_of("lfm2")
    move = PagedRows.move

    def without_state(self, source, to):
        state_row = self.state_rows[to].clone()
        move(self, source, to)
        self.state_rows[to] = state_row

    monkeypatch.setattr(PagedRows, "move", without_state)
    sequences = [make_sequence([5 + n, 6, 7], 10 + 10 * n, GREEDY) for n in range(3)]
    run(scheduler(engine), sequences)
    assert any(each.sink.tokens != alone(engine, each) for each in sequences)


@pytest.mark.parametrize("architecture", ["lfm2", "jamba"])
def test_generate_on_a_paged_cache_equals_model_generate(architecture):
    ids, mask = uneven_batch()
    model = recurrent_model(architecture)
    engine = paged(Engine(Target(model), PromptLookupProposer(2, 4)))
    out = engine.generate(ids, mask, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert out.tolist() == generated_alone(model, ids, mask, 40).tolist()


def test_rows_are_admitted_while_there_are_states_for_them():
    manager = BlockManager(20, rows=2)
    tables = [manager.admit([1, 2, 3], 4), manager.admit([1, 2, 3], 4)]
    assert sorted(table.state_row for table in tables) == [1, 2]
    with pytest.raises(CacheFullError, match="the recurrent states of all rows"):
        manager.admit([4], 2)
    assert manager.num_free_blocks == 17
    freed = tables[0].state_row
    manager.release(tables[0])
    assert manager.admit([4], 2).state_row == freed
