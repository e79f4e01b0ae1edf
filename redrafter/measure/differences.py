"""Compare outputs with undrafted decoding: find differences and decide whether rounding explains them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.engine.call import GenerateOutput
from redrafter.engine.engine import Engine
from redrafter.sampling.noise import gumbel

# Rounding may move a logit by this many steps of the format at the largest logit. Of the 20 likeliest tokens at 9,500
# positions of SmolLM2 in bfloat16, computed in two shapes, one in a thousand moved by more than 4; the most is 7.5.
HALF_PRECISION_STEPS = 8
FLOAT32_TOLERANCE = 1e-4  # the same in float32 and float64, where rounding differs by a few 1e-5
# The largest change of a logit of 49,152, in standard deviations: of a model in float32 that rounds inside its layers.
ROUNDING_DEVIATIONS = 5
ROUNDS_INSIDE = "rounds inside its layers: outputs are as exact as in bfloat16, and near-ties may differ"
MAX_TEXTS, MAX_LINE_CHARS = 3, 60  # printed differences per method, and characters of each


@dataclass(frozen=True)
class Difference:
    """The first position where the outputs of undrafted decoding and of another method differ on one prompt."""

    prompt: int  # index of the prompt
    token: int  # index of the first new token that differs
    common: str  # the new text before that token
    undrafted: int | None  # token id of undrafted decoding there; None if its output has ended
    other: int | None  # the same of the other method
    undrafted_text: str  # from there on
    other_text: str
    # How far the lower score of both tokens is below the best one, by undrafted decoding's own logits with processors
    # and noise; None if a processor forbids one of them.
    margin: float | None = None
    tolerance: float | None = None  # how far rounding may move a logit
    near_tie: bool = False  # whether each of both tokens is drawn once its logit is raised by `tolerance`


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or None when all are equal; a missing token differs."""
    differing = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def tolerance(logits: Tensor, dtype: torch.dtype, rounding: float = 0.0) -> float:
    """Return how far rounding may move a logit of `logits`, `[V]`, in a model of this dtype.

    `rounding` is the share of their spread by which the logits of a model that rounds inside its layers change.
    """
    info, finite = torch.finfo(dtype), logits[logits.isfinite()]
    if info.bits >= 32:
        return max(FLOAT32_TOLERANCE, ROUNDING_DEVIATIONS * rounding * float(finite.std()))
    largest = float(finite.abs().max())
    return HALF_PRECISION_STEPS * info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))


def find_differences(
    engine: Engine,
    arguments: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    undrafted: Sequence[Sequence[int]],
    repeats: Sequence[Sequence[Sequence[int]]],
    decode: Callable[[list[int]], Any] = lambda tokens: "",
) -> list[Difference]:
    """Return one difference for each prompt whose output differs from undrafted decoding's.

    If repeats of a prompt differ in several places, a difference that rounding cannot explain takes precedence over a
    near-tie (`Difference.near_tie`), and then the smallest token index.

    Args:
        engine: The engine of undrafted decoding, whose logits identify near-ties.
        arguments: Arguments of `generate` for undrafted decoding; where `seed` is s, prompt i was decoded with s + i,
            and where `temperature` is a list, with its temperature i.
        prompts: Token ids of each prompt.
        undrafted: New token ids of undrafted decoding for each prompt.
        repeats: New token ids of the other method for each prompt, repeat by repeat.
        decode: Makes text of token ids.
    """
    worst, seed = [], arguments.get("seed")
    for row, (prompt, expected) in enumerate(zip(prompts, undrafted, strict=True)):
        found = []
        # A set: equal repeats need to be judged once only.
        for output in {tuple(texts[row]) for texts in repeats}:
            at = first_difference(expected, output)
            if at is None:
                continue
            common = decode(list(expected[:at]))
            a, b = (text[at] if at < len(text) else None for text in (expected, output))
            # Decode the whole text: a token decoded by itself may lose its leading space.
            mine, other = (decode(list(text))[len(common) :] for text in (expected, output))
            verdict: dict[str, Any] = {}
            if a is not None and b is not None:
                own = {**arguments, "seed": None if seed is None else seed + row}
                if isinstance(temperatures := arguments.get("temperature"), list):
                    own["temperature"] = temperatures[row]
                verdict = _judge(engine, own, [*prompt, *expected[:at]], [a, b])
            found.append(Difference(row, at, common, a, b, mine, other, **verdict))
        # One difference per prompt, first one that rounding cannot explain.
        worst += sorted(found, key=lambda difference: (difference.near_tie, difference.token))[:1]
    return worst


def _judge(engine: Engine, arguments: dict[str, Any], text: list[int], tokens: list[int]) -> dict[str, Any]:
    """Return the fields of a `Difference` from `margin` on, for two candidate tokens after a text."""

    def draw(bias: dict[int, float]) -> GenerateOutput:
        left_out = ("stop_strings", "tokenizer", "num_return_sequences")
        one = {name: value for name, value in arguments.items() if name not in left_out}
        one |= {"max_new_tokens": 1, "speculate": False, "output_logits": True, "output_scores": True}
        ids = torch.tensor([text])  # [1, P]
        # A cached prefix was computed with other shapes and may round differently.
        engine.forget_prefixes()
        out = engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **one, logit_bias=bias)
        assert isinstance(out, GenerateOutput)
        return out

    out = draw({})
    assert out.logits is not None
    assert out.scores is not None
    logits, scores = out.logits[0][0].float(), out.scores[0][0].float()  # [V]
    if arguments["do_sample"]:
        ids = torch.arange(len(scores), device=scores.device)  # [V]
        at = ([arguments["seed"]], [[len(text)]])
        seed, position = (torch.tensor(value, device=scores.device) for value in at)
        scores = scores + gumbel(seed, position, ids)[0, 0]
    margin = float(scores.max() - scores[tokens].min())
    most = tolerance(logits, engine.target.dtype, engine.target.rounding)
    # Raise each token's logit by the tolerance: if both are then drawn, rounding explains the difference.
    drawn = [int(draw({token: most}).sequences[0, -1]) for token in tokens]
    return {"margin": margin if math.isfinite(margin) else None, "tolerance": most, "near_tie": drawn == tokens}


def describe_differences(differences: Sequence[Difference], method: str) -> Iterator[str]:
    """Yield lines that show a method's first differences, near-ties last; » marks the first differing token."""
    width = max(len("undrafted"), len(method))
    for difference in sorted(differences, key=lambda difference: difference.near_tie)[:MAX_TEXTS]:
        kind = "near-tie" if difference.near_tie else "OTHER TOKENS"
        where = f"  {kind} in prompt {difference.prompt + 1} at new token {difference.token + 1}"
        margin, most = difference.margin, difference.tolerance
        if most is None:
            yield f"{where}: one text ends there"
        elif margin is None:
            yield f"{where}: a sampling parameter rules one of the two out"
        else:
            yield f"{where}: the lower is {margin:.3g} below the best; rounding explains {most:.3g}"
        mine = ("undrafted", difference.undrafted_text, difference.undrafted)
        for name, text, token in (mine, (method, difference.other_text, difference.other)):
            # JSON quoting escapes line breaks and control characters.
            parts = (difference.common[-MAX_LINE_CHARS:], text[:MAX_LINE_CHARS])
            shown = "»".join(json.dumps(part, ensure_ascii=False)[1:-1] for part in parts)
            yield f"    {name:<{width}}  {shown}  (id {'none' if token is None else token})"
    if len(differences) > MAX_TEXTS:
        yield f"  and {len(differences) - MAX_TEXTS} more, which --json FILE holds"
