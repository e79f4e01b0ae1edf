"""Chunks of prompts that a forward over token trees reads beside the trees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.token_counts import TOKENS_PER_CHUNK

__all__ = ["ChunkEnds", "PromptChunks"]


@dataclass(frozen=True)
class PromptChunks:
    """Room for P chunks of P prompts, one behind the other, of at most `P * TOKENS_PER_CHUNK` tokens together.

    All shapes follow from P and the width of the block tables, so that a forward can be captured before it is known
    what it will read.

    Attributes:
        tokens: Token ids of all chunks, `[P * TOKENS_PER_CHUNK]` int64; those past the last chunk are padding.
        starts: Index in `tokens` of the first token of each chunk and, last, of the padding, `[P + 1]` int64.
        lengths: Tokens of each prompt that the cache holds already, `[P]` int64.
        table: Blocks of each prompt in order of position, `[P, M]` int32; 0 where it has fewer.
        adapters: Slot of each prompt's adapter, 0 for none, `[P]` int64.
        prompts: Length of text whose rope each prompt's tokens have at least, `[P]` int64.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor
    adapters: Tensor
    prompts: Tensor

    @classmethod
    def room(cls, count: int, blocks: int, device: torch.device) -> "PromptChunks":
        """Return empty room for `count` chunks.

        Args:
            count: P.
            blocks: M, the width of the block tables.
            device: Where the tensors are.
        """
        with device:
            tokens, starts = torch.zeros(count * TOKENS_PER_CHUNK, dtype=torch.long), torch.zeros(count + 1).long()
            table = torch.zeros(count, blocks, dtype=torch.int32)
            return cls(tokens, starts, starts[:-1].clone(), table, starts[:-1].clone(), starts[:-1].clone())

    @property
    def count(self) -> int:
        """P, how many chunks there is room for."""
        return len(self.lengths)

    @property
    def last(self) -> Tensor:
        """Index in `tokens` of the last token of each chunk, `[P]` int64; of any token where a chunk is empty."""
        return (self.starts[1:] - 1).clamp(min=0)

    def positions(self) -> Tensor:
        """Return the position of each token in its prompt, `[P * TOKENS_PER_CHUNK]` int64; padding counts from 0."""
        return self._placed()[1]

    def slots(self) -> Tensor:
        """Return the slot of each token in the pools, `[P * TOKENS_PER_CHUNK]` int64; padding is in block 0."""
        chunk, position = self._placed()
        table = torch.cat([self.table, torch.zeros_like(self.table[:1])])  # [P + 1, M]
        block = (position // BLOCK_SIZE).clamp(max=table.shape[1] - 1)
        return table[chunk, block].long() * BLOCK_SIZE + position % BLOCK_SIZE

    def token_adapters(self) -> Tensor:
        """Return the slot of each token's adapter, `[P * TOKENS_PER_CHUNK]` int64; padding has none."""
        return torch.cat([self.adapters, torch.zeros_like(self.adapters[:1])])[self._placed()[0]]

    def token_prompts(self) -> Tensor:
        """Return the length of text whose rope each token has at least, `[P * TOKENS_PER_CHUNK]` int64."""
        return torch.cat([self.prompts, torch.zeros_like(self.prompts[:1])])[self._placed()[0]]

    def _placed(self) -> tuple[Tensor, Tensor]:
        """Return the chunk of each token, P for padding, and its position in that chunk's prompt, `[T]` int64 each."""
        index = torch.arange(len(self.tokens), device=self.tokens.device)
        chunk = torch.searchsorted(self.starts[1:], index, right=True)
        before = torch.cat([self.lengths, self.lengths.new_zeros(1)]) - self.starts  # [P + 1]
        return chunk, before[chunk] + index


@dataclass(frozen=True)
class ChunkEnds:
    """Holds the results of a forward at the last token of each of P chunks; at any token where a chunk is empty.

    Attributes:
        logits: The target's logits, `[P, V]`.
        hidden: Its hidden states that a drafter reads, `[P, F]`.
    """

    logits: Tensor
    hidden: Tensor
