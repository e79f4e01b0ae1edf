"""The time of a step by its parts (draft, verify, the rest), beside the time that its bytes alone would take."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from redrafter.bench.standing_batch import long_texts, open_standing_batch
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_types import Drafter
from redrafter.drafting.proposer import SearchProposer
from redrafter.measure.floors import Bandwidth, draft_bytes, forward_bytes, slot_bytes
from redrafter.measure.run import Workload

__all__ = ["StepParts", "measure_head", "measure_parts", "random_drafter"]


@dataclass(frozen=True)
class StepParts:
    """The times of one step, in milliseconds. A floor is bytes over copy bandwidth.

    Attributes:
        batch_size: Rows in the batch.
        asked: Tokens that `--context` asked for; None where the prompts are timed, half way through their new tokens.
        context: Committed tokens of the longest row.
        beyond: Whether the context is longer than the model's, so that times are right and tokens mean nothing.
        speculative: Whether the step drafts.
        nodes: Nodes of the tree.
        step_ms: The whole step.
        draft_ms: Proposing the tree; None in plain decoding.
        draft_floor_ms: Floor of proposing; None in plain decoding.
        verify_ms: The target's forward over the tree.
        verify_floor_ms: Floor of that forward.
        rest_ms: The step without draft and verify: drawing, accepting, committing, the copy to the host.
        kv_bytes: Bytes of the keys and values of all committed tokens.
        checks: Whether the step waits or allocates, as `StandingBatch.check` returns it.
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
    checks: dict[str, Any] | None


@torch.inference_mode()
def measure_parts(work: Workload, bandwidth: Bandwidth, rows: int, asked: int | None, *, speculate: bool) -> StepParts:
    """Time one step and its parts.

    Args:
        work: The workload.
        bandwidth: The device's copy bandwidth, for the floors.
        rows: Rows in the batch.
        asked: Committed tokens of each row; None for the prompts, half way through their new tokens.
        speculate: Whether to draft.
    """
    proposer, target = work.proposer(rows, speculate), work.engine.target
    with _open(work, rows, asked, proposer) as batch:
        step = batch.step_ms()
        propose = batch.propose(proposer)
        tree = propose()
        verify = batch.part_ms(lambda: target.verify(tree, batch.state.length, batch.cache))
        draft = floor = None
        if isinstance(proposer, SearchProposer):
            draft = batch.part_ms(propose)
            floor = bandwidth.ms(draft_bytes(proposer.drafter, proposer.depth))
        kv = batch.tokens * slot_bytes(target.shapes)
        return StepParts(
            batch_size=rows,
            asked=asked,
            context=batch.longest,
            beyond=target.context is not None and batch.longest + proposer.depth >= target.context,
            speculative=draft is not None,
            nodes=proposer.nodes,
            step_ms=step,
            draft_ms=draft,
            draft_floor_ms=floor,
            verify_ms=verify,
            verify_floor_ms=bandwidth.ms(forward_bytes(target.model) + kv),
            rest_ms=step - (draft or 0.0) - verify,
            kv_bytes=kv,
            checks=batch.check(),
        )


@torch.inference_mode()
def measure_head(work: Workload, bandwidth: Bandwidth, rows: int, drafter: Drafter) -> dict[str, Any] | None:
    """Time drafting with `drafter` in place of the engine's; None where speculation is off at `rows` rows.

    Returns:
        The `batch_size`, how many `ids` the drafter's head covers, the milliseconds to propose a tree (`draft_ms`), and
        the bytes of the drafter's weights over the copy bandwidth (`floor_ms`).
    """
    proposer = work.proposer(rows, speculate=True)
    if not isinstance(proposer, SearchProposer):
        return None
    with _open(work, rows, None, proposer) as batch:
        ms = batch.part_ms(batch.propose(replace(proposer, drafter=drafter)))
    floor = bandwidth.ms(draft_bytes(drafter, proposer.depth))
    return {"batch_size": rows, "ids": drafter.lm_head.out_features, "draft_ms": ms, "floor_ms": floor}


def _open(work: Workload, rows: int, asked: int | None, proposer: Any) -> Any:
    if asked is None:
        return open_standing_batch(work, work.batches(rows)[0], proposer, advance=work.max_new_tokens // 2)
    return open_standing_batch(work, long_texts(work.prompts, rows, asked), proposer, advance=0)


def random_drafter(drafter: Drafter, ids: int) -> Drafter:
    """Return a drafter of the same shape with random weights and a head of `ids` ids, good for timing only."""
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = None if ids == config.vocab_size else ids
    with torch.device("meta"):
        make: Any = type(drafter)
        module: Any = make(config)
    module = module.to(drafter.dtype).to_empty(device=drafter.device).eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.02)
    if module.draft_ids is not None:
        module.draft_ids.copy_(torch.randperm(config.vocab_size)[:ids].sort().values)
    if isinstance(drafter, RecurrentDrafter) and drafter.rnn_joined is not None:
        module.join_recurrence()
    return module
