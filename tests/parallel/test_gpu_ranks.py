"""Models that GPUs share: captured steps with collectives in them. Needs two GPUs."""

import json

import pytest
import torch

from helpers.ranks import make_models, run_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

JOBS = ["llama:drafter", "gemma2:drafter", "llama:draft model", "llama:astray"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[dict]:
    """The texts of both ranks, by job and mode."""
    models, out = make_models(tmp_path_factory.mktemp("models"), "llama", "gemma2"), tmp_path_factory.mktemp("texts")
    run = run_on_ranks(2, "helpers.ranks", models, out, *JOBS, module=True, seconds=600)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "cannot run in a CUDA graph" not in run.stderr
    assert "cannot be compiled" not in run.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("job", JOBS)
def test_both_ranks_write_the_same(texts, job):
    assert texts[0][job] == texts[1][job]


@pytest.mark.parametrize("draws", ["greedy", "sampled"])
@pytest.mark.parametrize("job", JOBS)
def test_drafts_change_nothing(texts, job, draws):
    assert texts[0][job][f"paged {draws} drafts"] == texts[0][job][f"paged {draws} plain"]
