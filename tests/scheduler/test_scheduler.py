"""Requests side by side: what is reused, cancelled and refused, and what an error ends."""

import math
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from helpers.generation import noted
from helpers.models import VOCAB, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    KINDS,
    Sink,
    alone,
    change,
    dense_scheduler,
    go_on,
    launch_ahead,
    make_sequence,
    nothing_is_held,
    random_sequences,
    run,
    run_as_alone,
    same_alone,
    scheduler,
    until_stepping,
)
from helpers.waits import Waits
from redrafter.attention import tree_attention
from redrafter.errors import ArgumentError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.params import SamplingParams
from redrafter.sampling.processors import RowProcessor, ThinkingBudget
from redrafter.scheduler.captured_step import CapturedStep, HostCopy
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.running_set import RunningSet
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.engine_process.warm_up import warm_up

GREEDY = KINDS["greedy"]


def check_logprobs(engine, sequence):
    """Check that the log-probabilities that a sequence gets are the model's."""
    reported, count = (
        [line for delta in sequence.sink.deltas for line in delta.logprobs or ()],
        sequence.request.params.logprobs,
    )
    assert len(reported) == (0 if count is None else sequence.written)
    with torch.no_grad():
        logits = engine.model(torch.tensor([sequence.tokens])).logits[0, len(sequence.request.prompt) - 1 : -1]
    for (own, likeliest), token, line in zip(reported, sequence.sink.tokens, logits.log_softmax(-1), strict=False):
        assert own == pytest.approx(float(line[token]), abs=1e-4)
        top = line.topk(count)
        assert list(likeliest) == top.indices.tolist()
        assert list(likeliest.values()) == pytest.approx(top.values.tolist(), abs=1e-4)


def test_a_row_has_the_budget_of_its_own_sequence_also_once_it_is_moved(engine):
    prompt = [8, 8, 60]
    later = make_sequence(prompt, 12, replace(GREEDY, repetition_penalty=1.4))
    free, penalised = alone(engine, make_sequence(prompt, 12, GREEDY)), alone(engine, later)
    end = next(token for token in range(3, VOCAB) if token not in free + penalised)
    served = scheduler(engine, max_batch_size=2)
    moved = make_sequence(prompt, 12, replace(GREEDY, thinking=ThinkingBudget(9, end)))
    run(served, [make_sequence([5, 9, 14], 2, GREEDY), moved])
    assert moved.sink.tokens[:10] == [*free[:9], end], "a moved row has lost its budget"
    run(served, [later])
    assert later.sink.tokens == penalised, "a row keeps the budget of its earlier sequence"


