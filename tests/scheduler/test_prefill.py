"""Which parts of prompts are read when: in forwards of their own, or in those of steps, beside the rows' trees."""

import itertools
import random
from dataclasses import replace

import pytest

from helpers.generation import noted
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import make_sequence, run, run_as_alone, same_alone, scheduler, until_stepping
from redrafter.drafting.proposer import step_tokens
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import (
    MIN_FORWARD_TOKENS,
    SLOW_TOKENS,
    TARGET_SECONDS,
    Prefiller,
    PrefillPace,
    choose_chunks,
    padded_tokens,
    rooms_of,
)
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * index) % 60 + 1 for index in range(length)]


def begin_beside(served: Scheduler, rows: int, prompts: list[list[int]], params: SamplingParams) -> list[TokenSequence]:
    """Let some rows run, then submit prompts, and return all sequences when they have ended."""
    running = [make_sequence(prompt(5 + row), 40, params) for row in range(rows)]
    until_stepping(served, *running)
    late = [make_sequence(tokens, 12, params) for tokens in prompts]
    served.submit(*late)
    run(served, [])
    return [*running, *late]


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """The numbers of prompts of all forwards over prompts alone."""
    return noted(monkeypatch, Prefiller, "forward", lambda read, prefiller, chunks, *_: len(chunks))


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_steps_of_many_rows_have_finer_buffers_and_none_of_slow_products(rows):
    for nodes in range(0, 600, 8):
        rooms = rooms_of(rows, (nodes, rows), left=500)
        assert [*rooms] == sorted(rooms)
        widest = max(b - a for a, b in itertools.pairwise([0, *rooms]))
        assert widest <= 8
        # Whether the step drafts or not, which the policy chooses later.
        sums = [count + 16 * room for count in (nodes, rows) for room in rooms]
        assert rows <= 16 or not any(tokens in SLOW_TOKENS for tokens in sums)


def stepping_rows(monkeypatch, *, context, blocks):
    """Return an engine, its scheduler, 20 rows that take steps, and a list of the prompt tokens and size of each."""
    read = noted(monkeypatch, Prefiller, "choose_mixed", lambda step, *_: (sum(n for _, n in step.chunks), step.tokens))
    engine = with_tree(tiny_model("llama", max_position_embeddings=context), tiny_drafter(), 2, 3)
    served = scheduler(engine, blocks=blocks, max_batch_size=48)
    running = [make_sequence([1 + row, 5], 60, GREEDY) for row in range(20)]
    until_stepping(served, *running)
    read.clear()
    return engine, served, running, read


def test_a_step_of_many_rows_reads_more_while_many_prompts_wait(monkeypatch):
    engine, served, running, read = stepping_rows(monkeypatch, context=256, blocks=1200)
    late = [make_sequence(prompt(100, 3 * number), 5, GREEDY) for number in range(20)]
    served.submit(*late)
    run(served, [])
    # 2,000 tokens wait, then 1,104, then 592: too few for steps that are much longer than others.
    assert [tokens for tokens in read if tokens[0]][:3] == [(896, 896), (512, 512), (320, 320)]
    same_alone(engine, [*running, *late])


def test_buffers_are_chosen_by_what_a_step_computes_for_padding_rows_too():
    engine = with_tree(tiny_model("llama", max_position_embeddings=256), tiny_drafter(), 2, 3)
    served = scheduler(engine, blocks=600, max_batch_size=64)
    running = [make_sequence([1 + row, 5], 20, GREEDY) for row in range(40)]
    until_stepping(served, *running)
    assert served.batch.step_nodes == (64 * engine.proposer_for(64).nodes, 64)
    run(served, [])


@pytest.mark.parametrize("drafts", [None, 0], ids=["drafted", "undrafted"])
def test_no_step_of_many_rows_that_reads_prompts_has_slow_products(drafts):
    engine = with_tree(tiny_model("llama", max_position_embeddings=256), tiny_drafter(), 1, 2)  # 192 nodes in 64 rows
    served = scheduler(engine, blocks=900, max_batch_size=64)
    params = replace(GREEDY, num_speculative_tokens=drafts)
    running = [make_sequence([1 + row, 5], 40, params) for row in range(40)]
    until_stepping(served, *running)
    late = [make_sequence(prompt(100, seed), 3, params) for seed in range(8)]
    served.submit(*late)
    run(served, [])
    proposers = {id(each): each for each in served.batch.policy.proposers} | {id(engine.undrafted): engine.undrafted}
    sums = [step_tokens(proposers[key.proposer], key.rows) + 16 * key.chunks for key in served.batch.captured_steps]
    assert any(tokens >= SLOW_TOKENS.start - 64 for tokens in sums)  # much of the prompts is read at once
    assert not any(tokens in SLOW_TOKENS for tokens in sums)
    same_alone(engine, [*running, *late])


