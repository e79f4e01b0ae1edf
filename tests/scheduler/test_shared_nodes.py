"""Rows of a running batch that share the nodes of a step."""

from dataclasses import replace

import pytest
import torch

from helpers.generation import noted
from helpers.models import VOCAB, tiny_drafter, tiny_model
from helpers.scheduling import (
    change,
    make_sequence,
    random_sequences,
    run,
    run_as_alone,
    same_alone,
    scheduler,
    until_stepping,
)
from redrafter import ReDrafter
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.captured_step import CapturedStep
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.sizes import TreeShape
from redrafter.tree.token_tree import Tree

GREEDY = SamplingParams(temperature=0)


def sharing(*shape: int, **limits: int) -> Scheduler:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return scheduler(ReDrafter(Target(model), tiny_drafter(), TreeShape(*shape)), **({"max_batch_size": 4} | limits))


def rows(count: int, new: int = 30) -> list[TokenSequence]:
    return [make_sequence([5 + row, 3], new, GREEDY) for row in range(count)]


@pytest.mark.parametrize("shape", [(4, 4, 17, 16), (3, 3, 6, 12), (1, 4, 5, 10)], ids=str)
def test_rows_that_share_nodes_write_what_each_writes_alone(shape):
    sequences = random_sequences(14, seed=3)
    for index in (2, 5):
        change(sequences[index], params=replace(sequences[index].request.params, num_speculative_tokens=0))
    run_as_alone(sharing(*shape, max_batch_size=6), sequences, 1)
    drafted = {delta.drafted for each in sequences for delta in each.sink.deltas}
    assert len(drafted) > 3  # or all rows had as many
    assert any(delta.accepted for each in sequences for delta in each.sink.deltas)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_logits_of_shared_nodes_are_only_copied_for_rows_that_want_them(params, logprobs, monkeypatch):
    monkeypatch.setattr(Sampler, "draws_logits", True)  # as on a GPU at this temperature
    widths = noted(monkeypatch, Tree, "by_row", lambda _, tree, x: x.shape[-1] if tree.counts is not None else 0)
    sequences = [make_sequence([5 + row, 3], 30, replace(params, logprobs=logprobs)) for row in range(4)]
    served = sharing(4, 4, 17, 16)
    run(served, sequences)
    assert widths
    assert (VOCAB in widths) == (logprobs is not None)
    monkeypatch.undo()
    same_alone(served.engine, sequences)


def test_no_step_verifies_more_than_its_nodes():
    served, sequences, seen = sharing(4, 4, 17, 16), rows(4), []
    until_stepping(served, *sequences)
    served.settle()
    while all(len(each.tokens) < 20 for each in sequences):
        before = [len(each.sink.deltas) for each in sequences]
        served.round()
        new = [each.sink.deltas[count:] for each, count in zip(sequences, before, strict=True)]
        if all(len(deltas) == 1 for deltas in new):
            seen.append(sum(delta.drafted + 1 for [delta] in new))
    assert set(seen) == {16}


def test_a_step_that_leaves_a_row_no_draft_is_a_step_of_it():
    served, sequences = sharing(4, 4, 17, 6), rows(4)
    run(served, sequences)
    assert any(delta.drafted == 0 for each in sequences for delta in each.sink.deltas)
    for each in sequences:
        assert each.stats.draft_steps == len(each.sink.deltas) - 1
        assert each.stats.emitted == each.written - 1


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 4, 17), 4 * 17), ((4, 4, 17, 16), 16), ((4, 4, 17, 2), 4), ((4, 4, 17, 100), 4 * 17)],
    ids=str,
)
def test_the_budget_of_a_step_counts_its_nodes(shape, expected):
    served = sharing(*shape)
    assert served.batch.step_nodes == (0, 0)
    until_stepping(served, *rows(4))
    assert served.batch.step_nodes == (expected, 4)


def test_what_rows_that_share_nodes_leave_of_the_budget_reads_prompts():
    served = sharing(4, 4, 17, 8, max_num_tokens=40)
    until_stepping(served, *rows(2, 60))
    late = make_sequence([*range(3, 35)], 4, GREEDY)
    served.submit(late)
    served.round()
    assert late.prefilled == 32  # beside 8 nodes, not 34


@pytest.mark.slow  # more than a minute in the interpreter; tests/kernels/test_kernels.py has each kernel alone
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4)], ids=["greedy", "sampled"])
def test_the_kernels_of_a_gpu_write_what_each_row_writes_alone(params, monkeypatch):
    """Steps take the branches of a GPU, whose kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/kernels/test_gpu.py compares both on a GPU")
    take, steps = CapturedStep.run_step, []

    def take_as_on_a_gpu(step: CapturedStep) -> None:
        steps.append(step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            patch.setitem(vars(step.sampler), "fused", True)
            take(step)

    monkeypatch.setattr(CapturedStep, "run_step", take_as_on_a_gpu)
    served, sequences = sharing(4, 4, 17, 16), [make_sequence([5 + row, 3], 20, params) for row in range(4)]
    run(served, sequences)
    assert any(step.proposer.depth for step in steps)
    monkeypatch.undo()
    same_alone(served.engine, sequences)
