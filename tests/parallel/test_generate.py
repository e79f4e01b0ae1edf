"""Texts of models that several ranks share, compared with those of one process, in double precision."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from helpers.ranks import CHANGED, change_models, decode, decode_changed, make_models, run_on_ranks

# By number of ranks, what is decoded: an architecture and what drafts.
JOBS = {
    2: [
        *("llama:drafter", "qwen3:drafter", "gemma2:drafter", "qwen3_moe:drafter"),
        *("llama:draft model", "llama:lookup", "llama:astray", "llama:eagle"),
        *("llama_with_mtp:mtp", "llama_of_one_key_head:drafter", "llama_in_int4:drafter"),
    ],
    4: ["llama:drafter", "qwen3_moe:drafter", "llama:draft model", "llama_of_two_key_heads:drafter"],
}
RUNS = [(ranks, job) for ranks, jobs in JOBS.items() for job in jobs]
MODES = [
    f"{cache} {draws} {drafts}"
    for cache in ("dense", "paged")
    for draws in ("greedy", "sampled")
    for drafts in ("drafts", "plain")
]
GPU_JOBS = ["llama:drafter", "gemma2:drafter", "llama:draft model", "llama:astray"]

needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), *{job.partition(":")[0] for _, job in RUNS})


@pytest.fixture(scope="module")
def texts(models, tmp_path_factory) -> Callable[..., list[dict]]:
    """Return a function that gives the texts of every one of so many ranks, by job and mode."""

    @cache
    def run(ranks: int, *jobs: str) -> list[dict]:
        out = tmp_path_factory.mktemp("texts")
        ended = run_on_ranks(ranks, "helpers.ranks", models, out, *(jobs or JOBS[ranks]), module=True, seconds=600)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "cannot run in a CUDA graph" not in ended.stderr
        assert "cannot be compiled" not in ended.stderr
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="module")
def alone(models) -> Callable[[str], dict]:
    """Return a function that gives the texts of one process, by mode."""
    return cache(lambda job: decode(models, *job.split(":"), 1))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "job"), RUNS)
def test_every_rank_writes_what_one_process_writes(texts, alone, ranks, job):
    first, *others = (rank[job] for rank in texts(ranks))
    assert all(other == first for other in others)
    for mode in MODES:
        assert first[mode] == alone(job)[mode], mode


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe", "llama_of_one_key_head", "llama_in_int4"])
def test_a_changed_engine_writes_on_every_rank_what_one_process_writes(models, tmp_path, kind):
    if not (models / f"new_{kind}").exists():
        change_models(models, kind)
    ended = run_on_ranks(2, "helpers.ranks", models, tmp_path, f"{kind}:{CHANGED}", module=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text())[f"{kind}:{CHANGED}"] for rank in range(2))
    assert first == second == decode_changed(models, kind, 1)
    assert first["new weights, drafts"] == first["new weights, plain"] == first["another drafter"]
    assert first["new weights, drafts"] == first["after sleep"] != first["before"]
    assert {"NotFiniteError 1", "MismatchError 2", "MismatchError 3"} < first.keys()
    assert first["adapter, drafts"] == first["adapter, plain"]
    changed = [a != b for a, b in zip(first["adapter, drafts"], first["after sleep"], strict=True)]
    assert changed == [row != 1 for row in range(len(changed))]  # the second row has no adapter
    assert first["after the adapter"] == first["after sleep"]


@needs_gpus
@pytest.mark.parametrize("job", GPU_JOBS)
def test_captured_steps_with_collectives_write_the_same_on_both_gpus_and_as_without_drafts(texts, job):
    first, second = (rank[job] for rank in texts(2, *GPU_JOBS))
    assert first == second
    for draws in ("greedy", "sampled"):
        assert first[f"paged {draws} drafts"] == first[f"paged {draws} plain"]
