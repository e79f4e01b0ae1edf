"""What a server may take on, and what it refuses."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.scheduler.sequence import SamplingParams, TokenSequence
from redrafter.scheduler.waiting_queue import WaitingQueue

__all__ = ["Limits", "QueueFullError", "check"]


class QueueFullError(ReDrafterError):
    """As many texts wait as may."""


@dataclass(frozen=True)
class Limits:
    """What a server may take on.

    Attributes:
        max_batch_size: RunningBatch that step at once, and prompts that are being read: the places of the server.
        max_num_tokens: Tokens of one forward, drafts and chunks of prompts.
        max_seq_len: Tokens of a text, prompt included; None: the model's context.
        max_queue_size: Texts that wait for a place, 0 for any number; see `refuse_if_full`.
        guaranteed_no_evict: Admit a text only where the longest that it may become fits, so that none is ever put back.
        chunked: Read long prompts in chunks.
        reuse: Look for prefixes that are in the cache already.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_queue_size: int = 4096
    guaranteed_no_evict: bool = False
    chunked: bool = True
    reuse: bool = True

    def refuse_if_full(self, queue: WaitingQueue, running: int, client: str, texts: int) -> None:
        """Raise `QueueFullError` where so many more texts of a client may not wait.

        Only texts count that cannot begin at once for want of a place. A client alone may use all of `max_queue_size`.
        Where that is used up, other clients may wait beside it, up to as many texts again: each up to its share,
        `max_queue_size` by the number of clients that wait. What comes while nobody waits is always taken, so that a
        request of more texts than may wait is served too.
        """
        most = self.max_queue_size
        if not most or not queue:
            return
        waiting = len(queue) + texts - max(self.max_batch_size - running, 0)
        mine = queue.waiting(client)
        share = most // (queue.clients + (not mine))
        if waiting > most and (waiting > 2 * most or mine + texts > share):
            raise QueueFullError(
                f"{len(queue)} texts are waiting, {mine} of them yours, and {texts} more would be too many: "
                f"max_queue_size is {most}; try again later"
            )


def check(sequences: Sequence[TokenSequence], longest: int, vocabulary: int) -> None:
    """Raise `ArgumentError` for a text that can never be served.

    Args:
        sequences: The texts.
        longest: Tokens that a text may come to.
        vocabulary: Ids that there are.
    """
    checked: set[int] = set()  # several texts after one prompt share it
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


def _check_params(params: SamplingParams, vocabulary: int) -> None:
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
