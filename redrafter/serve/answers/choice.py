"""One text of an answer while it is written: its tokens as text, up to a stop string, and what is counted of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer, decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process.client import ServedSequence
from redrafter.serve.protocol.requests import ApiError

# A token's text, its id, its log-probability, and the log-probabilities of the likeliest ids.
TokenLine = tuple[str, int, float, Mapping[int, float]]


class StopStrings:
    """Find stop strings, of which there is at least one, in a text as the engine writes it.

    A stop string may begin in one token and end in another, as for the stopping criterion of transformers.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self._stops, self._longest = stops, max(map(len, stops))
        self._detokenizer, self._tail = Detokenizer(tokenizer), ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the step's token after which the text contains a stop string; None where it does not."""
        for index, token in enumerate(tokens):
            self._tail += self._detokenizer.push([token])
            if any(stop in self._tail for stop in self._stops):
                return index
            self._tail = self._tail[-self._longest :]
        return None


class TextStream:
    """Decode tokens to text as they come, and hold back what may be the beginning of a stop string.

    A character whose bytes come from a draft and from the target's own token counts for the token that completes it.

    Attributes:
        text: The text so far, without what is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._detokenizer, self._stops = Detokenizer(tokenizer), stops
        self._held = ""
        self._drafted = bytearray()  # of each character of the text and of what is held: whether a draft wrote it
        self._reported = 0  # characters that `new_runs` has returned
        self.text = ""

    def push(self, tokens: Sequence[int], last: bool = False, accepted: int = 0) -> str:
        """Return the text that these tokens make certain; after the `last` ones, nothing is held back.

        `accepted` of the first tokens were accepted drafts; only `runs` and `new_runs` need it.
        """
        self._hold(self._detokenizer.push(tokens[:accepted]), True)
        self._hold(self._detokenizer.push(tokens[accepted:]), False)
        if last:
            self._hold(self._detokenizer.finish(), False)
        stop_indices = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if stop_indices:
            ready, self._held = self._held[: min(stop_indices)], ""
        else:
            # What is at the end of the held text and may be the beginning of a stop string stays.
            sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
            end = len(self._held) - (0 if last else max(sizes, default=0))
            ready, self._held = self._held[:end], self._held[end:]
        self.text += ready
        return ready

    def new_runs(self) -> list[tuple[str, bool]]:
        """Return the text since the last call as runs, each with whether drafts wrote it."""
        start, self._reported = self._reported, len(self.text)
        return self.runs(start, self._reported)

    def runs(self, begin: int, end: int) -> list[tuple[str, bool]]:
        """Return characters `begin` to `end` of the text as runs, each with whether drafts wrote it."""
        marked = zip(self._drafted[begin:end], self.text[begin:end], strict=True)
        return [
            ("".join(text for _, text in run), bool(drafted)) for drafted, run in groupby(marked, key=itemgetter(0))
        ]

    def _hold(self, text: str, drafted: bool) -> None:
        self._held += text
        self._drafted += bytes([drafted]) * len(text)


class Choice:
    """One text of an answer while it is written; it ends with stop strings, which are left out of it.

    Attributes:
        sequence: The sequence that writes the text; None before its first tokens.
        token_count: Tokens received so far; the engine may have written more.
        lines: Tokens with their log-probabilities, where these were asked for.
        logprob: Sum of the log-probabilities of all tokens, a final end token included; 0 where not asked for.
        finish: Why the text ended; None while it is written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], drafts: bool = False):
        """Begin a text. drafts: whether chunks of a stream say which characters accepted drafts wrote."""
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
        """Append what a sequence has gained since the last call, or raise `ApiError` if it failed.

        Returns:
            The text that is added, and its tokens with log-probabilities where these were asked for.
        """
        self.sequence = sequence
        text, begin = "", len(self.lines)
        for delta in deltas:
            if delta.finish == "error":
                if isinstance(delta.error, ArgumentError):
                    raise ApiError(400, f"{delta.error}")
                named = isinstance(delta.error, ReDrafterError)
                raise ApiError(500, f"{delta.error}" if named else f"the engine failed: {delta.error}")
            shown = delta.tokens
            self.token_count += len(shown)
            if delta.finish == "stop" and shown and shown[-1] in sequence.stop_token_ids:
                shown = shown[:-1]
            self.lines += [
                (decode_tokens(self._tokenizer, [token]), token, logprob, likeliest)
                for token, (logprob, likeliest) in zip(shown, delta.logprobs or (), strict=False)
            ]
            self.logprob += sum(logprob for logprob, _ in delta.logprobs or ())
            self.finish = delta.finish or self.finish
            accepted = delta.accepted if self._drafts else 0
            text += self._stream.push(shown, last=delta.finish is not None, accepted=accepted)
        return text, self.lines[begin:]

    def draft_runs(self, spans: Sequence[tuple[int, int]] | None = None, before: str = "") -> dict[str, Any]:
        """Return the `drafts` field of a chunk, which is empty unless asked for.

        The chunk has spans of the text's characters, or if None those since the last call, after an echoed prompt.
        """
        if not self._drafts:
            return {}
        stream = self._stream
        runs = stream.new_runs() if spans is None else [run for span in spans for run in stream.runs(*span)]
        return {"drafts": [{"text": text, "accepted": drafted} for text, drafted in [(before, False), *runs] if text]}


def usage_and_metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return usage and metrics of an answer. A prompt counts once, however many texts follow it."""
    sequences = [choice.sequence for choice in choices if choice.sequence is not None]
    return {
        "usage": count_usage(choices, {tuple(sequence.prompt): sequence for sequence in sequences}.values()),
        "metrics": {"speculative_decoding": speculation_metrics([sequence.stats for sequence in sequences])},
    }


def summarize(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts that the log has of an answer, or of as much of it as was written before the client left."""
    sequences = [choice.sequence for choice in choices if choice.sequence is not None]
    if not sequences:
        return {}
    told = usage_and_metrics(choices)
    usage, speculation = told["usage"], told["metrics"]["speculative_decoding"]
    waits = [
        sequence.first_token_at - sequence.arrived_at for sequence in sequences if sequence.first_token_at is not None
    ]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": round(min(waits), 4) if waits else None,
        "tokens_per_step": round(speculation["mean_acceptance_length"], 3),
        "finish": ",".join(choice.finish or "left" for choice in choices),
    }


def count_usage(choices: Iterable[Choice], prompts: Collection[ServedSequence]) -> dict[str, Any]:
    """Return the usage so far. The tokens of `prompts` count as read, those of `choices` as written."""
    read, written = sum(len(sequence.prompt) for sequence in prompts), sum(choice.token_count for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.reused for sequence in prompts)},
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return how speculation went in some sequences, under vLLM's names (vllm-project/vllm#48915).

    Undrafted steps do not count; a step in which the other rows left a row no draft does. `mean_acceptance_length`
    counts the token that follows the accepted drafts too; entry j of `acceptance_histogram` counts the steps that
    accepted exactly j drafts; entry d of `acceptance_by_depth`, which vLLM lacks, is the share of the steps with d
    accepted drafts or more that accepted one more.
    """
    steps, drafted, accepted = (
        sum(getattr(entry, name) for entry in stats) for name in ("draft_steps", "drafted", "accepted")
    )
    depth = max((len(entry.accepted_by_depth) for entry in stats), default=0)
    reached = [steps, *(sum(entry.accepted_by_depth[d] for entry in stats) for d in range(depth))]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
        "acceptance_by_depth": [b / a if a else None for a, b in pairwise(reached)],
    }
