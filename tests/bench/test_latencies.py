"""Throughput and percentiles of loads on made-up timelines, in seconds."""

import pytest

from redrafter.bench.server_load import Completion, LoadRun, percentile, steady_span, summarize, tokens_between


def completed(index: int, sent: float, chunks: list[float], ended: float, tokens: int = 0, **more) -> Completion:
    count = tokens or len(chunks)
    return Completion(index, sent, ended, chunks, more.pop("texts", chunks), "", 5, count, **more)


def failed(index: int, sent: float, ended: float) -> Completion:
    return Completion(index, sent, ended, error=f"error {index}")


def milliseconds(p50: float, p99: float) -> dict[str, float]:
    return {"p50": p50, "p99": p99}


TWO_SLOTS = [  # the third request follows the first, the fourth the second
    completed(0, 0.0, [1.0, 2.0, 3.0], 3.0),
    completed(1, 0.0, [1.5, 2.5, 3.5], 3.6),
    completed(2, 3.0, [4.0, 5.0, 6.0], 6.0),
    completed(3, 3.6, [4.5, 5.5, 7.5], 7.6),
]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.5, 3.0),
        ([0.0, 10.0], 0.99, 9.9),
        (list(map(float, range(101))), 0.99, 99.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_a_percentile_lies_between_its_two_neighbours(values, share, expected):
    assert percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completions", "slots", "span"),
    [
        (TWO_SLOTS, 2, (1.5, 6.0)),
        (TWO_SLOTS[::-1], 2, (1.5, 6.0)),
        (TWO_SLOTS[:2], 2, (1.5, 3.0)),
        (TWO_SLOTS, 1, (1.0, 7.6)),
        (TWO_SLOTS[:1], 2, None),
        ([completed(0, 0.0, [0.5], 0.6), completed(1, 0.0, [0.7], 0.8)], 2, None),  # one had ended, one not begun
        ([failed(0, 0.0, 1.2), completed(1, 0.0, [1.0, 9.0], 9.0), completed(2, 1.2, [2.0, 8.0], 8.0)], 2, (1.2, 8.0)),
    ],
)
def test_steady_state_is_from_the_last_slot_to_begin_to_the_first_left_idle(completions, slots, span):
    assert steady_span(completions, slots) == span


@pytest.mark.parametrize(("begin", "end", "tokens"), [(1.5, 6.0, 9), (0.0, 9.0, 12), (1.0, 2.0, 2), (8.0, 9.0, 0)])
def test_tokens_are_counted_between_two_instants(begin, end, tokens):
    assert tokens_between(TWO_SLOTS, begin, end) == tokens


def test_several_tokens_of_a_chunk_are_spread_evenly_on_chunks():
    assert tokens_between([completed(0, 0.0, [1.0, 2.0, 3.0, 4.0], 4.0, tokens=10)], 1.0, 3.0) == 5


def test_a_summary_of_two_slots():
    summary = summarize(LoadRun(2, TWO_SLOTS, 0.0, 8.0, 0.25), max_new_tokens=3)
    assert (summary["requests"], summary["failed"], summary["first_error"], summary["short_texts"]) == (4, 0, None, 0)
    assert summary["tokens_per_second"] == pytest.approx(12 / 8)
    assert summary["steady_tokens_per_second"] == pytest.approx(9 / 4.5)
    assert summary["requests_per_second"] == pytest.approx(4 / 8)
    assert summary["first_token_ms"] == milliseconds(pytest.approx(1000), pytest.approx(1485))
    assert summary["chunk_gap_ms"] == milliseconds(pytest.approx(1000), pytest.approx(1930))
    assert summary["ms_per_token"] == pytest.approx(1e3 * (2 + 2 + 2 + 3) / 8)
    assert summary["request_ms"] == milliseconds(pytest.approx(3300), pytest.approx(3988))
    assert (summary["prompt_tokens"], summary["completion_tokens"], summary["tokens_per_chunk"]) == (20, 12, 1)
    assert summary["client_cpu_share"] == 0.25


@pytest.mark.parametrize(
    ("one", "first", "gap", "per_token"),
    [
        (completed(0, 0.0, [1.0, 3.0], 3.0, tokens=5), 1000, 2000, 500),  # a chunk of several tokens
        (completed(0, 0.0, [1.0, 2.0, 4.0, 5.0], 5.0, texts=[2.0, 5.0]), 2000, 3000, 4000 / 3),
        (completed(0, 1.0, [2.0, 3.0], 4.0, texts=[]), 3000, None, 1000),  # which shows so when it ends
    ],
    ids=["several tokens", "chunks without text", "no text"],
)
def test_chunks_without_text_show_nothing_but_bring_tokens(one, first, gap, per_token):
    tokens = one.completion_tokens
    summary = summarize(LoadRun(1, [one], one.sent, one.ended, 0.0), max_new_tokens=tokens)
    assert summary["first_token_ms"] == milliseconds(first, first)
    assert summary["chunk_gap_ms"] == (gap and milliseconds(gap, gap))
    assert summary["ms_per_token"] == pytest.approx(per_token)
    assert summary["tokens_per_chunk"] == tokens / len(one.chunk_times)


def test_failed_requests_count_as_such_only():
    run = LoadRun(2, [failed(1, 0.0, 0.1), *TWO_SLOTS[:1], failed(2, 0.1, 0.2)], 0.0, 4.0, 0.0)
    summary = summarize(run, max_new_tokens=4)
    counts = [summary[name] for name in ("requests", "failed", "first_error", "short_texts")]
    assert counts == [3, 2, "error 1", 1]
    assert summary["tokens_per_second"] == 3 / 4
    assert summary["requests_per_second"] == 1 / 4
    assert summary["prompt_tokens"] == 5


def test_where_all_requests_failed_there_are_no_times():
    summary = summarize(LoadRun(1, [failed(0, 0.0, 1.0)], 0.0, 1.0, 0.0), max_new_tokens=4)
    assert summary["tokens_per_second"] == 0
    times = (summary["first_token_ms"], summary["chunk_gap_ms"], summary["request_ms"], summary["ms_per_token"])
    assert times == (None, None, None, None)
    assert summary["tokens_per_chunk"] is None