def test_a_large_batch_reads_a_prompt_at_once_into_the_smallest_buffers_that_hold_it(monkeypatch):
    engine, served, running, read = stepping_rows(monkeypatch, context=1024, blocks=600)
    late = []
    for length in (9, 158, 190, 9, 300):
        late.append(make_sequence(prompt(length, length), 5, GREEDY))
        served.submit(late[-1])
        served.round()
    assert [tokens for tokens in read if tokens[0]] == [(9, 64), (158, 192), (190, 192), (9, 64), (300, 320)]
    run(served, [])
    same_alone(engine, [*running, *late])


def test_a_prompt_alone_is_read_at_once_into_the_smallest_buffers_that_hold_it(monkeypatch):
    read = noted(monkeypatch, Prefiller, "choose_mixed", lambda step, *_: (sum(n for _, n in step.chunks), step.tokens))
    engine = with_tree(tiny_model("llama", max_position_embeddings=1024), tiny_drafter(), 2, 3)
    served, sequences = scheduler(engine, blocks=600, max_batch_size=2), []
    for length in (9, 158, 161, 300, 340, 500):
        sequences.append(make_sequence(prompt(length, length), 1, GREEDY))
        served.submit(sequences[-1])
        run(served, [])
    found = [tokens for tokens in read if tokens[0]]
    assert found == [(9, 64), (158, 160), (161, 192), (300, 320), (340, 384), (500, 512)]
    same_alone(engine, sequences)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("rows", "lengths", "limits"),
    [(3, lengths, {}) for lengths in ([1], [9], [30, 2], [1, 1, 1], [64], [70])] + [(2, [50], {"max_num_tokens": 40})],
    ids=str,
)
def test_prompts_read_beside_rows_change_no_token(engine, forwards, rows, lengths, limits, params):
    served = scheduler(engine, **limits)
    sequences = begin_beside(served, rows, [prompt(length, 11 * length) for length in lengths], params)
    assert not forwards
    same_alone(engine, sequences)


@pytest.mark.parametrize(
    ("rows", "lengths", "params", "alone"),
    [(1, [80] * 4, GREEDY, 4), (2, [8], SamplingParams(temperature=0, prompt_logprobs=1), 3)],
    ids=["more long prompts than rows", "a prompt that is scored"],
)
def test_some_prompts_are_read_alone(engine, forwards, rows, lengths, params, alone, monkeypatch):
    monkeypatch.setattr("redrafter.scheduler.prefill.SHORT_PROMPT", 79)
    begin_beside(scheduler(engine), rows, [prompt(length) for length in lengths], params)
    assert sum(forwards) == alone


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_burst_of_short_prompts_is_read_by_steps_that_let_each_begin_when_it_is_read(forwards, params):
    engine = with_tree(tiny_model("llama", max_position_embeddings=1024), tiny_drafter(), 2, 3)
    served = scheduler(engine, blocks=600, max_batch_size=16)
    burst = [make_sequence(prompt(90 + 11 * number, number), 9, params) for number in range(12)]
    served.submit(*burst)
    begun = []
    while not served.idle:
        served.round()
        begun.append(sum(bool(each.sink.tokens) for each in burst))
    assert not forwards
    assert len({*begun} - {0}) >= 3  # not all of them together
    same_alone(engine, burst)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("lengths", "rooms"),
    [([1], {4}), ([64], {4}), ([65], {8}), ([60] * 3, {12}), ([256, 256], {32}), ([1] * 33, {32})],
    ids=str,
)
def test_first_prompts_are_read_by_a_step_without_rows(forwards, lengths, rooms, params):
    model = tiny_model("llama", max_position_embeddings=1024)
    served = scheduler(with_tree(model, tiny_drafter(), 2, 3), blocks=400, max_batch_size=40)
    sequences = [make_sequence(prompt(length, 3 + row), 6, params) for row, length in enumerate(lengths)]
    served.submit(*sequences)
    served.round()
    assert {key.chunks for key in served.batch.captured_steps} == rooms
    assert not forwards
    run(served, [])
    same_alone(served.engine, sequences)


