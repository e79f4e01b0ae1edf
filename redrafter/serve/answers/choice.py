"""One text of an answer while it is written: its tokens as text, up to a stop string, and what is counted of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer, decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process.client import ServedSequence
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest

# A token's text, its id, its log-probability, and the log-probabilities of the likeliest ids.
TokenLine = tuple[str, int, float, Mapping[int, float]]


class StopStrings:
    """Find stop strings, of which there is at least one, in a text as the engine writes it.

    A stop string may begin in one token and end in another, as for the stopping criterion of transformers.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self._stops, self._longest = stops, max(map(len, stops))
        self._detokenizer, self._tail = Detokenizer(tokenizer, hidden), ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the step's token after which the text contains a stop string; None where it does not."""
        for index, token in enumerate(tokens):
            self._tail += self._detokenizer.push([token])
            if any(stop in self._tail for stop in self._stops):
                return index
            self._tail = self._tail[-self._longest :]
        return None


class Choice(ServedSequence):
    """One text of an answer while it is written; it ends with stop strings, which are left out of it.

    What may be the beginning of a stop string is held back. A character whose bytes come from a draft and from the
    target's own token counts for the token that completes it.

    Args:
        prompt: Token ids before the text.
        request: What is asked for.
        tokenizer: The model's tokenizer.
        stop_token_ids: Ids that end the text.
        depth: Levels of the deepest tree of drafts.
        adapter: Name of the LoRA adapter that writes the text; None for the model alone.
        hidden: Ids that are no part of the text; None for all special tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        request: CompletionRequest | ChatRequest,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: frozenset[int] = frozenset(),
        depth: int = 0,
        adapter: str | None = None,
        *,
        hidden: Collection[int] | None = None,
    ):
        self._stops = request.stops
        find_stop = StopStrings(self._stops, tokenizer, hidden) if self._stops else None
        super().__init__(prompt, stop_token_ids, Stats(accepted_by_depth=[0] * depth), find_stop, adapter)
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, hidden)
        self._marks_drafts = request.stream_options is not None and request.stream_options.include_drafts
        self._held = ""
        self._drafted = bytearray()  # of each character of the text and of what is held: whether a draft wrote it
        self._reported = 0  # characters that `draft_runs` has returned
        self.begun = self.shown = False  # whether something of it was received, and a chunk of it sent
        self.token_count = 0  # tokens received so far; the engine may have written more
        self.text = ""  # without what is held back
        self.lines: list[TokenLine] = []  # tokens with their log-probabilities, where these were asked for
        self.logprob = 0.0  # the sum of these, that of a final end token included
        self.finish: str | None = None  # why the text ended
        self.stop: str | None = None  # the stop string that ended it, if one did

    def append(self, deltas: Sequence[SequenceDelta]) -> tuple[str, list[TokenLine]]:
        """Append what was written since the last call, or raise `ApiError` if that has failed.

        Returns:
            The text that is added, and its tokens with log-probabilities where these were asked for.
        """
        self.begun = True
        text, begin = "", len(self.lines)
        for delta in deltas:
            if delta.finish == "error":
                if isinstance(delta.error, ArgumentError):
                    raise ApiError(400, f"{delta.error}")
                named = isinstance(delta.error, ReDrafterError)
                raise ApiError(500, f"{delta.error}" if named else "the engine failed")
            shown = delta.tokens
            self.token_count += len(shown)
            if delta.finish == "stop" and shown and shown[-1] in self.stop_token_ids:
                shown = shown[:-1]
            self.lines += [
                (decode_tokens(self._tokenizer, [token]), token, logprob, likeliest)
                for token, (logprob, likeliest) in zip(shown, delta.logprobs or (), strict=False)
            ]
            self.logprob += sum(logprob for logprob, _ in delta.logprobs or ())
            self.finish = delta.finish or self.finish
            accepted = delta.accepted if self._marks_drafts else 0
            self._decode(shown[:accepted], True)
            self._decode(shown[accepted:], False)
            if delta.finish is not None:
                self._hold(self._detokenizer.finish(), False)
            text += self._release()
        return text, self.lines[begin:]

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of thoughts; None for a text of which they are not counted."""
        return None

    def _decode(self, tokens: Sequence[int], drafted: bool) -> None:
        self._hold(self._detokenizer.push(tokens), drafted)

    def _hold(self, text: str, drafted: bool) -> None:
        self._held += text
        self._drafted += bytes([drafted]) * len(text)

    def _release(self) -> str:
        """Add to the text what is certain of the held characters, and return it; in the end, nothing is held back."""
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            end, self.stop = min(found)
            ready, self._held = self._held[:end], ""
        else:
            # What is at the end of the held text and may be the beginning of a stop string stays.
            sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
            end = len(self._held) - (0 if self.finish is not None else max(sizes, default=0))
            ready, self._held = self._held[:end], self._held[end:]
        so_far, self.text = self.text, ""
        so_far += ready  # in place, as in `ChatReader.push`
        self.text = so_far
        return ready

    def draft_runs(self, spans: Iterable[tuple[int, int]] | None = None, before: str = "") -> dict[str, Any]:
        """Return the `drafts` field of a chunk, which is empty unless asked for.

        The chunk has spans of the text's characters, or if None those since the last call, after an echoed prompt.
        """
        if not self._marks_drafts:
            return {}
        if spans is None:
            spans, self._reported = [(self._reported, len(self.text))], len(self.text)
        runs = [(before, False)] if before else []
        for begin, end in spans:
            marked = zip(self._drafted[begin:end], self.text[begin:end], strict=True)
            runs += [("".join(text for _, text in run), bool(own)) for own, run in groupby(marked, key=itemgetter(0))]
        return {"drafts": [{"text": text, "accepted": drafted} for text, drafted in runs]}

    def prompt_logprobs(self, count: int) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of the prompt, which was scored, in vLLM's format.

        Of each token, there are entries by id for it and for the `count` likeliest; the first one follows nothing.
        """

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": logprob, "rank": rank, "decoded_token": decode_tokens(self._tokenizer, [token])}

        entries: list[dict[str, Any] | None] = [None]
        for token, score in zip(self.prompt[1:], self.prompt_scores, strict=True):
            ranked = enumerate(islice(score.likeliest.items(), count), 1)
            others = {f"{other}": entry(other, value, rank) for rank, (other, value) in ranked if other != token}
            entries.append({f"{token}": entry(token, score.logprob, score.rank)} | others)
        return entries


def usage_and_metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return usage and metrics of an answer. A prompt counts once, however many texts follow it."""
    begun = [choice for choice in choices if choice.begun]
    return {
        "usage": count_usage(choices, {tuple(choice.prompt): choice for choice in begun}.values()),
        "metrics": {"speculative_decoding": speculation_metrics([choice.stats for choice in begun])},
    }


