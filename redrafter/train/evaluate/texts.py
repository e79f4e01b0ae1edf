"""Texts that a base writes itself, under seeds that are known: what drafting is judged along."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.engine.outputs import GenerateOutput
from redrafter.engine.stopping import end_tokens
from redrafter.measure.workload import padded
from redrafter.target.target import Target

__all__ = ["Texts", "repeated", "written"]

ROWS = 32  # texts written at once
# What a generation config may ask for beside a temperature, left off: a measurement is of the model's own distribution.
_NEUTRAL = {"repetition_penalty": 1.0}
_NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Texts:
    """What a base wrote from some prompts.

    tokens: each text, its prompt included. starts: the prompts' lengths. ended: which texts an end token ended.
    temperature: 0 for greedy. seeds: of each text; None for greedy.
    """

    tokens: list[list[int]]
    starts: list[int]
    ended: list[bool]
    temperature: float = 0.0
    seeds: list[int] | None = None

    @property
    def own(self) -> list[list[int]]:
        """What the base wrote, without the prompts."""
        return [text[start:] for text, start in zip(self.tokens, self.starts, strict=True)]


def written(
    target: Target,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    ends: Collection[int] | None = None,
    rows: int = ROWS,
    options: EngineOptions | None = None,
    report: Callable[[int], object] = lambda done: None,
) -> Texts:
    """Let the base write on from each prompt, by plain decoding, at a temperature and under no other setting.

    Prompt i is written on under seed + i. ends: ids that end a text, the generation config's when None. rows: prompts
    decoded at once. report: told after each batch how many are done.
    """
    engine, ends = Engine(target, PlainProposer(), options), sorted(end_tokens(target.model) if ends is None else ends)
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    for first in range(0, len(order), rows):
        some = order[first : first + rows]
        ids, mask = padded([prompts[index] for index in some], pad_token=0)  # [B, P]
        seeds = [seed + index for index in some] if temperature > 0 else None
        out = engine.generate(
            ids, mask, max_new_tokens=new_tokens, seed=seeds, return_dict_in_generate=True, **settings
        )
        assert isinstance(out, GenerateOutput)
        assert out.stats is not None
        new = out.sequences[:, ids.shape[1] :].tolist()
        for index, text, row in zip(some, new, out.stats.rows, strict=True):
            tokens[index] += text[: 1 + row.emitted]  # the prefill's token is not counted as a step's
        report(first + len(some))
    every = list(range(seed, seed + len(prompts))) if temperature > 0 else None
    return Texts(tokens, list(map(len, prompts)), [text[-1] in ends for text in tokens], temperature, every)


def repeated(texts: Sequence[list[int]], size: int) -> float | None:
    """The share of runs of `size` tokens that occurred before in their own text; None where there is no such run."""
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(each)) for each in runs)) / count if count else None