@pytest.mark.parametrize("dense", [False, True])
def test_rows_that_end_in_one_step_are_removed_together(engine, dense, monkeypatch):
    removed = noted(monkeypatch, RunningBatch, "remove", lambda _, batch, sequences: len(sequences))
    counts = [3, 9, 3, 5, 9, 9, 5, 9, 9, 9]  # new tokens, so that gaps among the rows are filled from the last ones
    prompts = [list(range(3 + each, 9 + 2 * each)) for each in range(len(counts))]
    sampled = KINDS["sampled"]
    sequences = [
        make_sequence(prompt, count, replace(sampled, seed=count) if count > 3 else GREEDY)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    made = (dense_scheduler if dense else scheduler)(engine, max_batch_size=len(counts), speculate=False)
    run(made, sequences)
    assert removed == [2, 2, 6]
    same_alone(engine, sequences)


def test_the_tokens_of_a_step_are_charged_to_each_client_at_once(engine, monkeypatch):
    charged = noted(monkeypatch, RunningSet, "charge", lambda _, running, account, count: (account[1], count))
    sequences = [make_sequence([5, 6, 7 + each], 4, GREEDY) for each in range(6)]
    for number, sequence in enumerate(sequences):
        change(sequence, client="ab"[number % 2])
    run(scheduler(engine, max_batch_size=6, speculate=False), sequences)
    assert charged[-6:] == [("a", 3), ("b", 3)] * 3


def test_rows_come_and_go_without_a_wait_for_a_gpu(engine, monkeypatch):
    """Nothing reads from the device but the report of a step that has ended."""
    launch_ahead(monkeypatch)
    served, sequences, waits = scheduler(engine, max_batch_size=4), random_sequences(12, seed=3), Waits()
    for sequence in sequences[::2]:
        change(sequence, params=replace(sequence.request.params, logprobs=3))
    monkeypatch.setattr(engine.target.prompt_reader, "masks", True)  # as on a GPU
    attention, processor = (tree_attention, "gathered_attention"), (RowProcessor, "__call__")
    monkeypatch.setattr(HostCopy, "wait", waits.on_host(HostCopy.wait))
    for place, name in ((CapturedStep, "run_step"), attention, processor):
        monkeypatch.setattr(place, name, waits.elsewhere(getattr(place, name)))
    monkeypatch.setattr(HostCopy, "on_host", False)
    with waits:
        run(served, sequences, apart=1)
    same_alone(engine, sequences)
    for sequence in sequences:
        check_logprobs(engine, sequence)


def test_nobody_is_put_back_where_that_is_promised(engine):
    served = scheduler(engine, blocks=8, guaranteed_no_evict=True)
    run_as_alone(served, random_sequences(12, longest=30, max_new_tokens=30))
    assert served.running_set.preempted == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_a_beginning_that_was_read_is_read_again_only_where_nothing_is_reused(engine, reuse):
    system = [3 + n % 60 for n in range(40)]
    first, second = make_sequence([*system, 7], 9, KINDS["sampled"]), make_sequence([*system, 9], 9, GREEDY)
    served = scheduler(engine, reuse=reuse)
    for each in (first, second):
        run_as_alone(served, [each])
    assert (first.reused, second.reused) == (0, 40 // BLOCK_SIZE * BLOCK_SIZE * reuse)


def test_a_cancelled_request_is_gone_after_a_round(engine):
    sequences = random_sequences(9, max_new_tokens=40)
    served = scheduler(engine, max_batch_size=4, max_num_tokens=40)
    served.submit(*sequences)
    served.round()
    served.round()
    gone = [sequences[0], sequences[5], sequences[8]]  # one that runs, and two that wait
    for each in gone:
        served.cancel(each)
    served.round()
    assert all(each.sink.deltas[-1].finish == "cancelled" for each in gone)
    run(served, [])
    same_alone(engine, [each for each in sequences if each not in gone])
    nothing_is_held(served)


def test_log_probabilities_are_the_models_own(engine):
    """Rows of one step want other numbers of the likeliest tokens, or none."""
    kinds = [SamplingParams(temperature=0.7, seed=3 + row, logprobs=count) for row, count in enumerate([1, None, 4, 0])]
    sequences = [make_sequence([5, 6, 7 + row], 12, kind) for row, kind in enumerate(kinds)]
    run(scheduler(engine), sequences)
    for each in sequences:
        check_logprobs(engine, each)


def test_a_log_probability_is_a_number_even_of_what_the_model_never_writes(engine, monkeypatch):
    assert engine.target.paged.ok  # which is tried before the head is another one
    head, never = engine.model.lm_head.forward, torch.tensor([90])
    monkeypatch.setattr(engine.model.lm_head, "forward", lambda hidden: head(hidden).index_fill(-1, never, -math.inf))
    each = make_sequence([5, 6, 7], 6, SamplingParams(temperature=0, logprobs=VOCAB))
    run(scheduler(engine), [each])
    reported = [min(likeliest.values()) for delta in each.sink.deltas for _, likeliest in delta.logprobs]
    assert reported == [-9999] * 6


def test_a_text_ends_where_it_is_told_to(engine):
    whole = alone(engine, make_sequence([5, 6, 7], 20, GREEDY))
    stops = lambda tokens: next((i for i, token in enumerate(tokens) if token == whole[7]), None)  # noqa: E731
    each = TokenSequence(GenerationRequest([5, 6, 7], 20, GREEDY), Sink(), stops)
    run(scheduler(engine), [each])
    assert each.sink.tokens == whole[: whole.index(whole[7]) + 1]
    assert each.sink.deltas[-1].finish == "stop"


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], GREEDY, "empty"),
        ([1] * 20, GREEDY, "20 tokens; a prompt may have 19, and with its answer 49"),
        ([VOCAB], GREEDY, "out of range"),
        ([-1], GREEDY, "out of range"),
        ([5], SamplingParams(min_new_tokens=10**20), "must be from"),
        ([5], SamplingParams(stop_token_ids=frozenset({VOCAB})), "out of range"),
        ([5], SamplingParams(logit_bias={-1: 1.0}), "out of range"),
    ],
)
def test_what_cannot_be_served_is_refused(engine, prompt, params, says):
    with pytest.raises(ArgumentError, match=says):
        scheduler(engine, blocks=6, max_input_len=19).submit(make_sequence(prompt, 5, params))


