"""Reading prompts into a cache, in forwards of a bounded number of tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from redrafter.attention.prompt_attention import Piece, cut_prompts
from redrafter.cache.paged import KVCache, PagedCache
from redrafter.cache.to_device import to_device
from redrafter.target.tree_forward import TreeForward
from redrafter.target.varlen_forward import VarlenForward
from redrafter.tree.token_tree import chain

MAX_FORWARD_TOKENS = 8192  # of all rows; bounds what a forward holds beside the cache
MAX_CHUNK_TOKENS = 512  # of a row, in a forward whose masks have all tokens of the cache
MAX_MASK_NUMBERS = 1 << 24  # of all rows, in a forward whose masks have its own tokens alone
MAX_SHOWN_LOGITS = 1 << 25  # numbers of one forward whose logits are all shown: 128 MiB in float32

ShowLogits: TypeAlias = Callable[[int, int, Tensor], object]
"""Called with a row, a position in it, and the logits `[n, V]` of the n tokens from there on."""


class PromptReader:
    """Reads prompts into a cache, with or without masks.

    On a CPU, where attention can be replaced, prompts of unequal length are read as one sequence of pieces that needs
    no mask. Any model on any device can read them in chunks side by side, each a chain of tokens with its mask; on a
    dense cache these are padded to the longest.
    """

    def __init__(self, padded: TreeForward, varlen: VarlenForward, vocab_size: int, without_masks: bool):
        """Make the reader of a model.

        Args:
            padded: The forward over chains on a dense cache.
            varlen: The forward over chains on a paged cache, and over pieces on either.
            vocab_size: V, of the logits.
            without_masks: Read pieces, on a paged cache at least.
        """
        self._padded, self._varlen, self._vocab_size = padded, varlen, vocab_size
        self._without_masks = without_masks
        self._masks_on_dense = True

    def read_in_chunks(self) -> None:
        """Read later prompts in chunks with masks, by the forward that verifies trees."""
        self._without_masks = False

    def use_masks_on_dense_cache(self, masks: bool) -> None:
        """Read later prompts into dense caches with masks, or without them."""
        self._masks_on_dense = masks

    def reads_without_masks(self, cache: KVCache) -> bool:
        """Tell whether prompts are read into this cache in pieces, without masks."""
        return self._without_masks and (isinstance(cache, PagedCache) or not self._masks_on_dense)

    def read(
        self,
        prompts: Tensor,
        length: Tensor,
        cache: KVCache,
        rope_lengths: Tensor | None,
        *,
        start: Tensor | None = None,
        counts: Sequence[int] | None = None,
        max_tokens: int | None = None,
        show: ShowLogits | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read prompts; the arguments are those of `Target.prefill`.

        Args:
            prompts: Token ids, `[B, P]` int64, right-padded to any ids.
            length: Tokens of each row up to which to read, `[B]` int64.
            cache: Keys and values of the rows; receives those of the tokens.
            rope_lengths: Length of text whose rope each row's tokens have at least, `[B]` int64; None for that up to
                each token.
            start: Tokens of each row that the cache holds already, `[B]` int64, fewer than `length`; None for none.
            counts: How many tokens each row has beyond `start`; None for P of each, some of which may be padding.
            max_tokens: The most tokens of all rows in one forward; None for as many as suit.
            show: Is shown the logits of every token that is read, each row's in order.

        Returns:
            Logits `[B, V]` and hidden states `[B, F]` of each row's last token.
        """
        start = torch.zeros_like(length) if start is None else start
        max_tokens = max_tokens or MAX_FORWARD_TOKENS
        if show is not None:
            max_tokens = min(max_tokens, max(MAX_SHOWN_LOGITS // self._vocab_size, 1))
        if self.reads_without_masks(cache):
            return self._read_pieces(prompts, start, length, cache, rope_lengths, max_tokens, show)
        return self._read_chunks(prompts, start, length, cache, rope_lengths, counts, max_tokens, show)

    def _read_pieces(
        self,
        prompts: Tensor,
        start: Tensor,
        length: Tensor,
        cache: KVCache,
        rope_lengths: Tensor | None,
        max_tokens: int,
        show: ShowLogits | None,
    ) -> tuple[Tensor, Tensor]:
        """Read as `read` does, on a CPU: in pieces, one behind the other."""
        last: dict[int, tuple[Tensor, Tensor]] = {}
        for pieces in cut_prompts(start.tolist(), length.tolist(), max_tokens):
            logits, hidden = self._varlen.read_pieces(pieces, prompts, cache, rope_lengths, all_tokens=show is not None)
            if show is not None:
                counts = [piece.count for piece in pieces]
                for piece, its_logits in zip(pieces, logits.split(counts), strict=True):
                    show(piece.row, piece.first, its_logits)
                ends = torch.tensor(counts).cumsum(0) - 1
                logits, hidden = logits[ends], hidden[ends]
            rows = [piece.row for piece in pieces]
            last |= dict(zip(rows, zip(logits, hidden, strict=True), strict=True))
        logits_of_rows, hidden_of_rows = zip(*(last[row] for row in range(len(prompts))), strict=True)
        return torch.stack(logits_of_rows), torch.stack(hidden_of_rows)

    def _read_chunks(
        self,
        prompts: Tensor,
        start: Tensor,
        length: Tensor,
        cache: KVCache,
        rope_lengths: Tensor | None,
        counts: Sequence[int] | None,
        max_tokens: int,
        show: ShowLogits | None,
    ) -> tuple[Tensor, Tensor]:
        """Read as `read` does, with any model on any device: in chunks side by side, each a chain with its mask."""
        forward = self._varlen if isinstance(cache, PagedCache) else self._padded
        rows, width = prompts.shape
        ragged = counts is not None and isinstance(cache, PagedCache)
        counts = [width] * rows if counts is None else counts
        fits = ragged and sum(counts) <= max_tokens
        chunk = MAX_CHUNK_TOKENS
        if isinstance(cache, PagedCache):
            chunk = max(chunk, math.isqrt(MAX_MASK_NUMBERS // rows))
        if not fits:
            chunk = max(min(chunk, max_tokens // rows), 1)
        logits = hidden = None
        for offset in range(0, max(counts), chunk):
            sizes = [min(max(count - offset, 0), chunk) for count in counts]
            size = max(sizes)
            behind = start + offset  # [B]
            pieces = None if cache.states is None else _pieces(behind, length, sizes)
            if pieces == []:
                continue  # padding alone
            positions = behind[:, None] + torch.arange(size, device=length.device)  # [B, size]
            tokens = chain(prompts.gather(1, positions.clamp(max=width - 1)))
            if ragged:
                tokens = replace(tokens, counts=to_device(sizes, length.device, torch.long), total=sum(sizes))
            last = length - 1 - behind  # [B], the node of the last prompt token, if it is here
            here = ((last >= 0) & (last < size))[:, None]  # [B, 1]
            end = last.clamp(0, size - 1)
            new_logits, new_hidden = forward(
                tokens, behind, cache, end if show is None else None, rope_lengths, pieces=pieces
            )
            if show is not None:
                read = (last + 1).clamp(0, size).tolist()
                for row, first, count in zip(range(rows), behind.tolist(), read, strict=True):
                    show(row, first, new_logits[row, :count])
                new_logits, new_hidden = (
                    x.gather(1, end[:, None, None].expand_as(x[:, :1])) for x in (new_logits, new_hidden)
                )
            new_logits, new_hidden = new_logits.squeeze(1), new_hidden.squeeze(1)
            logits = new_logits if logits is None else torch.where(here, new_logits, logits)
            hidden = new_hidden if hidden is None else torch.where(here, new_hidden, hidden)
        assert logits is not None, "a prompt has at least one token"
        assert hidden is not None
        return logits, hidden


def _pieces(behind: Tensor, length: Tensor, sizes: Sequence[int]) -> list[Piece]:
    """Return what a forward reads of each row that reads on.

    Args:
        behind: Tokens of each row that are read already, `[B]` int64.
        length: Tokens of each row up to which to read, `[B]` int64.
        sizes: The most tokens of each row in the forward.
    """
    rows = enumerate(zip(behind.tolist(), length.tolist(), sizes, strict=True))
    return [Piece(row, first, min(end, first + size)) for row, (first, end, size) in rows if first < end and size]
