"""Where the time of a step goes, and what of it the bytes alone would take."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from redrafter.bench.standing_batch import Checks, long_texts, staged
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.recurrent import RecurrentProposer
from redrafter.measure.bandwidth import Bandwidth
from redrafter.measure.floors import draft_bytes, forward_bytes, slot_bytes
from redrafter.measure.workload import Workload

__all__ = ["Head", "Parts", "measure_head", "measure_parts", "random_drafter"]


@dataclass(frozen=True)
class Parts:
    """One step. asked: tokens that `--context` asked for; None where the prompts' own are timed, half way through what
    they write. context: committed tokens of the longest row; beyond: whether that is past the model's context, so that
    nothing but times means anything. draft: None in plain decoding. rest: drawing, accepting, committing, and the copy
    to the host. A floor is bytes over copy bandwidth.
    """

    batch_size: int
    asked: int | None
    context: int
    beyond: bool
    speculative: bool
    nodes: int
    step_ms: float
    draft_ms: float | None
    draft_floor_ms: float | None
    verify_ms: float
    verify_floor_ms: float
    rest_ms: float
    kv_bytes: int
    checks: Checks | None


@dataclass(frozen=True)
class Head:
    """A drafter with random weights, whose head knows `ids` ids."""

    batch_size: int
    ids: int
    draft_ms: float
    floor_ms: float


@torch.inference_mode()
def measure_parts(work: Workload, bandwidth: Bandwidth, rows: int, asked: int | None, *, speculate: bool) -> Parts:
    proposer, target = work.proposer(rows, speculate), work.engine.target
    with _stage(work, rows, asked, proposer) as stage:
        step = stage.step_ms()
        propose = stage.propose(proposer)
        tree = propose()
        verify = stage.part_ms(lambda: target.verify(tree, stage.state.length, stage.cache))
        draft = floor = None
        if isinstance(proposer, RecurrentProposer):
            draft = stage.part_ms(propose)
            floor = bandwidth.ms(draft_bytes(proposer.drafter, proposer.depth))
        kv = stage.tokens * slot_bytes(target.shapes)
        return Parts(
            batch_size=rows,
            asked=asked,
            context=stage.longest,
            beyond=target.context is not None and stage.longest + proposer.depth >= target.context,
            speculative=draft is not None,
            nodes=proposer.nodes,
            step_ms=step,
            draft_ms=draft,
            draft_floor_ms=floor,
            verify_ms=verify,
            verify_floor_ms=bandwidth.ms(forward_bytes(target.model) + kv),
            rest_ms=step - (draft or 0.0) - verify,
            kv_bytes=kv,
            checks=stage.check(),
        )


@torch.inference_mode()
def measure_head(work: Workload, bandwidth: Bandwidth, rows: int, drafter: RecurrentDrafter) -> Head | None:
    """Drafting with another drafter than the engine's. None where speculation is off."""
    proposer = work.proposer(rows, speculate=True)
    if not isinstance(proposer, RecurrentProposer):
        return None
    with _stage(work, rows, None, proposer) as stage:
        ms = stage.part_ms(stage.propose(replace(proposer, drafter=drafter)))
    return Head(rows, drafter.lm_head.out_features, ms, bandwidth.ms(draft_bytes(drafter, proposer.depth)))


def _stage(work: Workload, rows: int, asked: int | None, proposer: Any) -> Any:
    if asked is None:
        return staged(work, work.batches(rows)[0], proposer, advance=work.max_new_tokens // 2)
    return staged(work, long_texts(work.prompts, rows, asked), proposer, advance=0)


def random_drafter(drafter: RecurrentDrafter, ids: int) -> RecurrentDrafter:
    """One of the same shape with random weights, whose head knows `ids` ids; good for nothing but its time."""
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = None if ids == config.vocab_size else ids
    with torch.device("meta"):
        module: Any = RecurrentDrafter(config)
    module = module.to(drafter.dtype).to_empty(device=drafter.device).eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.02)
    if module.draft_ids is not None:
        module.draft_ids.copy_(torch.randperm(config.vocab_size)[:ids].sort().values)
    if drafter.rnn_joined is not None:
        module.join_recurrence()
    return module
