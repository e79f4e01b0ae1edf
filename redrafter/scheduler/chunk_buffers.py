"""Buffers that captured steps read chunks of prompts from, beside the rows of a running batch."""

from collections.abc import Sequence

import torch

from redrafter.attention.prompt_chunks import PromptChunks
from redrafter.cache.paged import stack_block_tables
from redrafter.cache.to_device import to_device
from redrafter.kernels.token_counts import TOKENS_PER_CHUNK
from redrafter.scheduler.prefill_budget import Chunk
from redrafter.scheduler.row_adapters import slot_of
from redrafter.scheduler.sequence_blocks import tables_of
from redrafter.target.target import Target

__all__ = ["ROOMS", "ChunkBuffers", "choose_room"]

ROOMS = (4, 8, 16)  # chunks that a step has room for, of TOKENS_PER_CHUNK tokens each on average, the smallest first


def choose_room(prompts: int, tokens: int) -> int:
    """Return how many chunks a step needs room for, to read `tokens` tokens of `prompts` prompts or as many as fit."""
    return next((room for room in ROOMS if prompts <= room and tokens <= room * TOKENS_PER_CHUNK), ROOMS[-1])


class ChunkBuffers:
    """Room for chunks of prompts, where captured steps look for them."""

    def __init__(self, blocks: int, target: Target):
        """Make empty buffers for prompts that a model reads. blocks: width of the block tables."""
        self._by_room = {room: PromptChunks.room(room, blocks, target.device) for room in ROOMS}
        self._blocks, self._target = blocks, target

    def load(self, chunks: Sequence[Chunk]) -> PromptChunks:
        """Write chunks of prompts into the smallest buffers that have room for them.

        Args:
            chunks: Sequences with blocks, and how many tokens of each are read; at least one.

        Returns:
            The buffers.
        """
        room = choose_room(len(chunks), sum(count for _, count in chunks))
        buffers = self._by_room[room]
        tokens, starts, lengths, adapters, prompts = list[int](), [0], list[int](), list[int](), list[int]()
        for sequence, count in chunks:
            tokens += sequence.tokens[sequence.prefilled : sequence.prefilled + count]
            starts.append(len(tokens))
            lengths.append(sequence.prefilled)
            adapters.append(slot_of(sequence))
            prompts.append(self._target.rope_length(len(sequence.prompt), sequence.prefill_length))
        empty = room - len(chunks)
        padding, ends = [0] * (len(buffers.tokens) - len(tokens)), starts[-1:] * empty
        numbers = tokens + padding + starts + ends + lengths + adapters + prompts
        device = buffers.tokens.device
        sizes = len(buffers.tokens), room + 1, len(lengths), len(adapters), len(prompts)
        parts = to_device(numbers, device, torch.long).split(sizes)  # one copy
        written = buffers.tokens, buffers.starts, buffers.lengths, buffers.adapters, buffers.prompts
        for buffer, part in zip(written, parts, strict=True):
            buffer[: len(part)] = part
        tables = tables_of([sequence for sequence, _ in chunks])
        buffers.table[: len(tables)] = stack_block_tables(tables, device, self._blocks)
        return buffers
