"""One choice of an answer while it is generated: detokenization, stop strings, log-probabilities and usage."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from redrafter.checkpoints.token_bytes import TokenBytes
from redrafter.engine.detokenizer import Detokenizer, decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.scheduler.sequence import SequenceDelta, Stats
from redrafter.serve.engine_process.client import ServedSequence
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest


class TokenLine(NamedTuple):
    """A token of a text.

    Attributes:
        token: Its id.
        logprob: Its log-probability; None without a context.
        likeliest: Log-probabilities of the likeliest ids at its position.
        offset: Number of the text's characters before the token. A character belongs to the token that completes it.
        first: Whether it is the first token of the text.
    """

    token: int
    logprob: float | None
    likeliest: Mapping[int, float]
    offset: int
    first: bool


class TokenWriter:
    """Writes tokens of one tokenizer. The bytes of a text's tokens join to the text, except those of hidden tokens.

    Args:
        tokenizer: The tokenizer.
        hidden: Ids that the text does not show; None for all special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self._tokenizer, added = tokenizer, tokenizer.added_tokens_decoder
        self._added = {token: entry.content.encode() for token, entry in added.items()}
        self.hidden = {token for token, entry in added.items() if entry.special} if hidden is None else hidden
        self._pieces: TokenBytes | None = None
        with suppress(UnsupportedError):  # otherwise each token's text is that of the token alone
            self._pieces = TokenBytes(tokenizer)

    def bytes(self, token: int, first: bool) -> bytes:
        """Return the bytes of a token; they may be part of a character. `first` marks the first token of a text."""
        if (text := self._added.get(token)) is not None:
            return text
        piece = None if self._pieces is None else self._pieces.backend.id_to_token(token)
        text = None if self._pieces is None or piece is None else self._pieces.of_piece(piece)
        if text is None:
            return decode_tokens(self._tokenizer, [token]).encode()
        # Tokenizers like sentencepiece drop the space at the beginning of a text.
        if first and text.startswith(b" ") and not decode_tokens(self._tokenizer, [token]).startswith(" "):
            return text[1:]
        return text

    def text(self, token: int, first: bool, prefix: str = "") -> str:
        r"""Return the text of a token. Bytes that are no text are written as `\xf0`, after `prefix`."""
        written = self.bytes(token, first)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return prefix + written.decode(errors="backslashreplace")

    def chat_entry(self, line: TokenLine) -> dict[str, Any]:
        """Return a token in the format of chats."""

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self.text(token, line.first)
            return {"token": text, "logprob": logprob, "bytes": list(self.bytes(token, line.first))}

        top = [entry(*pair) for pair in line.likeliest.items()]
        return entry(line.token, line.logprob) | {"top_logprobs": top}

    def completion_field(self, lines: list[TokenLine]) -> dict[str, Any]:
        """Return the `logprobs` field of a completion."""
        return {
            "text_offset": [line.offset for line in lines],
            "token_logprobs": [line.logprob for line in lines],
            "tokens": [self._name(line.token, line) for line in lines],
            "top_logprobs": [self._by_text(line) for line in lines],
        }

    def _name(self, token: int, line: TokenLine) -> str:
        return self.text(token, line.first, "bytes:")

    def _by_text(self, line: TokenLine) -> dict[str, float] | None:
        """Return log-probabilities by token text; the token itself is always included.

        Several tokens may have the same text: all but one are keyed `token_id:` with the id.
        """
        if line.logprob is None:
            return None
        logprobs = {self._name(line.token, line): line.logprob}
        for other, value in line.likeliest.items():
            if other != line.token:
                text = self._name(other, line)
                logprobs[f"token_id:{other}" if text in logprobs else text] = value
        return logprobs


class StopStrings:
    """Finds the first of one or more stop strings in a sequence while the engine generates it.

    A stop string may begin in one token and end in another, as for the stopping criterion of transformers.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self._stops, self._longest = stops, max(map(len, stops))
        self._detokenizer, self._tail = Detokenizer(tokenizer, hidden), ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the token in this step that completes a stop string; None if no stop string occurs."""
        for index, token in enumerate(tokens):
            self._tail += self._detokenizer.push([token])
            if any(stop in self._tail for stop in self._stops):
                return index
            self._tail = self._tail[-self._longest :]
        return None


