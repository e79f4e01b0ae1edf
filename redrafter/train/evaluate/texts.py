"""Texts that a base writes under known seeds, along which drafting is measured."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.call import GenerateOutput
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.measure.run import padded
from redrafter.target.target import Target

__all__ = ["Texts", "repeated_share", "write_texts"]

DEFAULT_BATCH_SIZE = 32  # texts written at once
# What a generation config may ask for beside a temperature, left off: a measurement is of the model's own distribution.
_NEUTRAL = {"repetition_penalty": 1.0}
_NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Texts:
    """Texts that a base wrote from some prompts.

    Attributes:
        tokens: Token ids of each text, its prompt included.
        prompt_lengths: Tokens of each prompt.
        ended: Whether an end token ended each text.
        temperature: Temperature that they were written at; 0 for greedy.
        seeds: Seed of each text; None for greedy.
    """

    tokens: list[list[int]]
    prompt_lengths: list[int]
    ended: list[bool]
    temperature: float = 0.0
    seeds: list[int] | None = None

    @property
    def continuations(self) -> list[list[int]]:
        """What the base wrote, without the prompts."""
        return [text[length:] for text, length in zip(self.tokens, self.prompt_lengths, strict=True)]


def write_texts(
    target: Target,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    end_ids: Collection[int] | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: EngineOptions | None = None,
    report: Callable[[int], object] = lambda done: None,
) -> Texts:
    """Let the base continue each prompt by plain decoding, at a temperature and under no other setting.

    Args:
        target: The base.
        prompts: Token ids of each prompt.
        new_tokens: Tokens written after each prompt, at most.
        temperature: Temperature; 0 for greedy.
        seed: Prompt i is continued under `seed + i`.
        end_ids: Ids that end a text; those of the generation config when None.
        batch_size: Prompts decoded at once.
        options: Options of the engine.
        report: Called after each batch with the number of texts that are done.
    """
    engine = Engine(target, PlainProposer(), options)
    ends = sorted(end_tokens(target.model) if end_ids is None else end_ids)
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        ids, mask = padded([prompts[index] for index in indices], pad_token=0)  # [B, P]
        seeds = [seed + index for index in indices] if temperature > 0 else None
        out = engine.generate(
            ids, mask, max_new_tokens=new_tokens, seed=seeds, return_dict_in_generate=True, **settings
        )
        assert isinstance(out, GenerateOutput)
        assert out.stats is not None
        new = out.sequences[:, ids.shape[1] :].tolist()
        for index, text, row in zip(indices, new, out.stats.rows, strict=True):
            tokens[index] += text[: 1 + row.emitted]  # the prefill's token is not counted as a step's
        report(first + len(indices))
    all_seeds = list(range(seed, seed + len(prompts))) if temperature > 0 else None
    return Texts(tokens, list(map(len, prompts)), [text[-1] in ends for text in tokens], temperature, all_seeds)


def repeated_share(texts: Sequence[list[int]], size: int) -> float | None:
    """Return the share of n-grams that repeat an earlier n-gram of the same text.

    Args:
        texts: Token ids of each text.
        size: Length n of the n-grams, in tokens. They overlap: one begins at every token.

    Returns:
        Repeats in all texts, divided by n-grams in all texts, from 0 to 1; None if every text is shorter than `size`.
    """
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(text_runs)) for text_runs in runs)) / count if count else None