def count_usage(choices: Sequence[Choice], prompts: Collection[Choice]) -> dict[str, Any]:
    """Return the usage so far. The tokens of `prompts` count as read, those of `choices` as written."""
    read, written = sum(len(choice.prompt) for choice in prompts), sum(choice.token_count for choice in choices)
    thoughts = [choice.reasoning_tokens for choice in choices if choice.reasoning_tokens is not None]
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.reused for choice in prompts)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(thoughts)}} if thoughts else {}),
    }


def summarize(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts that the log has of an answer, or of as much of it as was written before the client left."""
    if not any(choice.begun for choice in choices):
        return {}
    told = usage_and_metrics(choices)
    usage, speculation = told["usage"], told["metrics"]["speculative_decoding"]
    waits = [choice.first_token_at - choice.arrived_at for choice in choices if choice.first_token_at is not None]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": round(min(waits), 4) if waits else None,
        "tokens_per_step": round(speculation["mean_acceptance_length"], 3),
        "finish": ",".join(choice.finish or "left" for choice in choices),
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return how speculation went in some sequences, under vLLM's names (vllm-project/vllm#48915).

    Undrafted steps do not count; a step in which the other rows left a row no draft does. `mean_acceptance_length`
    counts the token that follows the accepted drafts too; entry j of `acceptance_histogram` counts the steps that
    accepted exactly j drafts. vLLM lacks the last three: entry d of `acceptance_by_depth` is the share of the steps
    with d accepted drafts or more that accepted one more; `num_copied_draft_tokens` of the drafts were copied from the
    text, and `num_accepted_copied_tokens` of those that were accepted only the text had.
    """
    steps, drafted, accepted, copies, copied = (
        sum(getattr(entry, name) for entry in stats)
        for name in ("draft_steps", "drafted", "accepted", "copies", "copied")
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
        "num_copied_draft_tokens": copies,
        "num_accepted_copied_tokens": copied,
    }