@dataclass(frozen=True)
class ChoiceContext:
    """The settings that all choices of a request share.

    Attributes:
        tokenizer: The model's tokenizer.
        stop_token_ids: Ids that end the sequence.
        depth: Depth of the deepest draft tree.
        adapter: Name of the LoRA adapter to decode with; None for the base model.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int] = frozenset()
    depth: int = 0
    adapter: str | None = None


class Choice(ServedSequence):
    """One choice of an answer while it is generated. A stop string ends it, and is not part of its text.

    Text that may be the beginning of a stop string is held back until it is certain. A character whose bytes come from
    both a draft and the target's own token counts for the token that completes it.

    Args:
        prompt: Token ids of the prompt.
        request: The request that the choice answers.
        context: The settings that it shares with the request's other choices.
        hidden: Ids that detokenization skips; None for all special tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        request: CompletionRequest | ChatRequest,
        context: ChoiceContext,
        hidden: Collection[int] | None = None,
    ):
        self._stops, tokenizer = request.stops, context.tokenizer
        find_stop = StopStrings(self._stops, tokenizer, hidden) if self._stops else None
        stats = Stats(accepted_by_depth=[0] * context.depth)
        super().__init__(prompt, context.stop_token_ids, stats, find_stop, context.adapter)
        self._tokenizer, self._hidden, self._detokenizer = tokenizer, hidden, Detokenizer(tokenizer, hidden)
        self._marks_drafts = request.stream_options is not None and request.stream_options.include_drafts
        self._held = ""
        self._drafted = bytearray()  # 1 for each character, held back or not, that a draft wrote
        self._reported = 0  # characters that `draft_runs` has returned
        self.begun = self.shown = False  # whether a delta was received, and a chunk sent
        self.token_count = 0  # tokens received so far; the engine may have generated more
        self.text = ""  # without the characters that are held back
        self.lines: list[TokenLine] = []  # tokens with their log-probabilities, if requested
        self._at_first = True  # whether no token of these is part of the text
        self.finish: str | None = None  # finish reason, once the sequence has ended
        self.stop: str | None = None  # the stop string that ended it, if one did

    def append(self, deltas: Sequence[SequenceDelta]) -> tuple[str, list[TokenLine]]:
        """Append the engine's deltas since the last call; raise `ApiError` if the sequence failed.

        Returns:
            The added text, and its tokens with log-probabilities if they were requested.
        """
        self.begun = True
        text, begin = "", len(self.lines)
        for delta in deltas:
            if delta.finish == "error":
                # The engine found the request invalid, so the client is at fault; anything else is a server error.
                if isinstance(delta.error, ArgumentError):
                    raise ApiError(400, f"{delta.error}")
                named = isinstance(delta.error, ReDrafterError)
                # Messages of foreign exceptions may contain paths or prompts, so clients do not see them.
                raise ApiError(500, f"{delta.error}" if named else "the engine failed")
            shown = delta.tokens
            self.token_count += len(shown)
            # The end token counts as usage but is not part of the text.
            if delta.finish == "stop" and shown and shown[-1] in self.stop_token_ids:
                shown = shown[:-1]
            self.finish = delta.finish or self.finish
            # Accepted drafts come first in a step; decoding them apart marks their characters.
            accepted = delta.accepted if self._marks_drafts else 0
            if delta.logprobs is None:
                self._decode(shown[:accepted], True)
                self._decode(shown[accepted:], False)
            else:  # one by one, for the offset of each
                for index, (token, (logprob, likeliest)) in enumerate(zip(shown, delta.logprobs, strict=False)):
                    self.lines.append(TokenLine(token, logprob, likeliest, len(self._drafted), self._at_first))
                    self._at_first &= token in self._token_writer.hidden
                    self._decode([token], index < accepted)
            # The detokenizer holds back bytes of an incomplete character until no more can follow.
            if delta.finish is not None:
                self._hold(self._detokenizer.finish(), False)
            text += self._release()
        return text, self.lines[begin:]

    @cached_property
    def _token_writer(self) -> TokenWriter:
        return TokenWriter(self._tokenizer, self._hidden)

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens; None for a choice that does not count them."""
        return None

    def _decode(self, tokens: Sequence[int], drafted: bool) -> None:
        self._hold(self._detokenizer.push(tokens), drafted)

    def _hold(self, text: str, drafted: bool) -> None:
        self._held += text
        self._drafted += bytes([drafted]) * len(text)

    def _release(self) -> str:
        """Move the held characters that are certain to the text, and return them. At the end, all of them are."""
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            # The earliest stop string in the text wins, regardless of their order in the request.
            end, self.stop = min(found)
            ready, self._held = self._held[:end], ""
        else:
            # A suffix of the held text that may begin a stop string stays: a sent part cannot be taken back.
            sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
            end = len(self._held) - (0 if self.finish is not None else max(sizes, default=0))
            ready, self._held = self._held[:end], self._held[end:]
        so_far, self.text = self.text, ""
        so_far += ready  # in place, as in `ChatReader.push`
        self.text = so_far
        return ready

    def draft_runs(self, spans: Iterable[tuple[int, int]] | None = None, before: str = "") -> dict[str, Any]:
        """Return the `drafts` field of a chunk, which is empty unless requested.

        It covers `spans` of the text's characters; if None, the characters since the last call. `before` is an echo.
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


