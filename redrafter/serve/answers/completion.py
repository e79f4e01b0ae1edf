"""Format of the answers of `/v1/completions`."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.serve.answers.choice import Choice, TokenLine
from redrafter.serve.answers.prompt_logprobs import PromptLine, by_text, prompt_lines, prompt_logprobs

__all__ = ["CompletionFormat"]


class CompletionFormat:
    """Format of the answers of `/v1/completions`.

    Args:
        echo: Of each choice, the prompt to put before its text; None to echo nothing.
        logprobs: How many of the likeliest tokens to list beside each token; None for no log-probabilities.
        tokenizer: The model's tokenizer.
        prompt: How many of the likeliest tokens to list beside each token of the prompt, in `prompt_logprobs`; None
            for no such field.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        echo: Sequence[str] | None,
        logprobs: int | None,
        tokenizer: PreTrainedTokenizerBase,
        prompt: int | None = None,
    ):
        self._echo, self._logprobs, self._tokenizer, self._prompt_count = echo, logprobs, tokenizer, prompt
        self._offsets: dict[int, int] = {}

    def format_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        text = self._prompt(index) + choice.text
        logprobs = self._logprobs_field(index, choice.lines, self._echoed_lines(choice))
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
        if self._prompt_count is None or choice.sequence is None:
            return entry
        return entry | {"prompt_logprobs": prompt_logprobs(choice.sequence, self._prompt_count, self._tokenizer)}

    def format_chunks(
        self, index: int, text: str, lines: list[TokenLine], choice: Choice, first: bool
    ) -> list[dict[str, Any]]:
        """Return the entry of `choices` of a stream's chunk; arguments as in `AnswerFormat`."""
        before = self._prompt(index) if first else ""
        logprobs = self._logprobs_field(index, lines, self._echoed_lines(choice) if first else [])
        entry = {"index": index, "text": before + text, "logprobs": logprobs, "finish_reason": choice.finish}
        return [entry | choice.new_draft_runs(before)]

    def _prompt(self, index: int) -> str:
        return self._echo[index] if self._echo is not None else ""

    def _echoed_lines(self, choice: Choice) -> list[PromptLine]:
        if self._echo is None or self._logprobs is None or choice.sequence is None:
            return []
        return prompt_lines(choice.sequence, self._logprobs, self._tokenizer)

    def _logprobs_field(self, index: int, lines: list[TokenLine], before: list[PromptLine]) -> dict[str, Any] | None:
        """Return the `logprobs` field of new tokens, with those of an echoed prompt before them."""
        if self._logprobs is None:
            return None
        offset, offsets = self._offsets.get(index, len(self._prompt(index))), [line.offset for line in before]
        for text, *_ in lines:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        tops = [by_text(likeliest, token, logprob, self._tokenizer) for _, token, logprob, likeliest in lines]
        return {
            "text_offset": offsets,
            "token_logprobs": [line.logprob for line in before] + [logprob for _, _, logprob, _ in lines],
            "tokens": [line.text for line in before] + [text for text, *_ in lines],
            "top_logprobs": [line.likeliest for line in before] + tops,
        }