def fail_once(served, where: str, monkeypatch) -> None:
    """Let a function of the scheduler fail in one round."""
    with monkeypatch.context() as patched:
        patched.setattr(f"redrafter.scheduler.{where}", lambda *_, **__: 1 / 0)
        served.round()


def failed(sequence: TokenSequence) -> bool:
    return isinstance(sequence.sink.deltas[-1].error, ZeroDivisionError)


FORWARD = ["prefill.Prefiller.forward", "running_batch.draw_first_tokens", "running_batch.RunningBatch.add"]
STEP = "running_batch.RunningBatch.step"
BESIDE = ["prefill.Prefiller.choose_mixed", "prefill.Prefiller.finish_mixed", "prefill.ChunkBuffers.load"]


@pytest.mark.parametrize("where", [*FORWARD, STEP, *BESIDE, "running_batch.RunningBatch.update_block_tables"])
def test_nothing_hangs_and_nothing_is_held_after_an_error_anywhere(where, engine, monkeypatch):
    served, sequences = scheduler(engine), random_sequences(5)
    served.mixed_prefill = where != FORWARD[0]
    served.submit(*sequences)
    for _ in range(3):
        fail_once(served, where, monkeypatch)
    assert served.idle
    assert all(map(failed, sequences))
    run_as_alone(served, random_sequences(3, seed=4))


@pytest.mark.parametrize("where", [*FORWARD, STEP])
def test_what_fails_ends_the_rows_or_the_prompts_that_it_was_about_and_no_others(where, engine, monkeypatch):
    served = scheduler(engine, max_num_tokens=64 if where == STEP else 8192)
    served.mixed_prefill = False
    running = [make_sequence([5 + n, 6], 30, GREEDY) for n in range(3)]
    waiting = [make_sequence([5 + n, *range(9, 69)], 12, KINDS["sampled"]) for n in range(3)]
    until_stepping(served, *running)
    served.submit(*waiting)
    fail_once(served, where, monkeypatch)
    go_on(served)
    ended, others = (running, waiting) if where == STEP else (waiting, running)
    assert all(map(failed, ended))
    same_alone(engine, others)
    nothing_is_held(served)


def test_a_text_whose_criterion_fails_ends_alone(engine):
    others = random_sequences(3)
    wrong = TokenSequence(GenerationRequest([5, 6, 7], 20, GREEDY), Sink(), lambda tokens: 1 / 0)
    served = scheduler(engine)
    served.submit(*others, wrong)
    go_on(served)
    assert failed(wrong)
    same_alone(engine, others)
    nothing_is_held(served)


