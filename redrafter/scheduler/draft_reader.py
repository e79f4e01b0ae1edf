"""Reads the tokens of sequences into a draft model's cache: prompts, and what steps without drafts have written."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.to_device import to_device
from redrafter.drafting.draft_model import clamp_to_vocab
from redrafter.drafting.policy import DraftPolicy
from redrafter.drafting.proposer import State
from redrafter.features import RECURRENT_STATES
from redrafter.model.forward_batch import ForwardBatch, Prompts
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import CapturedStep
from redrafter.scheduler.row_caches import DenseRows, RowCaches
from redrafter.scheduler.sequence import TokenSequence
from redrafter.tree.token_tree import chain


class DraftReader:
    """Keeps a draft model's cache up to date with the sequences that it drafts for.

    While drafts do not pay, it reads nothing: `TokenSequence.unread_from` records where it has stopped.

    Attributes:
        model: The draft model.
        policy: Decides whether it drafts, and is charged for the time of reading.
    """

    def __init__(self, model: Target, policy: DraftPolicy):
        self.model, self.policy = model, policy

    def read_prompts(
        self, sequences: Sequence[TokenSequence], prompts: Prompts, cache: KVCache, *, wanted: bool = True
    ) -> None:
        """Read chunks of prompts, with those of the target, or record that they were not read.

        Args:
            sequences: Sequence of each row.
            prompts: The chunks that the target reads.
            cache: The draft model's keys and values.
            wanted: Whether drafts may pay, so that the chunks are read.
        """
        if wanted and all(sequence.unread_from is None for sequence in sequences):
            self._read(sequences, prompts, cache)
            return
        for sequence, start in zip(sequences, prompts.starts, strict=True):
            if sequence.unread_from is None:
                sequence.unread_from = start

    def read_chunks(self, chunks: PromptChunks, state: State, cache: KVCache) -> None:
        """Read the chunks of prompts that a step reads, also where it does not draft, into blocks of the same ids.

        The pending tokens of the step's rows are read with them, since a forward has rows; drafting reads them again.
        """
        pending, tokens = (clamp_to_vocab(tokens, self.model) for tokens in (state.pending, chunks.tokens))
        self.model.verify(ForwardBatch(chain(pending), state.length, cache, chunks=replace(chunks, tokens=tokens)))

    def prepare_step(self, sequences: Sequence[TokenSequence], step: CapturedStep, caches: RowCaches) -> None:
        """Read what steps without drafts have written, before a step that drafts; or record that this one does not."""
        dense = isinstance(caches, DenseRows)
        running = sequences if dense else [sequence for sequence in sequences if sequence.row is not None]
        if step.proposer.model is None:
            self.skip(running)
        elif behind := [sequence for sequence in running if sequence.unread_from is not None]:
            cache = step.draft_cache if dense else caches.of_prompts(behind).draft
            assert cache is not None, "a draft model has a cache"
            self.catch_up(behind, cache)

    def skip(self, sequences: Sequence[TokenSequence]) -> None:
        """Record that the next step of sequences is made without drafts, so that its tokens are not read."""
        # The last committed token was perhaps drafted and not read, nor drafts that were copied from the sequence.
        lag = 0 if RECURRENT_STATES in self.model.features else 1
        for sequence in sequences:
            if sequence.unread_from is None:
                sequence.unread_from = max(len(sequence.tokens) - 1 - lag - sequence.unread_copies, 0)
                if sequence.draft is not None:
                    sequence.draft.prefilled = sequence.draft_length(sequence.unread_from)

    def catch_up(self, sequences: Sequence[TokenSequence], cache: KVCache) -> None:
        """Read the committed tokens of sequences from `unread_from` on, each sequence in its row of the cache."""
        starts = [sequence.unread_from or 0 for sequence in sequences]
        ends = [len(sequence.tokens) - 1 for sequence in sequences]
        tokens = to_device(stack_tokens([sequence.tokens for sequence in sequences], ends), self.model.device)
        self._read(sequences, Prompts(tokens, starts, ends, cache), cache)
        for sequence in sequences:
            sequence.unread_from = None

    def _read(self, sequences: Sequence[TokenSequence], prompts: Prompts, cache: KVCache) -> None:
        count = sum(end - start for start, end in zip(prompts.starts, prompts.ends, strict=True))
        with self.policy.reading(count):
            drafts = [sequence.draft for sequence in sequences if sequence.draft is not None]
            if not drafts:
                read_drafts(prompts, self.model, cache)
                return
            # In a vocabulary of its own, where the same sequence has another length.
            starts = [draft.prefilled for draft in drafts]
            lengths = [sequence.draft_length(end) for sequence, end in zip(sequences, prompts.ends, strict=True)]
            for draft, length in zip(drafts, lengths, strict=True):
                draft.prefilled = length
            tokens = to_device(stack_tokens([draft.text.ids for draft in drafts], lengths), self.model.device)
            self.model.prefill(Prompts(tokens, starts, lengths, cache))


def read_drafts(prompts: Prompts, model: Target, cache: KVCache) -> None:
    """Read prompts into the cache of a draft model with the target's ids. It reads placeholder ids in place of images.

    Recurrent states lag by one token, since each step reads the last committed token again.
    """
    tokens = clamp_to_vocab(prompts.tokens.to(model.device), model)
    if cache.states is None:
        model.prefill(Prompts(tokens, prompts.starts, prompts.ends, cache))
        return
    starts = [max(start - 1, 0) for start in prompts.starts]
    ends = [max(end - 1, 1) for end in prompts.ends]
    model.prefill(Prompts(tokens, starts, ends, cache))
    # A prompt of one token leaves nothing to read before it, so its state is the initial one.
    cache.states.forget([row for row, end in enumerate(prompts.ends) if end == 1])


def stack_tokens(texts: Sequence[Sequence[int]], counts: Sequence[int], first: Sequence[int] | None = None) -> Tensor:
    """Return the first tokens of sequences, padded by at least one 0, `[B, T]` int64 on the host.

    The first `first` tokens of each stay 0, since they are not read.
    """
    padded = torch.zeros(len(texts), max(counts, default=0) + 1, dtype=torch.long)
    for row, (text, start, count) in enumerate(zip(texts, first or [0] * len(texts), counts, strict=True)):
        if start < count:  # through an array, since torch takes many times as long to read a list
            padded[row, start:count] = torch.frombuffer(array("q", text[start:count]), dtype=torch.long)
    return padded
