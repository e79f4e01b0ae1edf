"""Texts of models that several ranks share, compared with those of one process, in double precision."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from helpers.ranks import decode, make_models, run_on_ranks

# By number of ranks, what is decoded: an architecture and what drafts.
JOBS = {
    2: [
        "llama:drafter",
        "qwen3:drafter",
        "gemma2:drafter",
        "qwen3_moe:drafter",
        "llama:draft model",
        "llama:lookup",
        "llama:astray",
    ],
    4: ["llama:drafter", "qwen3_moe:drafter", "llama:draft model"],
}
RUNS = [(ranks, job) for ranks, jobs in JOBS.items() for job in jobs]
MODES = [
    f"{cache} {draws} {drafts}"
    for cache in ("dense", "paged")
    for draws in ("greedy", "sampled")
    for drafts in ("drafts", "plain")
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), *{job.partition(":")[0] for _, job in RUNS})


@pytest.fixture(scope="module")
def texts(models, tmp_path_factory) -> Callable[[int], list[dict]]:
    """Return a function that gives the texts of every one of so many ranks, by job and mode."""

    @cache
    def run(ranks: int) -> list[dict]:
        out = tmp_path_factory.mktemp("texts")
        ended = run_on_ranks(ranks, "helpers.ranks", models, out, *JOBS[ranks], module=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="module")
def alone(models) -> Callable[[str], dict]:
    """Return a function that gives the texts of one process, by mode."""
    return cache(lambda job: decode(models, *job.split(":"), 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ranks", "job"), RUNS)
def test_ranks_write_what_one_process_writes(texts, alone, ranks, job, mode):
    assert texts(ranks)[0][job][mode] == alone(job)[mode]


@pytest.mark.parametrize(("ranks", "job"), RUNS)
def test_all_ranks_write_the_same(texts, ranks, job):
    first, *others = (rank[job] for rank in texts(ranks))
    assert all(other == first for other in others)
