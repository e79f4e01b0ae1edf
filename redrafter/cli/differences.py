"""Differences between the outputs of a drafting method and of plain decoding, and whether each is a near-tie."""

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

__all__ = ["Difference", "describe_differences", "find_differences", "tolerance"]

HALF_PRECISION_STEPS = 4  # rounding may move a logit by this many steps of the format at the largest logit
FLOAT32_TOLERANCE = 1e-4  # the same in float32 and float64, where rounding differs by a few 1e-5
MAX_TEXTS, MAX_LINE_CHARS = 3, 60  # of the differences that are printed for a method


@dataclass(frozen=True)
class Difference:
    """The first place where the outputs of plain decoding and of another method differ on one prompt.

    Attributes:
        prompt: Index of the prompt.
        token: Index of the first new token that differs.
        common: The new text before that token.
        plain: Token id of plain decoding there; None if its output has ended.
        other: Token id of the other method there; None if its output has ended.
        plain_text: Text of plain decoding from there on.
        other_text: Text of the other method from there on.
        margin: How far the lower score of both tokens is below the best score, by plain decoding's own logits with
            logits processors and noise; None if a processor forbids one of them.
        tolerance: The most that rounding is taken to move a logit.
        near_tie: Whether each of both tokens is drawn once its logit is raised by `tolerance`.
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
    """Return the most that rounding is taken to move a logit.

    Args:
        logits: Logits of one position, `[V]`.
        dtype: Number format of the model that computed them.
    """
    info = torch.finfo(dtype)
    if info.bits >= 32:
        return FLOAT32_TOLERANCE
    largest = float(logits[logits.isfinite()].abs().max())
    return HALF_PRECISION_STEPS * info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))


def find_differences(
    pair: Pair,
    generation: GenerationOptions,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[list[int]],
    repeats: Sequence[Sequence[list[int]]],
) -> list[Difference]:
    """Return one difference for each prompt that plain decoding and another method continue differently.

    The repeats of a prompt may differ from plain decoding in several ways. A difference that rounding cannot explain is
    chosen before a near-tie, which it can (`Difference.near_tie`). Of several of the same kind, the one at the smallest
    token index is chosen.

    Args:
        pair: The model, tokenizer and engine for plain decoding, whose logits tell near-ties.
        generation: Options of plain decoding; prompt i was decoded with the seed `generation.seed + i`.
        prompts: Token ids of each prompt.
        plain: New token ids of plain decoding for each prompt.
        repeats: New token ids of the other method for each prompt, repeat by repeat.

    Returns:
        The chosen differences in the order of the prompts. Prompts whose outputs are all equal have none.
    """
    worst = []
    for row, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        seeded = replace(generation, seed=None if generation.seed is None else generation.seed + row)
        outputs = {tuple(texts[row]) for texts in repeats}
        compared = [_first_difference(pair, seeded, prompt, row, expected, list(output)) for output in outputs]
        differences = [difference for difference in compared if difference is not None]
        worst += sorted(differences, key=lambda difference: (difference.near_tie, difference.token))[:1]
    return worst


def _first_difference(
    pair: Pair, generation: GenerationOptions, prompt: Sequence[int], row: int, plain: list[int], other: list[int]
) -> Difference | None:
    """Return where two outputs for a prompt differ first, or None if they are equal."""
    pairs = zip(plain, other, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    if at == len(plain) == len(other):
        return None
    plain_id, other_id = (output[at] if at < len(output) else None for output in (plain, other))
    margin, most, near_tie = None, None, False
    if plain_id is not None and other_id is not None:
        margin, most, near_tie = _judge(pair, generation, [*prompt, *plain[:at]], [plain_id, other_id])

    def decode(tokens: list[int]) -> str:
        return str(pair.tokenizer.decode(tokens))

    common = decode(plain[:at])
    # Decoded as a whole: a token by itself may lose its space.
    return Difference(
        prompt=row,
        token=at,
        common=common,
        plain=plain_id,
        other=other_id,
        plain_text=decode(plain)[len(common) :],
        other_text=decode(other)[len(common) :],
        margin=margin,
        tolerance=most,
        near_tie=near_tie,
    )


def _judge(
    pair: Pair, generation: GenerationOptions, text: list[int], tokens: list[int]
) -> tuple[float | None, float, bool]:
    """Return the margin, the tolerance and whether it is a near-tie, for two tokens that may follow a text."""
    out = _draw(pair, generation, text, {})
    assert out.logits is not None
    assert out.scores is not None
    logits, scores = out.logits[0][0].float(), out.scores[0][0].float()  # [V]
    if generation.sampling:
        assert generation.seed is not None
        ids = torch.arange(len(scores), device=scores.device)  # [V]
        seed, position = (torch.tensor(value, device=scores.device) for value in ([generation.seed], [[len(text)]]))
        scores = scores + gumbel(seed, position, ids)[0, 0]
    margin = float(scores.max() - scores[tokens].min())
    most = tolerance(logits, pair.engine.target.dtype)
    drawn = [int(_draw(pair, generation, text, {token: most}).sequences[0, -1]) for token in tokens]
    return margin if math.isfinite(margin) else None, most, drawn == tokens


def _draw(pair: Pair, generation: GenerationOptions, text: list[int], bias: dict[int, float]) -> GenerateOutput:
    """Draw the token after a text by plain decoding, with `bias` added to the logits of these ids."""
    one_token = replace(generation, max_new_tokens=1, stop=(), speculate=False)
    ids = torch.tensor([text])  # [1, P]
    pair.engine.forget_prefixes()
    arguments = pair.arguments(one_token) | {"output_logits": True, "output_scores": True, "logit_bias": bias}
    out = pair.engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **arguments)
    assert isinstance(out, GenerateOutput)
    return out


def describe_differences(differences: Sequence[Difference], method: str) -> Iterator[str]:
    """Yield lines that show the first differences of a method, near-ties last."""
    for difference in sorted(differences, key=lambda difference: difference.near_tie)[:MAX_TEXTS]:
        yield from _side_by_side(difference, method)
    if len(differences) > MAX_TEXTS:
        yield f"  and {len(differences) - MAX_TEXTS} more, which the JSON document holds"


def _side_by_side(difference: Difference, method: str) -> Iterator[str]:
    """Yield a headline and both texts, with » where they differ first."""
    kind = "near-tie" if difference.near_tie else "OTHER TOKENS"
    where = f"  {kind} in prompt {difference.prompt + 1} at new token {difference.token + 1}"
    if difference.tolerance is None:
        yield f"{where}: one text ends there"
    elif difference.margin is None:
        yield f"{where}: a sampling parameter rules one of the two out"
    else:
        margin, most = difference.margin, difference.tolerance
        yield f"{where}: the lower is {margin:.3g} below the best; rounding explains {most:.3g}"
    width = max(len("plain"), len(method))
    common = _on_one_line(difference.common[-MAX_LINE_CHARS:])
    for name, text, token in (
        ("plain", difference.plain_text, difference.plain),
        (method, difference.other_text, difference.other),
    ):
        rest = _on_one_line(text[:MAX_LINE_CHARS])
        yield f"    {name:<{width}}  {common}»{rest}  (id {'none' if token is None else token})"


def _on_one_line(text: str) -> str:
    """Return a text with line breaks and control characters escaped."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
