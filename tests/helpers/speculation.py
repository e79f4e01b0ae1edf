"""Rows that keep drafts by rejection sampling or keep none."""

from dataclasses import replace

import torch

from helpers.scheduling import alone
from redrafter import DraftTarget, Engine
from redrafter.scheduler.sequence import TokenSequence
from redrafter.target.target import Target


def without_drafts(jobs: list[TokenSequence]) -> list[TokenSequence]:
    """Every other job, told not to speculate."""
    for each in jobs[::2]:
        each.settings = replace(each.settings, speculate=False)
    return jobs


def rejection_sampling(target: Target, draft: Target) -> Engine:
    return DraftTarget(target, draft, draft_len=3, acceptance="rejection")


def kept_by_odds(engine: Engine, job: TokenSequence) -> list[int]:
    """What `generate` writes for a job, with drafts where the job takes any."""
    settings = job.settings
    if settings.greedy or not settings.speculate:
        return alone(engine, job)
    ids = torch.tensor([list(job.prompt)])
    kinds = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    kinds |= {"logit_bias": settings.logit_bias} if settings.logit_bias else {}
    ends = sorted(settings.ends) or None
    found = engine.generate(ids, max_new_tokens=job.room, do_sample=True, eos_token_id=ends, **kinds)
    return found[0, len(job.prompt) :].tolist()
