"""Rows of a running batch that share the nodes of a step."""

from dataclasses import replace

import pytest

from helpers.models import tiny_drafter, tiny_model
from helpers.scheduling import alone, make_sequence, random_sequences, run, scheduler
from redrafter import ReDrafter
from redrafter.checkpoints.merged import TreeShape
from redrafter.engine.tuning import Tuning
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams


def sharing(shape: TreeShape) -> ReDrafter:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return ReDrafter(Target(model), tiny_drafter(), tuning=Tuning({1: shape}, "", "", "", ""))


@pytest.mark.parametrize("shape", [TreeShape(4, 4, 17, 16), TreeShape(3, 3, 6, 12), TreeShape(1, 4, 5, 10)], ids=str)
def test_rows_that_share_nodes_write_what_each_writes_alone(shape):
    engine = sharing(shape)
    served = scheduler(engine, max_batch_size=6)
    sequences = random_sequences(14, seed=3)
    for index in (2, 5):
        sequences[index].params = replace(sequences[index].params, speculate=False)
    run(served, sequences, 1)
    for each in sequences:
        assert each.sink.tokens == alone(engine, each)
    drafted = {delta.drafted for each in sequences for delta in each.sink.deltas}
    assert len(drafted) > 3  # or all rows had as many
    assert any(delta.accepted for each in sequences for delta in each.sink.deltas)


def test_no_step_verifies_more_than_its_nodes():
    served = scheduler(sharing(TreeShape(4, 4, 17, 16)), max_batch_size=4)
    sequences = [make_sequence([5 + row, 3], 30, SamplingParams(temperature=0)) for row in range(4)]
    served.submit(*sequences)
    while len(served.batch.rows) < 4:
        served.round()
    seen = []
    while all(len(each.tokens) < 20 for each in sequences):
        before = [len(each.sink.deltas) for each in sequences]
        served.round()
        new = [each.sink.deltas[count:] for each, count in zip(sequences, before, strict=True)]
        if all(len(deltas) == 1 for deltas in new):
            seen.append(sum(delta.drafted + 1 for [delta] in new))
    assert seen
    assert set(seen) == {16}


def test_a_step_that_leaves_a_row_no_draft_is_a_step_of_it():
    engine = sharing(TreeShape(4, 4, 17, 6))
    engine.pauses = False
    sequences = [make_sequence([5 + row, 3], 30, SamplingParams(temperature=0)) for row in range(4)]
    run(scheduler(engine, max_batch_size=4), sequences)
    assert any(delta.drafted == 0 for each in sequences for delta in each.sink.deltas)
    for each in sequences:
        assert each.stats.draft_steps == len(each.sink.deltas) - 1
        assert each.stats.emitted == each.written - 1


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (TreeShape(4, 4, 17), 4 * 17),
        (TreeShape(4, 4, 17, 16), 16),
        (TreeShape(4, 4, 17, 2), 4),
        (TreeShape(4, 4, 17, 100), 4 * 17),
    ],
    ids=str,
)
def test_the_budget_of_a_step_counts_its_nodes(shape, expected):
    served = scheduler(sharing(shape), max_batch_size=4)
    assert served.batch.step_nodes == 0
    served.submit(*(make_sequence([5 + row, 3], 30, SamplingParams(temperature=0)) for row in range(4)))
    while len(served.batch.rows) < 4:
        served.round()
    assert served.batch.step_nodes == expected


def test_what_rows_that_share_nodes_leave_of_the_budget_reads_prompts():
    served = scheduler(sharing(TreeShape(4, 4, 17, 8)), max_batch_size=4, max_num_tokens=40)
    served.submit(*(make_sequence([5 + row, 3], 60, SamplingParams(temperature=0)) for row in range(2)))
    while len(served.batch.rows) < 2:
        served.round()
    late = make_sequence([*range(3, 35)], 4, SamplingParams(temperature=0))
    served.submit(late)
    served.round()
    assert late.prefilled == 32  # beside 8 nodes, not 34
