"""One text of an answer while it is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.text import TextStream
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["Choice", "TokenLine"]

# A token's text, its id, its log-probability, and the log-probabilities of the likeliest ids.
TokenLine = tuple[str, int, float, Mapping[int, float]]


class Choice:
    """One text of an answer while it is written.

    Args:
        tokenizer: The model's tokenizer.
        stops: Stop strings, which end the text and are left out of it.
        drafts: Whether chunks of a stream say which characters accepted drafts wrote.

    Attributes:
        sequence: The sequence that writes the text; None before its first tokens.
        token_count: Tokens received so far; the engine may have written more.
        lines: Tokens with their log-probabilities, where these were asked for.
        logprob: Sum of the log-probabilities of all tokens, a final end token included; 0 where not asked for.
        finish: Why the text ended; None while it is written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], drafts: bool = False):
        self._tokenizer, self._stream, self._drafts = tokenizer, TextStream(tokenizer, stops), drafts
        self.sequence: ServedSequence | None = None
        self.token_count = 0
        self.lines: list[TokenLine] = []
        self.logprob = 0.0
        self.finish: str | None = None

    @property
    def text(self) -> str:
        """The text so far, without what may be the beginning of a stop string."""
        return self._stream.text

    def append(self, sequence: ServedSequence, deltas: Sequence[SequenceDelta]) -> tuple[str, list[TokenLine]]:
        """Append what a sequence has gained.

        Args:
            sequence: The sequence that writes this text.
            deltas: What it has gained since the last call.

        Returns:
            The text that is added, and its tokens with log-probabilities where these were asked for.

        Raises:
            ApiError: If the sequence failed.
        """
        self.sequence = sequence
        added = [self._append(sequence, delta) for delta in deltas]
        return "".join(text for text, _ in added), [line for _, lines in added for line in lines]

    def _append(self, sequence: ServedSequence, delta: SequenceDelta) -> tuple[str, list[TokenLine]]:
        if delta.finish == "error":
            if isinstance(delta.error, ArgumentError):
                raise ApiError(400, f"{delta.error}")
            named = isinstance(delta.error, ReDrafterError)
            raise ApiError(500, f"{delta.error}" if named else f"the engine failed: {delta.error}")
        shown = delta.tokens
        self.token_count += len(shown)
        if delta.finish == "stop" and shown and shown[-1] in sequence.stop_token_ids:
            shown = shown[:-1]
        lines = [
            (decode_tokens(self._tokenizer, [token]), token, logprob, likeliest)
            for token, (logprob, likeliest) in zip(shown, delta.logprobs or (), strict=False)
        ]
        self.lines += lines
        self.logprob += sum(logprob for logprob, _ in delta.logprobs or ())
        self.finish = delta.finish or self.finish
        accepted = delta.accepted if self._drafts else 0
        return self._stream.push(shown, last=delta.finish is not None, accepted=accepted), lines

    def new_draft_runs(self, before: str = "") -> dict[str, Any]:
        """Return the `drafts` field of a chunk for the text since the last call; empty unless asked for.

        Args:
            before: An echoed prompt that the chunk begins with.
        """
        if not self._drafts:
            return {}
        return _drafts_field([(before, False), *self._stream.new_runs()])

    def draft_runs(self, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the `drafts` field of a chunk for spans of the text's characters; empty unless asked for."""
        if not self._drafts:
            return {}
        return _drafts_field([run for span in spans for run in self._stream.runs(*span)])


def _drafts_field(runs: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {"drafts": [{"text": text, "accepted": accepted} for text, accepted in runs if text]}
