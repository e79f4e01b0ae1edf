"""Drafts from texts that have ended: found under their own salt, bounded, and without a token's change."""

from dataclasses import replace

import pytest

from helpers.models import tiny_drafter, tiny_model
from helpers.scheduling import make_sequence, run, run_as_alone, scheduler
from redrafter import ReDrafter
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler import finished_texts
from redrafter.scheduler.finished_texts import KEYS, PIECE, FinishedTexts
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.sizes import TreeShape

SAMPLED = SamplingParams(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def engine() -> ReDrafter:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = ReDrafter(Target(model), tiny_drafter(), TreeShape(3, 3, 8))
    engine.pauses = False
    return engine


def sequence(salt: str | None, seed: int = 5, prompt: tuple[int, ...] = (5, 9, 3, 8, 2)) -> TokenSequence:
    made = make_sequence(list(prompt), 60, replace(SAMPLED, seed=seed))
    made.cache_salt = salt
    return made


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_text_that_was_written_before_takes_few_steps(engine, ahead):
    served = scheduler(engine, finished=FinishedTexts(), max_batch_size=4)
    served.overlap = served.mixed_prefill = ahead
    first, again, changed = sequence("a"), sequence("a"), sequence("a", prompt=(7, 7, 9, 3, 8, 2))
    for each in (first, again, changed):
        run_as_alone(served, [each])
    assert first.stats.copied < 10
    assert again.stats.copied > 40
    assert again.stats.steps < 0.4 * first.stats.steps


def test_no_row_sees_what_was_written_under_another_salt(engine):
    served = scheduler(engine, finished=FinishedTexts(), max_batch_size=4)
    first = sequence("a")
    run(served, [first, sequence("a", seed=6)])
    ours = sequence("a")
    run(served, [ours])
    assert ours.stats.copied > 40
    assert served.batch.state.pieces[0].any(), "the row that others get now holds a piece"
    for salt in ("b", None):
        other = sequence(salt)
        served.submit(other)
        while not other.ended:
            served.round()
            assert not served.batch.state.pieces[0].any()
        assert other.copying.source is None
        assert other.stats.copied == first.stats.copied
        assert other.tokens == first.tokens


def test_a_row_is_given_nothing_where_no_texts_are_kept(engine):
    served = scheduler(engine, max_batch_size=4)
    both = sequence("a"), sequence("a")
    for each in both:
        run(served, [each])
    assert both[0].stats == both[1].stats
    assert served.batch.state.pieces is None


def test_the_latest_text_with_the_most_last_tokens_is_found():
    texts, prompt = FinishedTexts(), list(range(100, 120))
    texts.add("a", prompt, [*range(20)])
    texts.add("a", [1], [50, 16, 17, 18, 19, 60, 61])
    few, many = texts.find("a", [7, 16, 17, 18, 19], None), texts.find("a", [*range(3, 19)], None)
    assert [*few.tokens] == [1, 50, 16, 17, 18, 19, 60, 61]  # the latest
    assert [*many.tokens] == [*range(3, 20)]  # more tokens of an earlier one
    assert [*texts.find("a", prompt, None).tokens] == [*prompt[-KEYS[0] :], *range(20)]  # from the prompt on
    assert texts.find("a", [*range(4, 19)][-3:], None) is None
    assert texts.find("b", [*range(3, 19)], None) is None
    assert texts.find("a", [*range(3, 19)], many) is None  # it has that already
    assert texts.find("a", [7, 16, 17, 18, 19], many).text == few.text


def test_the_part_that_follows_is_found_where_a_piece_ends():
    texts, long = FinishedTexts(), [*range(2000)]
    texts.add("a", [], long)
    begin = texts.find("a", long[:20], None)
    assert [*begin.tokens] == long[4 : 4 + PIECE]
    assert texts.find("a", long[:300], begin) is None
    after = texts.find("a", long[:PIECE], begin)
    assert [*after.tokens] == long[PIECE - KEYS[0] : 2 * PIECE - KEYS[0]]
    end = texts.find("a", long[:1995], None)
    assert texts.find("a", long[:1999], end) is None


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(finished_texts, "MOST_TOKENS_OF_SALT", 100)
    monkeypatch.setattr(finished_texts, "MOST_TOKENS", 250)
    texts = FinishedTexts()
    for number in range(10):
        texts.add("a", [], [*range(50 * number, 50 * number + 40)])
    assert texts.tokens == 80
    assert texts.find("a", [*range(350, 360)], None) is None
    assert texts.find("a", [*range(400, 410)], None) is not None
    assert texts.places == sum(80 // 2 - count for count in KEYS) * 2
    texts.add("a", [], [*range(1000)])
    assert texts.tokens == 100
    for salt in "bcd":
        texts.add(salt, [], [*range(60)])
    assert texts.tokens == 180
    assert texts.find("a", [*range(10)], None) is None  # the salt that was used least lately
    texts.clear()
    assert texts.tokens == 0