def usage_and_metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return usage and metrics of an answer. A prompt with several choices counts once, as the first read it."""
    begun = [choice for choice in choices if choice.begun]
    # The choices of a prompt share one list; another prompt of the same tokens is a prompt of its own.
    first = {id(choice.prompt): choice for choice in reversed(begun)}
    total = Stats.total([choice.stats for choice in begun])
    return {
        "usage": count_usage(choices, first.values()),
        "metrics": {"speculative_decoding": speculation_metrics(total)},
    }


def count_usage(choices: Sequence[Choice], prompts: Collection[Choice]) -> dict[str, Any]:
    """Return the usage so far: prompt tokens of `prompts`, and completion tokens of `choices`."""
    # A prompt counts once, however many choices continue it.
    read, written = sum(len(choice.prompt) for choice in prompts), sum(choice.token_count for choice in choices)
    thoughts = [choice.reasoning_tokens for choice in choices if choice.reasoning_tokens is not None]
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.reused for choice in prompts)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(thoughts)}} if thoughts else {}),
    }


def summarize(choices: Sequence[Choice], unfinished: str = "left") -> dict[str, Any]:
    """Return the facts to log about an answer, or about the part of it that was generated before it was cut off.

    `unfinished` is logged as the finish reason of choices without one; `left` means that the client disconnected.
    """
    if not any(choice.begun for choice in choices):
        return {}
    counts = usage_and_metrics(choices)
    usage, speculation = counts["usage"], counts["metrics"]["speculative_decoding"]
    waits = [choice.first_token_at - choice.arrived_at for choice in choices if choice.first_token_at is not None]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": round(min(waits), 4) if waits else None,
        "tokens_per_step": round(speculation["mean_acceptance_length"], 3),
        "finish": ",".join(choice.finish or unfinished for choice in choices),
    }


def speculation_metrics(total: Stats) -> dict[str, Any]:
    """Return speculation metrics of one or more sequences, under vLLM's names (vllm-project/vllm#48915).

    Undrafted steps do not count, nor does a row's step in which the rest of the batch left it no draft.
    `mean_acceptance_length` includes the token that follows the accepted drafts; entry j of `acceptance_histogram`
    counts the steps that accepted exactly j drafts. vLLM lacks the last three: entry d of `acceptance_by_depth` is the
    share of the steps with at least d accepted drafts that accepted one more; `num_copied_draft_tokens` counts drafts
    copied from the sequence, and `num_accepted_copied_tokens` the accepted ones that no drafter proposed.
    """
    return {
        "mean_acceptance_length": total.accepted_length or 1.0,
        "draft_acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in pairwise([total.draft_steps, *total.accepted_by_depth, 0])],
        "num_spec_steps": total.draft_steps,
        "num_accepted_draft_tokens": total.accepted,
        "num_draft_tokens": total.drafted,
        "num_spec_tokens": len(total.accepted_by_depth),
        "acceptance_by_depth": total.acceptance,
        "num_copied_draft_tokens": total.copies,
        "num_accepted_copied_tokens": total.copied,
    }
