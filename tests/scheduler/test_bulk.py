"""Many rows of bulk calls, which end and begin in groups. Schedulers launch steps ahead, as on a GPU (conftest)."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.generation import noted
from helpers.models import paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import KINDS, make_sequence, nothing_is_held, run, scheduler, until_stepping
from redrafter import Engine
from redrafter.engine.call import OutputRow
from redrafter.engine.options import EngineOptions
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler import prefill, running_batch
from redrafter.scheduler.prefill import MAX_GROUP, ROOMS_OF_BULK, Prefiller, chunks_that_end_together, rooms_of
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.running_set import RunningSet
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.config import ServeOptions

BULK = {"guaranteed_no_evict": True, "paced": False, "bulk": True}
GREEDY = SamplingParams(temperature=0)
ENDS = [2, 5, 11, 30, 31, 32, 40, 41, 42]
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 4, "top_p": 0.9},
    "penalised": {"do_sample": True, "seed": 9, "repetition_penalty": 1.3},
    "all at the limit": {"do_sample": True, "seed": 3, "max_new_tokens": 5, "eos_token_id": None},
    "one token": {"do_sample": True, "seed": 2, "max_new_tokens": 1},
}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be as large in few rows as they are in many."""
    monkeypatch.setattr(running_batch, "ROWS_PER_EMPTY_ROW", 4)
    monkeypatch.setattr(prefill, "BULK_ROWS", 8)


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return tiny_model("llama")


def engine_of(model: torch.nn.Module, rows: int) -> Engine:
    engine = with_tree(model, tiny_drafter(), 2, 2)
    engine.options = EngineOptions(max_batch_size=rows)
    return engine


