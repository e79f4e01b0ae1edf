"""The workload of a benchmark: an engine, the prompts that it continues, and how many tokens it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase

from redrafter.drafting.proposer import Proposer
from redrafter.engine.recurrent import ReDrafter
from redrafter.errors import ArgumentError
from redrafter.measure.run import FirstTokenTimer, Run, StreamedRun, timed_run
from redrafter.measure.stopwatch import Stopwatch

__all__ = ["Workload", "padded"]

Streamer = TypeVar("Streamer")


@dataclass(frozen=True)
class Workload:
    """Prompts, and how an engine continues them. Every row writes `max_new_tokens` tokens: none ends a text.

    Attributes:
        engine: The engine to measure.
        prompts: Token ids of each prompt.
        pad_token: Id that pads prompts of a batch to one length.
        num_prompts: Fewest rows that a batch size is measured on; row i continues prompt i, modulo their number.
        max_new_tokens: Tokens that each row writes.
        temperature: 0 for greedy decoding.
        seed: Seed of the first row's draws.
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
        """Return a workload, after replacing the model's generation config by one without end tokens or sampling.

        Args:
            engine: The engine to measure.
            tokenizer: Its tokenizer, whose padding or end token pads prompts.
            rest: The other attributes of a workload.

        Raises:
            ArgumentError: The longest prompt with its new tokens exceeds the context or a limit of the engine.
        """
        pad_tokens = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
        work = cls(engine, pad_token=next(pad_tokens), **rest)
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
        """The target's device."""
        return self.engine.target.device

    def proposer(self, rows: int, speculate: bool) -> Proposer:
        """Return the proposer that the engine decodes a batch of `rows` rows with."""
        return self.engine.proposer_for(rows) if speculate else self.engine.plain

    def batches(self, rows: int) -> list[list[Sequence[int]]]:
        """Return the prompts in batches of `rows` rows, repeated until there are `num_prompts` rows."""
        count = -(-max(self.num_prompts, rows) // rows)
        return [[self.prompts[(i * rows + j) % len(self.prompts)] for j in range(rows)] for i in range(count)]

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `generate`, under Hugging Face's names."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}  # transformers would cut to 50
        return {"max_new_tokens": self.max_new_tokens} | (sampling if self.temperature else {"do_sample": False})

    def run(self, batch: Sequence[Sequence[int]], speculate: bool, *, seed: int = 0) -> StreamedRun:
        """Decode a batch once, timed, without reusing keys and values of earlier runs.

        Args:
            batch: Token ids of each row's prompt.
            speculate: Whether to draft; else it is plain decoding.
            seed: A number added to the workload's seed.
        """
        run, timer = self.streamed(batch, speculate, FirstTokenTimer, seed=seed)
        assert timer.seconds is not None
        assert all(len(row) == self.max_new_tokens for row in run.tokens), "a row ended early"
        return StreamedRun(run.tokens, run.stats, run.seconds, timer.seconds)

    def streamed(
        self,
        batch: Sequence[Sequence[int]],
        speculate: bool,
        make_streamer: Callable[[Stopwatch], Streamer],
        *,
        seed: int = 0,
    ) -> tuple[Run, Streamer]:
        """Decode a batch once, timed, with a streamer, without reusing keys and values of earlier runs.

        Args:
            batch: Token ids of each row's prompt.
            speculate: Whether to draft; else it is plain decoding.
            make_streamer: Makes the streamer from the stopwatch that times the call.
            seed: A number added to the workload's seed.
        """
        ids, mask = padded(batch, self.pad_token)
        self.engine.forget_prefixes()
        watch = Stopwatch(self.device)
        streamer = make_streamer(watch)
        run = timed_run(
            self.engine,
            ids,
            mask,
            watch,
            streamer=streamer,
            seed=self.seed + seed,
            speculate=speculate,
            **self.arguments(),
        )
        return run, streamer


def padded(batch: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the attention mask of prompts, `[B, P]` int64 each, padded on the left with `pad_token`."""
    rows = [torch.tensor(row, dtype=torch.long) for row in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side="left")
