"""Limits on the sequences that run and wait, and the checks of a new sequence."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redrafter.errors import ArgumentError, ReDrafterError

if TYPE_CHECKING:  # options are parsed before torch is imported
    from redrafter.sampling.params import SamplingParams
    from redrafter.scheduler.sequence import TokenSequence
    from redrafter.scheduler.waiting_queue import WaitingQueue


class QueueFullError(ReDrafterError):
    """Too many sequences wait to accept another."""


@dataclass(frozen=True)
class Limits:
    """How many sequences and tokens run and wait at once.

    Attributes:
        max_batch_size: Sequences that hold a place, whether they step or their prompts are being read.
        max_num_tokens: Tokens of one forward, drafts and chunks of prompts together.
        max_seq_len: Tokens of a sequence, prompt included; None for the context length of the model.
        max_queue_size: Sequences that wait for a place, 0 for any number; see `refuse_if_full`.
        guaranteed_no_evict: Admit a sequence only when there are blocks for its greatest length, so that none is ever
            preempted.
        chunked: Read long prompts in chunks.
        paced: Let a forward over prompts alone take about `prefill_budget.TARGET_SECONDS` at most, so that running
            sequences do not wait for longer. Without a pace, it reads all prompts that were admitted.
        reuse: Look for prefixes that are in the cache already.
        admit_together: Places that must be free before sequences are admitted beside others that run, if as many wait
            and prompts have forwards of their own: one over several prompts takes little longer than over one.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_queue_size: int = 4096
    guaranteed_no_evict: bool = False
    chunked: bool = True
    paced: bool = True
    reuse: bool = True
    admit_together: int = 1

    def refuse_if_full(self, queue: "WaitingQueue", running: int, client: str, count: int) -> None:
        """Raise `QueueFullError` if so many more sequences of a client may not wait.

        Only sequences count that cannot begin at once for want of a place. A client alone may use all of
        `max_queue_size`. When that is used up, other clients may wait beside it, up to as many sequences again: each up
        to its share, which is `max_queue_size` divided by the number of clients that wait. What comes while nobody
        waits is always accepted, so that a request of more than `max_queue_size` sequences is served too.
        """
        most = self.max_queue_size
        if not most or not queue:
            return
        waiting = len(queue) + count - max(self.max_batch_size - running, 0)
        of_client = queue.waiting(client)
        share = most // (queue.waiting_clients + (not of_client))
        if waiting > most and (waiting > 2 * most or of_client + count > share):
            raise QueueFullError(
                f"{len(queue)} texts are waiting, {of_client} of them yours, and {count} more would be too many: "
                f"max_queue_size is {most}; try again later"
            )


def check_sequences(sequences: "Sequence[TokenSequence]", longest: int, vocabulary: int) -> None:
    """Raise `ArgumentError` for a sequence that can never be served."""
    checked: set[int] = set()  # several sequences after one prompt share it
    for sequence in sequences:
        _check_params(sequence.params, vocabulary)
        if id(sequence.prompt) in checked:
            continue
        checked.add(id(sequence.prompt))
        if not sequence.prompt:
            raise ArgumentError("the prompt is empty")
        if len(sequence.prompt) >= longest:
            raise ArgumentError(f"the prompt has {len(sequence.prompt)} tokens, and a text may have {longest}")
        _check_ids(sequence.prompt, vocabulary)


def _check_params(params: "SamplingParams", vocabulary: int) -> None:
    _check_ids(params.stop_token_ids, vocabulary)
    _check_ids(params.logit_bias, vocabulary)
    for name in ("top_k", "min_new_tokens", "seed"):
        if not 0 <= getattr(params, name) < 1 << 62:
            raise ArgumentError(f"{name} must be from 0 to 2**62 - 1, got {getattr(params, name)}")


def _check_ids(ids: Collection[int], vocabulary: int) -> None:
    # min and max, not a loop: an event loop waits for it, and a request may have a million tokens.
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocabulary:
            raise ArgumentError(f"token id {token} is out of range: there are {vocabulary} ids")