def test_a_long_prompt_beside_rows_lets_them_go_on(engine):
    served = scheduler(engine, max_num_tokens=30)
    running, late, rounds = make_sequence(prompt(5), 60, GREEDY), make_sequence(prompt(60), 2, GREEDY), 0
    served.submit(running)
    while not running.sink.deltas:
        served.round()
    served.submit(late)
    while not late.sink.deltas:
        before = len(running.sink.deltas)
        served.round()
        rounds += 1
        assert len(running.sink.deltas) > before or running.ended
    assert rounds > 2


def test_a_prompt_does_not_wait_for_rows_whose_trees_use_up_the_limit(engine):
    served = scheduler(engine, max_num_tokens=20)  # the trees of two rows have 34 nodes
    running = [make_sequence(prompt(5 + row), 60, GREEDY) for row in range(2)]
    until_stepping(served, *running)
    late = make_sequence(prompt(8), 2, GREEDY)
    served.submit(late)
    for _ in range(3):
        served.round()
    assert late.sink.deltas
    assert not any(each.ended for each in running)


def test_what_a_prompt_beside_rows_left_in_the_cache_is_found(engine):
    served, shared = scheduler(engine), prompt(48, 2)
    same_alone(engine, begin_beside(served, 2, [shared], GREEDY))
    again = make_sequence([*shared, 5], 8, GREEDY)
    run_as_alone(served, [again])
    assert again.reused >= 48


def reading(*left: int) -> list[TokenSequence]:
    return [make_sequence([5] * tokens, 4, GREEDY) for tokens in left]


@pytest.mark.parametrize("padded", [False, True])
def test_a_short_prompt_is_read_beside_a_long_one_and_the_long_one_gets_on(padded):
    texts = reading(5000, 4000, 3)
    [shares] = choose_chunks(texts, 256, padded, chunked=True)
    found = dict(shares)
    assert found[texts[2]] == 3
    assert found[texts[0]] >= 64
    assert padded_tokens(shares, padded) <= 256
    texts = reading(5000, *[3] * 200)
    [shares] = choose_chunks(texts, 256, padded, chunked=True)
    found = dict(shares)
    assert found[texts[0]] >= 3
    assert sum(found.get(each, 0) == 3 for each in texts[1:]) >= 42


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_what_a_forward_reads_fits_and_everything_is_read(padded, chunked):
    made = random.Random(padded + 2 * chunked)
    for _ in range(300):
        texts = reading(*(made.choice((1, 3, 20, 300)) for _ in range(made.randrange(1, 9))))
        budget, forwards = made.choice((16, 60, 500)), 0
        while texts:
            for shares in choose_chunks(texts, budget, padded, chunked):
                assert shares
                assert len(dict(shares)) == len(shares)
                for each, share in shares:
                    assert 0 < share <= each.prefill_length - each.prefilled
                    assert chunked or share == each.prefill_length
                    each.prefilled += share
                alone_and_whole = not chunked and len(shares) == 1
                assert padded_tokens(shares, padded) <= budget or alone_and_whole
            oldest = texts[0]
            assert oldest.prefilled
            assert chunked or oldest.prefilled == oldest.prefill_length
            texts = [each for each in texts if each.prefilled < each.prefill_length]
            forwards += 1
            assert forwards < 400


def test_the_pace_follows_the_machine():
    pace = PrefillPace(8192)
    for _ in range(20):
        pace.measure(pace.tokens, pace.tokens * 1e-3)  # a thousand tokens a second
    assert pace.tokens == pytest.approx(1000 * TARGET_SECONDS, rel=0.1)
    pace.measure(3, 0.02)  # a short prompt is slow by the token, and says nothing
    assert pace.tokens == pytest.approx(1000 * TARGET_SECONDS, rel=0.1)
    pace.measure(pace.tokens, 100.0)  # one that stood still for a while does not slow all that follow
    assert pace.tokens >= MIN_FORWARD_TOKENS
    for _ in range(20):
        pace.measure(pace.tokens, 1e-4)
    assert pace.tokens == 8192
    for _ in range(20):
        pace.measure(pace.tokens, 1e3)
    assert pace.tokens == MIN_FORWARD_TOKENS


def test_no_round_reads_more_than_its_pace(engine, monkeypatch):
    served = scheduler(engine)
    served.mixed_prefill = False
    chunks = noted(monkeypatch, served.prefiller, "forward", lambda read, chosen, *_: max(count for _, count in chosen))
    monkeypatch.setattr(PrefillPace, "measure", lambda self, tokens, seconds: None)
    served.prefiller.pace.tokens = 2 * BLOCK_SIZE
    run_as_alone(served, [make_sequence([3 + n % 50 for n in range(75)], 4, GREEDY)])
    assert chunks == [32, 32, 11]
