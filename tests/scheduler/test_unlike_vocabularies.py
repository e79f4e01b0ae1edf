"""Continuous batching with a draft model of another vocabulary, whose texts have blocks of their own."""

import pytest

from helpers.features import make_engine
from helpers.models import tiny_model
from helpers.scheduling import KINDS, go_on, make_sequence, nothing_is_held, run, run_as_alone, same_alone, scheduler
from helpers.vocabularies import renumbered
from redrafter import CacheFullError, DraftTarget
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target

LONG = list(range(3, 63))


@pytest.fixture(scope="module")
def engine():
    return make_engine("other vocabulary")


def test_a_prefix_is_found_in_both_caches(engine):
    served = scheduler(engine)
    first, second = make_sequence(LONG, 8, KINDS["greedy"]), make_sequence([*LONG, 5, 6], 8, KINDS["greedy"])
    run(served, [first])
    served.submit(second)
    served.prefill()
    assert second.reused == 3 * BLOCK_SIZE
    assert second.draft.block_table.reused >= 3 * BLOCK_SIZE
    assert second.draft.prefilled == second.draft_length(len(second.request.prompt))
    run(served, [])
    same_alone(engine, [first, second])
    nothing_is_held(served)


def test_a_draft_text_that_never_fits_ends_with_an_error(engine):
    served, sequence = scheduler(engine, blocks=7), make_sequence(LONG, 2, KINDS["greedy"])
    served.submit(sequence)
    go_on(served)
    assert isinstance(sequence.sink.deltas[-1].error, CacheFullError)
    assert all(each.num_free_blocks == each.num_blocks for each in (served.memory.blocks, served.memory.draft_blocks))


def test_room_for_a_draft_text_is_looked_for_once_while_none_is_freed(engine, monkeypatch):
    served = scheduler(engine, blocks=40)
    running, waiting = (make_sequence(LONG[:count], 36, KINDS["greedy"]) for count in (9, 60))
    served.submit(running)
    while running.row is None:
        served.round()
    blocks, attempts = served.memory.draft_blocks, []
    admit = blocks.admit
    others = admit([3], (blocks.num_free_blocks - 1) * BLOCK_SIZE)
    monkeypatch.setattr(blocks, "admit", lambda *given: (attempts.append(given), admit(*given))[1])
    served.submit(waiting)
    for _ in range(3):
        served.round()
    assert len(attempts) == 1
    blocks.release(others)
    run(served, [])
    same_alone(engine, [running, waiting])
    nothing_is_held(served)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_each_row_keeps_its_own_draft_text(kind):
    """Of the target under other ids every draft is kept, as long as its cache holds what it has read of that row."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    draft_model, vocabulary = renumbered(model)
    engine = DraftTarget(Target(model), Target(draft_model), draft_len=3, vocabulary=vocabulary)
    steps = [9, 1, 6, 3, 7, 2, 8]
    sequences = [
        make_sequence(list(range(3 + row, 12 + 3 * row)), 1 + 4 * count, KINDS[kind]) for row, count in enumerate(steps)
    ]
    run_as_alone(scheduler(engine, max_batch_size=3), sequences)
    assert [sequence.stats.accepted for sequence in sequences] == [3 * count for count in steps]
