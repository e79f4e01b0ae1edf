"""Reading prompts into a cache, in forwards of a bounded number of tokens."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from redrafter.attention.prompt_attention import Piece, cut_prompts
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import PagedCache
from redrafter.cache.to_device import to_device
from redrafter.features import ROPE_BY_LENGTH
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.model.tree_forward import TreeForward
from redrafter.model.varlen_forward import VarlenForward
from redrafter.tree.token_tree import chain

MAX_FORWARD_TOKENS = 8192  # total of all rows; bounds a forward's memory in addition to the cache
MAX_CHUNK_TOKENS = 512  # of each row, in a forward whose masks cover the whole cache
MAX_MASK_NUMBERS = 1 << 24  # total of all rows, in a forward whose masks cover only its own tokens
MAX_SHOWN_LOGITS = 1 << 25  # numbers in one forward that shows all its logits: 128 MiB in float32

ShowLogits: TypeAlias = Callable[[int, int, Tensor], object]
"""Called with a row, a position in it, and the logits `[n, V]` of the n tokens from this position on."""


class PromptReader:
    """Reads prompts into a cache, with or without masks.

    On a CPU, if attention can be replaced, prompts of unequal length are read as one sequence of pieces without a mask:
    two to five times as fast as in chunks if they are long or uneven. Any model on any device can read them in padded
    chunks, each row a chain of tokens with its mask; on a dense cache these are padded to the longest.

    Attributes:
        masks: Read later prompts in chunks with masks, on any cache.
        masks_on_dense: The same for dense caches only.
    """

    def __init__(self, padded: TreeForward, varlen: VarlenForward):
        """Make the reader of a model whose layers are known."""
        bound = varlen.bound
        self._padded, self._varlen, self._vocab_size = padded, varlen, bound.vocab_size
        self.masks = bound.device.type != "cpu" or not bound.traits.kinds.by_layer
        self.masks_on_dense = True

    def forward_on(self, cache: KVCache) -> TreeForward:
        """Return the model's forward over trees on this cache."""
        return self._varlen if isinstance(cache, PagedCache) else self._padded

    def reads_without_masks(self, cache: KVCache) -> bool:
        """Return whether prompts are read into this cache in pieces, without masks."""
        return not self.masks and (isinstance(cache, PagedCache) or not self.masks_on_dense)

    def read_prompts(
        self, prompts: Prompts, *, max_tokens: int | None = None, show: ShowLogits | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read prompts into a cache, with the arguments and results of `Target.prefill`."""
        max_tokens = max_tokens or MAX_FORWARD_TOKENS
        if show is not None:
            # The logits of all tokens take far more memory than the tokens, so they are shown in parts.
            max_tokens = min(max_tokens, max(MAX_SHOWN_LOGITS // self._vocab_size, 1))
        read = self._read_pieces if self.reads_without_masks(prompts.cache) else self._read_chunks
        return read(prompts, max_tokens, show)

    def _read_pieces(self, prompts: Prompts, max_tokens: int, show: ShowLogits | None) -> tuple[Tensor, Tensor]:
        """Read prompts on a CPU: in pieces, one after the other."""
        last: dict[int, tuple[Tensor, Tensor]] = {}
        for pieces in cut_prompts(prompts.starts, prompts.ends, max_tokens):
            logits, hidden = self._varlen.read_pieces(pieces, prompts, all_tokens=show is not None)
            if show is not None:
                counts = [piece.count for piece in pieces]
                for piece, its_logits in zip(pieces, logits.split(counts), strict=True):
                    show(piece.row, piece.first, its_logits)
                ends = torch.tensor(counts).cumsum(0) - 1
                logits, hidden = logits[ends], hidden[ends]
            rows = [piece.row for piece in pieces]
            last |= dict(zip(rows, zip(logits, hidden, strict=True), strict=True))
        # A row may be in several forwards; its last one has its last token.
        logits_of_rows, hidden_of_rows = zip(*(last[row] for row in range(len(prompts.tokens))), strict=True)
        return torch.stack(logits_of_rows), torch.stack(hidden_of_rows)

    def _read_chunks(self, prompts: Prompts, max_tokens: int, show: ShowLogits | None) -> tuple[Tensor, Tensor]:
        """Read prompts with any model on any device: in chunks side by side, each a chain with its mask."""
        cache, length, device = prompts.cache, prompts.upto, prompts.tokens.device
        start = to_device(prompts.starts, device, torch.long)
        forward = self.forward_on(cache)
        rows, width = prompts.tokens.shape
        counts = [end - first for first, end in zip(prompts.starts, prompts.ends, strict=True)]
        paged, chunk = isinstance(cache, PagedCache), MAX_CHUNK_TOKENS
        if paged:
            # Masks of a paged cache cover only a chunk's own tokens, so they grow with the square of the chunk.
            chunk = max(chunk, math.isqrt(MAX_MASK_NUMBERS // rows))
        # A prompt that fits is one forward even past the chunk size: chunks only bound the memory.
        if not (paged and sum(counts) <= max_tokens):
            chunk = max(min(chunk, max_tokens // rows), 1)
        inputs = {ROPE_BY_LENGTH: length, **prompts.inputs}
        logits = hidden = None
        for offset in range(0, max(counts), chunk):
            sizes = [min(max(count - offset, 0), chunk) for count in counts]
            size = max(sizes)
            spans = ((first + offset, count) for first, count in zip(prompts.starts, sizes, strict=True))
            pieces = [Piece(row, first, first + count) for row, (first, count) in enumerate(spans) if count]
            read = start + offset  # [B]
            positions = read[:, None] + torch.arange(size, device=device)  # [B, size]
            # A row with no tokens left repeats its last one: an arbitrary token might give a NaN.
            tokens = chain(prompts.tokens.gather(1, positions.minimum(length[:, None] - 1).clamp(0, width - 1)))
            if paged:
                tokens = replace(tokens, counts=to_device(sizes, device, torch.long), total=sum(sizes))
            last = length - 1 - read  # [B], the node of the last prompt token, if it is in this chunk
            here = ((last >= 0) & (last < size))[:, None]  # [B, 1]
            end = last.clamp(0, size - 1)
            index = end if show is None else None
            new_logits, new_hidden, _ = forward(ForwardBatch(tokens, read, cache, index, inputs=inputs, pieces=pieces))
            if show is not None:
                for piece in pieces:
                    show(piece.row, piece.first, new_logits[piece.row, : piece.count])
                new_logits, new_hidden = (x.take_along_dim(end[:, None, None], dim=1) for x in (new_logits, new_hidden))
            new_logits, new_hidden = new_logits.squeeze(1), new_hidden.squeeze(1)
            logits = new_logits if logits is None else torch.where(here, new_logits, logits)
            hidden = new_hidden if hidden is None else torch.where(here, new_hidden, hidden)
        assert logits is not None, "a prompt has at least one token"
        assert hidden is not None
        return logits, hidden
