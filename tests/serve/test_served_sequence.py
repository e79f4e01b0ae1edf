"""What a server counts of a text, and where a stop string cuts it."""

import pytest

from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process.client import ServedSequence


def sequence(stop: int | None) -> ServedSequence:
    return ServedSequence([5], frozenset(), Stats(accepted_by_depth=[0] * 4), lambda tokens: stop)


@pytest.mark.parametrize(
    ("stop", "tokens", "accepted", "finish"),
    [
        (None, [7, 8, 9], 2, "length"),
        (2, [7, 8, 9], 2, "stop"),
        (1, [7, 8], 2, "stop"),
        (0, [7], 1, "stop"),
    ],
)
def test_a_stop_string_cuts_a_delta(stop, tokens, accepted, finish):
    text, logprobs = sequence(stop), [(-1.0, {}), (-2.0, {}), (-3.0, {})]
    text.written = 1
    delta = text.take(SequenceDelta([7, 8, 9], 2, logprobs, "length", drafted=11))
    assert delta == SequenceDelta(tokens, accepted, logprobs[: len(tokens)], finish, drafted=11)
    assert text.ended
    assert text.written == 1 + len(tokens)
    assert text.stats == Stats(1, 11, accepted, len(tokens), [1] * accepted + [0] * (4 - accepted))


def test_an_error_is_no_stop():
    error = RuntimeError("no memory")
    delta = sequence(0).take(SequenceDelta([7, 8], finish="error", error=error))
    assert (delta.finish, delta.error) == ("error", error)


def test_a_text_goes_on_until_its_last_delta():
    text = sequence(None)
    text.take(SequenceDelta([7]))
    assert not text.ended
    text.take(SequenceDelta([], finish="cancelled"))
    assert text.ended
    assert text.stats.steps == 0


@pytest.mark.parametrize(("drafted", "draft_steps"), [(5, 1), (0, 1), (None, 0)])
def test_a_step_counts_with_drafts_where_others_left_it_none_too(drafted, draft_steps):
    text = sequence(None)
    text.take(SequenceDelta([7]))
    text.take(SequenceDelta([8], drafted=drafted))
    assert (text.stats.steps, text.stats.draft_steps) == (1, draft_steps)