def prompts(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of 1 to 9 tokens, padded on the left, and their mask."""
    torch.manual_seed(7)
    mask = (torch.arange(9, 0, -1) <= torch.randint(1, 10, (rows, 1))).long()
    return torch.randint(43, 90, (rows, 9)) * mask, mask


class Streamed:
    """Collects the tokens of each row as they are reported, and the rows in the order of their ends."""

    def __init__(self, rows: int) -> None:
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.ends: list[int] = []

    def put_step(self, row: int, tokens: list[int], accepted: int, ended: bool) -> None:
        assert row not in self.ends
        self.texts[row] += tokens
        self.ends += [row] * ended

    def end(self) -> None:
        pass


def empty_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return what will be the numbers of rows of each step and of empty ones among them."""
    count: Callable[..., tuple[int, int]] = lambda _, batch, *__: (len(batch.rows), sum(s.ended for s in batch.rows))  # noqa: E731
    return noted(monkeypatch, RunningBatch, "prepare_step", count)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on", [lambda engine: engine, lambda engine: paged(engine, 200)], ids=["dense", "paged"])
def test_a_call_of_many_more_prompts_than_rows_writes_what_plain_decoding_writes(llama, monkeypatch, on, way):
    ids, mask = prompts(60)
    arguments = {"max_new_tokens": 14, "eos_token_id": ENDS} | WAYS[way]
    expected = engine_of(llama, 3).generate(ids, mask, speculate=False, **arguments)  # too few rows for groups
    if way == "greedy":
        config = {"pad_token_id": llama.generation_config.pad_token_id or 0}
        assert torch.equal(llama.generate(ids, attention_mask=mask, **config, **arguments)[:, 9:], expected[:, 9:])
    steps, stream = empty_rows(monkeypatch), Streamed(60)
    assert torch.equal(on(engine_of(llama, 20)).generate(ids, mask, streamer=stream, **arguments), expected)
    assert all(empty < max(rows // 4, 1) for rows, empty in steps)
    assert any(empty for _, empty in steps) or way in ("all at the limit", "one token")
    assert sorted(stream.ends) == list(range(60))
    for text, row in zip(stream.texts, expected[:, 9:].tolist(), strict=True):
        assert row[: len(text)] == text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("speculate", [False, True])
def test_rows_that_nobody_streams_are_reported_when_they_begin_and_end(llama, monkeypatch, speculate, way):
    ids, mask = prompts(60)
    given = {"max_new_tokens": 14, "eos_token_id": ENDS, "speculate": speculate, "return_dict_in_generate": True}
    streamed = engine_of(llama, 20).generate(ids, mask, streamer=Streamed(60), **given | WAYS[way])
    reported = noted(monkeypatch, OutputRow, "_record", lambda _, __, sequence, delta: (sequence, delta.finish))
    engine = paged(engine_of(llama, 20), 200)
    quiet = engine.generate(ids, mask, **given | WAYS[way])
    assert torch.equal(quiet.sequences, streamed.sequences)
    assert quiet.stats.emitted == streamed.stats.emitted
    assert speculate or quiet.stats == streamed.stats  # which steps draft is decided by their times
    ends = Counter(sequence for sequence, finish in reported if finish is not None)
    assert set(ends.values()) == {1}
    assert len(ends) == 60
    assert len(reported) <= 120


def test_blocks_of_a_row_that_ended_are_given_to_others_while_it_stays_in_place(llama, monkeypatch):
    engine = engine_of(llama, 100)
    steps = empty_rows(monkeypatch)

    def sequences() -> list[TokenSequence]:
        choices, kinds = random.Random(3), [replace(KINDS["ends"], seed=seed) for seed in range(5)] + [GREEDY]
        return [
            make_sequence([choices.randrange(3, 90)] * choices.randrange(1, 30), choices.randrange(1, 30), kind)
            for kind in choices.choices(kinds, k=60)
        ]

    plain = sequences()
    run(scheduler(engine, blocks=200, max_batch_size=3), plain)
    steps.clear()
    # Blocks are too few for all slots, so that each one is given to the next sequence at once.
    served, grouped = scheduler(engine, blocks=60, max_batch_size=30, **BULK), sequences()
    run(served, grouped)
    assert [each.sink.tokens for each in grouped] == [each.sink.tokens for each in plain]
    assert max(rows for rows, _ in steps) < 30
    assert any(empty for _, empty in steps)
    nothing_is_held(served)


def test_prompts_that_were_admitted_together_begin_together(monkeypatch):
    engine = engine_of(tiny_model("llama", max_position_embeddings=1024), 100)
    served = scheduler(engine, blocks=900, max_batch_size=40, **BULK)
    running = [make_sequence([1 + row], 60, GREEDY) for row in range(20)]
    until_stepping(served, *running)
    begun = noted(monkeypatch, RunningBatch, "begin", lambda _, batch, read: len(read.sequences))
    read = noted(monkeypatch, Prefiller, "choose_mixed", lambda step, *_: sum(count for _, count in step.chunks))
    first = [make_sequence([5 + row] * (200 + row), 4, GREEDY) for row in range(10)]
    second = [make_sequence([9 + row] * 20, 4, GREEDY) for row in range(3)]
    served.submit(*first)
    served.round()
    served.submit(*second)
    run(served, [])
    assert [count for count in begun if count] == [10, 3]
    assert [tokens for tokens in read if tokens] == [16 * ROOMS_OF_BULK[-1], 2045 - 16 * ROOMS_OF_BULK[-1], 60]
    plain = scheduler(engine, blocks=900, max_batch_size=40)
    again = [
        make_sequence(list(each.request.prompt), each.request.max_new_tokens, GREEDY)
        for each in (*running, *first, *second)
    ]
    run(plain, again)
    assert [each.sink.tokens for each in again] == [each.sink.tokens for each in (*running, *first, *second)]


def test_of_many_prompts_that_were_admitted_together_the_first_do_not_wait_for_the_last(llama, monkeypatch):
    served = scheduler(engine_of(llama, 100), blocks=900, max_batch_size=90, **BULK)
    until_stepping(served, *(make_sequence([1 + row], 30, GREEDY) for row in range(45)))
    begun = noted(monkeypatch, RunningBatch, "begin", lambda _, batch, read: len(read.sequences))
    late = [make_sequence([5 + row] * (50 + row), 4, GREEDY) for row in range(40)]
    served.submit(*late)
    run(served, [])
    assert begun == [MAX_GROUP, 40 - MAX_GROUP]


@pytest.mark.parametrize("budget", [1, 3, 16, 40, 1000])
@pytest.mark.parametrize("lengths", [[1], [1] * 20, [30, 1, 1], [7, 50, 2, 9], [40]], ids=str)
def test_last_tokens_of_prompts_are_read_in_one_forward_where_they_fit(lengths, budget):
    sequences = [make_sequence([3] * length, 4, GREEDY) for length in lengths]
    ends = []  # how many prompts each forward completes
    while sequences:
        chunks = chunks_that_end_together(sequences, budget)
        assert 0 < sum(count for _, count in chunks) <= budget
        for sequence, count in chunks:
            sequence.prefilled += count
        left = [each for each in sequences if each.prefilled < each.prefill_length]
        ends.append(len(sequences) - len(left))
        sequences = left
    assert [each for each in ends if each] == [len(lengths)] or budget < len(lengths)


def test_rows_of_a_server_are_free_at_once_and_its_prompts_are_read_as_before(llama, monkeypatch):
    limits = ServeOptions(max_batch_size=20).limits(None)
    assert not limits.bulk
    engine = engine_of(llama, 20)
    steps = empty_rows(monkeypatch)
    served = scheduler(engine, blocks=700, **vars(limits))
    running = [make_sequence([1 + row], 10 + row % 7, GREEDY) for row in range(20)]
    until_stepping(served, *running)
    waiting = [make_sequence([3 + row] * 9, 5, GREEDY) for row in range(20)]
    served.submit(*waiting)
    while served.running_set.waiting:
        ended = sum(each.ended for each in (*running, *waiting))
        served.round()
        assert served.running_set.waiting == max(
            20 - ended, 0
        )  # a slot is given away in the round that follows the end
    run(served, [])
    assert not any(empty for _, empty in steps)
    assert [*rooms_of(70, [70])] == [4, 8, 12, 16, 20, 32, 56]  # 454 tokens would be slow


@pytest.mark.filterwarnings("ignore:.*your own code runs in Python")
def test_code_of_the_caller_is_not_called_for_texts_that_have_ended(llama):
    seen: list[tuple[int, list[int]]] = []

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        seen.append((row, text.tolist()))
        return [2, 5, *range(50, 60)]

    ids, mask = prompts(30)
    arguments = {"max_new_tokens": 6, "eos_token_id": [2, 5], "do_sample": True, "seed": 1}
    arguments |= {"prefix_allowed_tokens_fn": allowed, "speculate": False}
    expected = engine_of(llama, 3).generate(ids, mask, **arguments)
    in_few_rows = sorted(seen)
    seen.clear()
    assert torch.equal(paged(engine_of(llama, 12)).generate(ids, mask, **arguments), expected)
    assert sorted(seen) == in_few_rows


def test_a_call_that_is_given_up_while_rows_are_empty_leaves_nothing(llama):
    served = scheduler(engine_of(llama, 20), max_batch_size=20, **BULK)
    served.submit(*(make_sequence([1 + row], 5 + row, GREEDY) for row in range(30)))
    while not any(each.ended for each in served.batch.rows):
        served.round()
    with torch.inference_mode():  # as in a call
        served.abandon()
    assert served.idle
    nothing_is_held(served)
    again = [make_sequence([3 + row], 6, GREEDY) for row in range(9)]
    run(served, again)
    assert all(len(each.sink.tokens) == 6 for each in again)


@pytest.mark.parametrize(("owner", "name"), [(RunningSet, "admit"), (RunningSet, "grow"), (RunningBatch, "step")])
def test_an_error_while_rows_are_empty_ends_no_text_twice(llama, monkeypatch, owner, name):
    served, errors = scheduler(engine_of(llama, 20), max_batch_size=20, **BULK), []
    running = [make_sequence([1 + row], 5 + row, GREEDY) for row in range(20)]
    served.submit(*running)
    while not any(each.ended for each in served.batch.rows):
        served.round()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, fail)
    served.on_failure = lambda error, count: errors.append((str(error), count))
    left = sum(not each.ended for each in running)
    with torch.inference_mode():
        served.round()
    assert errors == [("broken", left)]
    assert all(
        [delta.finish for delta in each.sink.deltas].count(None) + 1 == len(each.sink.deltas) for each in running
    )
    nothing_is_held(served)
