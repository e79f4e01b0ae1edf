"""Where two ways of decoding wrote different tokens, and how close the logits were there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redrafter.measure.workload import Workload

__all__ = ["Divergence", "Equality", "compare", "first_difference"]


@dataclass(frozen=True)
class Divergence:
    """A row for which plain and speculative decoding wrote different texts.

    Attributes:
        prompt: Index of the row's prompt.
        token: Index of the first new token that differs.
        plain: Id that plain decoding wrote there.
        speculative: Id that speculative decoding wrote there.
        margin: Best logit there minus the second best, from one plain forward over the text so far in the model's own
            dtype; None when sampling.
        top_two: Whether the two ids are those of the two best logits; None when sampling.
    """

    prompt: int
    token: int
    plain: int
    speculative: int
    margin: float | None = None
    top_two: bool | None = None


@dataclass(frozen=True)
class Equality:
    """The outcome of comparing the rows of two ways of decoding.

    Attributes:
        equal: Whether no row differs.
        rows: Rows compared.
        divergent: Rows that differ.
        first: The row that differs at the earliest new token; None where all are equal.
        largest_margin: Largest margin of any row that differs; None where none has a margin.
    """

    equal: bool
    rows: int
    divergent: int
    first: Divergence | None
    largest_margin: float | None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or None when all are equal; a missing token differs."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(work: Workload, plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]) -> Equality:
    """Compare the new tokens of two ways of decoding, row by row.

    Args:
        work: The workload that both ways decoded.
        plain: New tokens of plain decoding by row; row i continues prompt i modulo the number of prompts.
        speculative: New tokens of speculative decoding, in the same order.
    """
    divergences = []
    for row, (expected, actual) in enumerate(zip(plain, speculative, strict=True)):
        index = first_difference(expected, actual)
        if index is None:
            continue
        prompt = row % len(work.prompts)
        margin = top_two = None
        if not work.temperature:
            margin, best = top_gap(work, [*work.prompts[prompt], *expected[:index]])
            top_two = {expected[index], actual[index]} == best
        divergences.append(Divergence(prompt, index, expected[index], actual[index], margin, top_two))
    margins = [divergence.margin for divergence in divergences if divergence.margin is not None]
    first = min(divergences, key=lambda divergence: divergence.token, default=None)
    return Equality(not divergences, len(plain), len(divergences), first, max(margins, default=None))


@torch.inference_mode()
def top_gap(work: Workload, text: Sequence[int]) -> tuple[float, set[int]]:
    """Return the best next token's logit minus the second best's, and the ids of both."""
    ids = torch.tensor([text], device=work.device)
    logits = work.engine.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    values, tokens = logits.topk(2)
    return float(values[0] - values[1]), set(tokens.tolist())
