"""Where two ways of decoding wrote different tokens, and how near a tie that was."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redrafter.measure.workload import Workload

__all__ = ["Divergence", "Equality", "compare", "first_difference"]


@dataclass(frozen=True)
class Divergence:
    """A row whose texts part. token: index of the first new token that differs; plain, speculative: what it was.

    margin: what the best logit there has over the second, by one plain forward over the text so far, in the model's own
    dtype; None when sampling. top_two: whether the two tokens are those two.
    """

    prompt: int
    token: int
    plain: int
    speculative: int
    margin: float | None = None
    top_two: bool | None = None


@dataclass(frozen=True)
class Equality:
    """Whether all is equal, rows compared, rows that differ, which of them differs earliest, and the largest margin of
    any."""

    equal: bool
    rows: int
    divergent: int
    first: Divergence | None
    largest_margin: float | None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None when all are equal; a missing token differs from any."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(work: Workload, plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]) -> Equality:
    """All rows of a batch size, in order: row i wrote on from prompt i, over and over."""
    found = []
    for row, (mine, theirs) in enumerate(zip(plain, speculative, strict=True)):
        index = first_difference(mine, theirs)
        if index is None:
            continue
        prompt = row % len(work.prompts)
        margin = top_two = None
        if not work.temperature:
            margin, best = top_gap(work, [*work.prompts[prompt], *mine[:index]])
            top_two = {mine[index], theirs[index]} == best
        found.append(Divergence(prompt, index, mine[index], theirs[index], margin, top_two))
    margins = [each.margin for each in found if each.margin is not None]
    first = min(found, key=lambda each: each.token, default=None)
    return Equality(not found, len(plain), len(found), first, max(margins, default=None))


@torch.inference_mode()
def top_gap(work: Workload, text: Sequence[int]) -> tuple[float, set[int]]:
    """What the best next token's logit has over the second's, and which two they are."""
    ids = torch.tensor([text], device=work.device)
    logits = work.engine.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    values, tokens = logits.topk(2)
    return float(values[0] - values[1]), set(tokens.tolist())
