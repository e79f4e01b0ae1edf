"""What is decoded, and one timed call of `generate` on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase

from redrafter.drafting.proposer import Proposer
from redrafter.engine.recurrent import ReDrafter
from redrafter.errors import ArgumentError
from redrafter.measure.run import FirstTokenTimer, StreamedRun, timed_run
from redrafter.measure.stopwatch import Stopwatch

__all__ = ["Workload", "padded"]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how they are written on from. Every row writes `max_new_tokens`: no token ends a text.

    num_prompts: rows that a batch size is measured on, at least; row i starts from prompt i, over and over.
    """

    engine: ReDrafter
    prompts: Sequence[Sequence[int]]
    pad_token: int
    num_prompts: int
    max_new_tokens: int
    temperature: float
    seed: int

    @classmethod
    def of(cls, engine: ReDrafter, tokenizer: PreTrainedTokenizerBase, **rest: Any) -> "Workload":
        """From now on the model has no end of text and no sampling habits of its own, however it is asked to write."""
        known = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
        work = cls(engine, pad_token=next(known), **rest)
        engine.model.generation_config = GenerationConfig(pad_token_id=work.pad_token)
        longest = max(map(len, work.prompts)) + work.max_new_tokens
        limit, prompt = engine.options.max_input_len, max(map(len, work.prompts))
        if limit is not None and prompt > limit:
            raise ArgumentError(f"the longest prompt has {prompt} tokens, and --max-input-len is {limit}: raise it")
        for what, most in (("context", engine.target.context), ("max_seq_len", engine.options.max_seq_len)):
            if most is not None and longest > most:
                raise ArgumentError(
                    f"the longest prompt with --max-new-tokens {work.max_new_tokens} comes to {longest} tokens, and "
                    f"the {what} is {most}: lower it, or give shorter prompts"
                )
        return work

    @property
    def device(self) -> torch.device:
        return self.engine.target.device

    def proposer(self, rows: int, speculate: bool) -> Proposer:
        """What the engine decodes so many rows with."""
        return self.engine.proposer_for(rows) if speculate else self.engine.plain

    def batches(self, rows: int) -> list[list[Sequence[int]]]:
        """Prompts in batches of `rows`."""
        count = -(-max(self.num_prompts, rows) // rows)
        return [[self.prompts[(i * rows + j) % len(self.prompts)] for j in range(rows)] for i in range(count)]

    def arguments(self) -> dict[str, Any]:
        """Hugging Face's names."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}  # transformers would cut to 50
        return {"max_new_tokens": self.max_new_tokens} | (sampling if self.temperature else {"do_sample": False})

    def run(self, batch: Sequence[Sequence[int]], speculate: bool, *, seed: int = 0) -> StreamedRun:
        """Decode a batch from nothing: keys and values of earlier runs are not reused. seed: added to our own."""
        ids, mask = padded(batch, self.pad_token)
        self.engine.forget_prefixes()
        watch = Stopwatch(self.device)
        timer = FirstTokenTimer(watch)
        run = timed_run(
            self.engine,
            ids,
            mask,
            watch,
            streamer=timer,
            seed=self.seed + seed,
            speculate=speculate,
            **self.arguments(),
        )
        assert timer.seconds is not None
        assert all(len(row) == self.max_new_tokens for row in run.tokens), "a row ended early"
        return StreamedRun(run.tokens, run.stats, run.seconds, timer.seconds)


def padded(batch: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, P]`, padded on the left."""
    rows = [torch.tensor(row, dtype=torch.long) for row in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")
