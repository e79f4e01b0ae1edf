"""Rows that verify drafts by rejection sampling, or none."""

from dataclasses import replace

import torch

from helpers.scheduling import alone
from redrafter import DraftTarget, Engine
from redrafter.model.target import Target
from redrafter.scheduler.sequence import TokenSequence


def without_drafts(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Let every other sequence verify no drafts, and return all of them."""
    for each in sequences[::2]:
        each.params = replace(each.params, speculate=False)
    return sequences


def rejection_sampling(target: Target, draft: Target) -> Engine:
    return DraftTarget(target, draft, draft_len=3, acceptance="rejection")


def rejection_sampled(engine: Engine, sequence: TokenSequence) -> list[int]:
    """Return what `generate` writes for a sequence, with drafts unless the sequence takes none."""
    params = sequence.params
    if params.greedy or not params.speculate:
        return alone(engine, sequence)
    ids = torch.tensor([list(sequence.prompt)])
    kinds = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    kinds |= {"logit_bias": params.logit_bias} if params.logit_bias else {}
    ends = sorted(params.stop_token_ids) or None
    found = engine.generate(ids, max_new_tokens=sequence.max_new_tokens, do_sample=True, eos_token_id=ends, **kinds)
    return found[0, len(sequence.prompt) :].tolist()
