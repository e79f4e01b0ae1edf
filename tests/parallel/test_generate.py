"""Texts of models that several ranks share, compared with those of one process, in double precision."""

import json
from pathlib import Path

import pytest

from helpers.ranks import decode, make_models, run_on_ranks

JOBS = [
    "llama:drafter",
    "qwen3:drafter",
    "gemma2:drafter",
    "qwen3_moe:drafter",
    "llama:draft model",
    "llama:lookup",
]
MODES = [
    f"{cache} {draws} {drafts}"
    for cache in ("dense", "paged")
    for draws in ("greedy", "sampled")
    for drafts in ("drafts", "plain")
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), *{job.partition(":")[0] for job in JOBS})


@pytest.fixture(scope="module", params=[2, 4])
def texts(request, models, tmp_path_factory) -> list[dict]:
    """The texts of every rank, by job and mode."""
    ranks, out = request.param, tmp_path_factory.mktemp("texts")
    jobs = JOBS if ranks == 2 else ["llama:drafter", "qwen3_moe:drafter", "llama:draft model"]
    run = run_on_ranks(ranks, "helpers.ranks", models, out, *jobs, module=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(models) -> dict:
    """The texts of one process."""
    return {job: decode(models, *job.split(":"), 1) for job in JOBS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("job", JOBS)
def test_ranks_write_what_one_process_writes(texts, alone, job, mode):
    if job not in texts[0]:
        pytest.skip("not run on so many ranks")
    assert texts[0][job][mode] == alone[job][mode]


@pytest.mark.parametrize("job", JOBS)
def test_all_ranks_write_the_same(texts, job):
    assert all(rank.get(job) == texts[0].get(job) for rank in texts)
