"""Prefill: the forwards that read prompts into the KV cache, a chunk of several prompts at a time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.cache.paged import PagedCache, stack_block_tables
from redrafter.engine.cuda_graphs import CUDAGraphRunner
from redrafter.engine.engine import Engine
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.limits import Limits
from redrafter.scheduler.logprobs import score_prompt
from redrafter.scheduler.prefill_budget import Chunk, PrefillPace, choose_chunks, padded_tokens
from redrafter.scheduler.sequence import TokenSequence
from redrafter.step import read_prompts

__all__ = ["PrefilledRows", "Prefiller"]


@dataclass(frozen=True)
class PrefilledRows:
    """Sequences whose prompts are in the cache as a whole, and what the target gave at their last tokens.

    Attributes:
        sequences: B sequences.
        tokens: Their tokens, padded at the end, `[B, T]` int64.
        lengths: How many of these are in the cache, `[B]` int64.
        logits: `[B, V]`.
        hidden: `[B, F]`.
        window: Positions that the block tables of the forward cover.
    """

    sequences: Sequence[TokenSequence]
    tokens: Tensor
    lengths: Tensor
    logits: Tensor
    hidden: Tensor
    window: int


class Prefiller:
    """Reads the prompts of admitted sequences, as many tokens a round as its pace and the limits allow."""

    def __init__(self, engine: Engine, graphs: CUDAGraphRunner, limits: Limits):
        self._engine, self._graphs, self._limits = engine, graphs, limits
        self._padded = engine.target.device.type != "cpu"
        self.pace = PrefillPace(limits.max_num_tokens)

    def forwards(self, sequences: Sequence[TokenSequence], step_tokens: int) -> Iterator[PrefilledRows]:
        """Run the forwards of one round, and yield after each of them the rows whose prompts are complete.

        Sequences whose prompts are scored are read apart from others, which need the logits of their last tokens alone.

        Args:
            sequences: Sequences with blocks, in the order of their admission.
            step_tokens: Tokens that the round's step takes from the budget of one forward.
        """
        most = self._limits.max_num_tokens - step_tokens
        budget = max(min(most, self.pace.tokens) if self._limits.chunked else most, BLOCK_SIZE)
        kinds = [[sequence for sequence in sequences if sequence.needs_scores is scored] for scored in (False, True)]
        kinds = [kind for kind in kinds if kind]
        for kind in kinds:
            for chunks in choose_chunks(
                kind, max(budget // len(kinds), BLOCK_SIZE), self._padded, self._limits.chunked
            ):
                began = time.perf_counter()
                yield self.forward(chunks)
                if self._engine.target.device.type == "cuda":
                    torch.cuda.synchronize(self._engine.target.device)  # else only its launch is measured
                self.pace.measure(padded_tokens(chunks, self._padded), time.perf_counter() - began)

    def forward(self, chunks: Sequence[Chunk]) -> PrefilledRows:
        """Read one chunk of each of some prompts in a single forward, and return the rows that are complete now."""
        target, device = self._engine.target, self._engine.target.device
        sequences = [sequence for sequence, _ in chunks]
        width = max(sequence.prefilled + count for sequence, count in chunks) + 1
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)  # [B, T]
        for row, (sequence, count) in enumerate(chunks):
            tokens[row, : sequence.prefilled + count] = torch.tensor(sequence.tokens[: sequence.prefilled + count])
        start = torch.tensor([sequence.prefilled for sequence in sequences], device=device)  # [B]
        upto = start + torch.tensor([count for _, count in chunks], device=device)  # [B]
        tables = [sequence.block_table for sequence in sequences if sequence.block_table is not None]
        cache, tokens = PagedCache(self._graphs.store, stack_block_tables(tables, device)), tokens.to(device)
        draft_store = self._graphs.draft_store

        def show(row: int, first: int, logits: Tensor) -> None:
            sequence, count = sequences[row], sequences[row].params.prompt_logprobs
            assert count is not None
            following = list(sequence.prompt[first + 1 : first + 1 + len(logits)])
            sequence.prompt_scores.extend(score_prompt(logits, following, count))

        logits, hidden = read_prompts(
            tokens,
            upto,
            target,
            cache,
            start=start,
            new=max(count for _, count in chunks),
            draft_model=self._engine.draft_model,
            draft_cache=None if draft_store is None else PagedCache(draft_store, cache.table),
            show=show if sequences[0].needs_scores else None,
        )
        for sequence, count in chunks:
            sequence.prefilled += count
        done = [row for row, sequence in enumerate(sequences) if sequence.prefilled == sequence.prefill_length]
        complete = [sequences[row] for row in done]
        return PrefilledRows(complete, tokens[done], upto[done], logits[done], hidden[done], cache.window)
