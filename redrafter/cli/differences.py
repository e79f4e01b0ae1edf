"""Where a way of drafting wrote another text than plain decoding, and whether the logits were a near-tie there."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.app.loading import Pair
from redrafter.app.options import GenerationOptions
from redrafter.engine.outputs import GenerateOutput
from redrafter.sampling.noise import gumbel

__all__ = ["Difference", "find_differences", "parting", "tolerance"]

STEPS = 4  # of a half-precision format at the largest logit, within which its rounding may decide
FLOAT32 = 1e-4  # the same in float32 and beyond, where rounding differs by a few 1e-5
TEXTS, WIDTH = 3, 60  # printed of a way that parts: so many texts, and characters of each on a line


@dataclass(frozen=True)
class Difference:
    """One prompt's texts, plain decoding's and another way's, and the place where they part.

    prompt, token: index of the prompt, and of the first new token that differs. common: the new text before it. plain,
    other: the ids there, None where a text has ended; plain_text, other_text: what each goes on with. margin: how far
    the lower of both tokens is below the best one, processors and noise included, by plain decoding's own logits; None
    where a processor rules one out. tolerance: the most that rounding is taken to move a logit. near_tie: whether each
    of both tokens is drawn once its logit is raised by that.
    """

    prompt: int
    token: int
    common: str
    plain: int | None
    other: int | None
    plain_text: str
    other_text: str
    margin: float | None
    tolerance: float | None
    near_tie: bool


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """Return the most that rounding is taken to move one of the logits `[V]` of a model in `dtype`."""
    info = torch.finfo(dtype)
    if info.bits >= 32:
        return FLOAT32
    largest = float(logits[logits.isfinite()].abs().max())
    return STEPS * info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))


def find_differences(
    pair: Pair,
    writing: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[list[int]],
    repeats: Sequence[Sequence[list[int]]],
) -> list[Difference]:
    """Return, of each prompt whose texts part, the worst place: a true difference before a near-tie, then the earliest.

    pair, writing: of plain decoding; prompt i was written on under its seed + i. plain: new tokens of each prompt;
    repeats: the same of another way, run by run.
    """
    worst = []
    for row, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        own = replace(writing, seed=None if writing.seed is None else writing.seed + row)
        texts = {tuple(found[row]) for found in repeats}
        judged = [_difference(pair, own, prompt, row, expected, list(text)) for text in texts]
        found = [each for each in judged if each is not None]
        worst += sorted(found, key=lambda each: (each.near_tie, each.token))[:1]
    return worst


def _difference(
    pair: Pair, writing: GenerationOptions, prompt: Sequence[int], number: int, plain: list[int], other: list[int]
) -> Difference | None:
    """Return where two texts on a prompt part, or None when they are equal. number: the prompt's index."""
    pairs = zip(plain, other, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    if at == len(plain) == len(other):
        return None
    mine, theirs = (text[at] if at < len(text) else None for text in (plain, other))
    margin, most, near = None, None, False
    if mine is not None and theirs is not None:
        margin, most, near = _judge(pair, writing, [*prompt, *plain[:at]], [mine, theirs])

    def decoded(tokens: list[int]) -> str:
        return str(pair.tokenizer.decode(tokens))

    common = decoded(plain[:at])
    # Decoded as a whole: a token by itself may lose its space.
    return Difference(
        prompt=number,
        token=at,
        common=common,
        plain=mine,
        other=theirs,
        plain_text=decoded(plain)[len(common) :],
        other_text=decoded(other)[len(common) :],
        margin=margin,
        tolerance=most,
        near_tie=near,
    )


def _judge(
    pair: Pair, writing: GenerationOptions, text: list[int], tokens: list[int]
) -> tuple[float | None, float, bool]:
    """Margin, tolerance, and whether it is a near-tie, between two tokens after a text."""
    told = _draw(pair, writing, text, {})
    assert told.logits is not None and told.scores is not None
    logits, scores = told.logits[0][0].float(), told.scores[0][0].float()  # [V]
    if writing.sampling:
        assert writing.seed is not None
        ids = torch.arange(len(scores), device=scores.device)
        seed, position = (torch.tensor(value, device=scores.device) for value in ([writing.seed], [[len(text)]]))
        scores = scores + gumbel(seed, position, ids)[0, 0]
    margin = float(scores.max() - scores[tokens].min())
    most = tolerance(logits, pair.engine.target.dtype)
    drawn = [int(_draw(pair, writing, text, {token: most}).sequences[0, -1]) for token in tokens]
    return margin if math.isfinite(margin) else None, most, drawn == tokens


def _draw(pair: Pair, writing: GenerationOptions, text: list[int], bias: dict[int, float]) -> GenerateOutput:
    """Draw the token after a text by plain decoding. bias: what is added to logits, by id."""
    one = replace(writing, max_new_tokens=1, stop=(), speculate=False)
    ids = torch.tensor([text])
    pair.engine.forget_prefixes()
    arguments = pair.arguments(one) | {"output_logits": True, "output_scores": True, "logit_bias": bias}
    out = pair.engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **arguments)
    assert isinstance(out, GenerateOutput)
    return out


def parting(found: Sequence[Difference], way: str) -> Iterator[str]:
    """Yield lines for a person: the first texts that part, true differences before near-ties."""
    for each in sorted(found, key=lambda each: each.near_tie)[:TEXTS]:
        yield from _side_by_side(each, way)
    if len(found) > TEXTS:
        yield f"  and {len(found) - TEXTS} more, which the JSON document holds"


def _side_by_side(found: Difference, way: str) -> Iterator[str]:
    """Yield both texts, the place where they part marked with »."""
    kind = "near-tie" if found.near_tie else "OTHER TOKENS"
    where = f"  {kind} in prompt {found.prompt + 1} at new token {found.token + 1}"
    if found.tolerance is None:
        yield f"{where}: one text ends there"
    elif found.margin is None:
        yield f"{where}: a sampling parameter rules one of the two out"
    else:
        yield f"{where}: the lower is {found.margin:.3g} below the best; rounding explains {found.tolerance:.3g}"
    wide = max(len("plain"), len(way))
    begun = json.dumps(found.common[-WIDTH:], ensure_ascii=False)[1:-1]
    for name, text, token in (("plain", found.plain_text, found.plain), (way, found.other_text, found.other)):
        shown = json.dumps(text[:WIDTH], ensure_ascii=False)[1:-1]
        yield f"    {name:<{wide}}  {begun}»{shown}  (id {'none' if token is None else token})"