def test_a_batch_without_memory_for_longer_rows_goes_on_with_those_it_has(engine, monkeypatch):
    served = scheduler(engine)
    short, long = make_sequence([5, 6], 30, GREEDY), make_sequence([7, 8], 30, GREEDY)
    until_stepping(served, short)
    served.mixed_prefill = False
    served.submit(long)
    with monkeypatch.context() as patched:
        patched.setattr(served.batch, "_positions", 0)  # as if the next sequence were longer than all before
        patched.setattr("redrafter.scheduler.row_caches.PagedRows.reserve", lambda *_: 1 / 0)
        served.prefill()
    assert failed(long)
    go_on(served)
    same_alone(engine, [short])


def test_a_short_prompt_completes_beside_a_chunk_that_is_longer_than_all_buffers():
    model = tiny_model("llama", max_position_embeddings=1024)
    model.generation_config.eos_token_id = None
    served = scheduler(with_tree(model, tiny_drafter(), 2, 3), max_num_tokens=512)
    run_as_alone(served, [make_sequence([3 + n % 90 for n in range(length)], 8, GREEDY) for length in (600, 10, 353)])


def warm_up_whole(served, usual=MappingProxyType({})):
    warm_up(served, SamplingParams(**usual))
    while served.later:
        served.later.popleft()()


def test_a_server_is_ready_once_the_steps_of_one_row_and_of_all_are_captured(engine):
    served = scheduler(engine, max_batch_size=8)
    warm_up(served, SamplingParams())
    ready = set(served.batch.captured_steps)
    assert {key.rows for key in ready} == {1, 8}
    assert {key.proposer for key in ready if key.rows == 1} > {id(engine.undrafted)}
    assert {getattr(work, "rows", 0) for work in served.later} == {0, 1, 2, 4, 7}
    nothing_is_held(served)


def test_sequences_that_arrive_in_a_warm_up_take_part_with_their_own_tokens(engine):
    served = scheduler(engine, max_batch_size=4)
    warm_up(served, SamplingParams())
    policy, sequences = served.batch.policy, random_sequences(12)
    for number, work in enumerate([*served.later]):
        if number < len(sequences):
            served.submit(sequences[number])
        work()
        assert served.batch.policy is policy
    go_on(served)
    same_alone(engine, sequences)
    nothing_is_held(served)


def test_a_warm_up_also_reads_prompts_in_steps_without_drafts(engine):
    served = scheduler(engine, max_batch_size=4)
    warm_up_whole(served)
    undrafted = [key for key in served.batch.captured_steps if key.proposer == id(engine.undrafted) and key.chunks]
    assert {key.rows for key in undrafted} == set(served.batch.sizes)


@pytest.mark.parametrize("usual", [{}, {"top_p": 0.8}, {"top_k": 12, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize(
    "limits", [{"max_batch_size": 16}, {"max_batch_size": 3}, {"max_batch_size": 1, "max_queue_size": 2}], ids=str
)
def test_after_a_warm_up_no_frequent_step_is_new_and_nothing_is_left(limits, usual, engine, monkeypatch):
    served = scheduler(engine, **limits)
    warm_up_whole(served, usual)
    nothing_is_held(served)
    assert served.prefiller.pace.tokens == scheduler(engine, **limits).prefiller.pace.tokens
    kept, sequences = set(served.batch.captured_steps), random_sequences(12)
    drawn = [KINDS["greedy"], KINDS["sampled"], SamplingParams(**usual)]
    for number, each in enumerate(sequences):
        change(each, params=replace(drawn[number % 3], seed=number))
    assert {rows for rows, *_ in kept} == set(served.batch.sizes)
    assert served.idle
    assert not served.running_set.preempted
    monkeypatch.setattr(served.running_set, "_limits", replace(served.limits, max_queue_size=0))
    run_as_alone(served, sequences, 1)
    assert not sequences[0].reused
    assert set(served.batch.captured_steps) == kept
