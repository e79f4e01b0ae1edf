"""The stream of one completion: when its chunks came, its text, and the tokens that the server counted."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from redrafter.bench.http_stream import EventLines, RequestFailedError

__all__ = ["Completion", "CompletionStream"]


@dataclass
class Completion:
    """One request and what came of it; times are those of `time.perf_counter`, in seconds.

    Attributes:
        index: Number of the request.
        sent: When the request was sent.
        ended: When its answer had ended, or failed.
        chunk_times: When each chunk of the stream came.
        text_times: When each chunk came that holds text.
        text: The text.
        prompt_tokens: Tokens of the prompt, by the server's count.
        completion_tokens: Tokens of the completion, by the server's count.
        error: Why the request failed; None where it did not.
    """

    index: int
    sent: float
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    text_times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


class CompletionStream:
    """Reads the body of a streamed completion, and notes its chunks with the times at which they come.

    Args:
        completion: The completion to note them in.
    """

    def __init__(self, completion: Completion):
        self._completion, self._lines = completion, EventLines()
        self._texts: list[str] = []
        self._done = False

    def take(self, piece: bytes) -> None:
        """Read a piece of the answer's body. Raises `RequestFailedError` where it is no stream of completions."""
        now = time.perf_counter()
        for data in self._lines.feed(piece):
            if data == b"[DONE]":
                self._done = True
                continue
            try:
                self._note(json.loads(data), now)
            except (ValueError, AttributeError, LookupError, TypeError) as error:
                shown = data[:80].decode(errors="replace")
                raise RequestFailedError(f"an event of the stream is no chunk of a completion: {shown}") from error

    def _note(self, event: Any, now: float) -> None:
        """Note one event of the stream, which came at the time `now`."""
        if event.get("error"):
            error = event["error"]
            raise RequestFailedError(f"in the stream: {error.get('message') if isinstance(error, dict) else error}")
        completion = self._completion
        if event.get("choices"):
            completion.chunk_times.append(now)
            text = event["choices"][0].get("text") or ""
            if not isinstance(text, str):
                raise TypeError(text)
            if text:
                completion.text_times.append(now)
                self._texts.append(text)
        if event.get("usage"):
            completion.prompt_tokens = int(event["usage"]["prompt_tokens"])
            completion.completion_tokens = int(event["usage"]["completion_tokens"])

    def finish(self) -> None:
        """Note the text. Raises `RequestFailedError` if the stream ended early or told no usage."""
        if not self._done:
            raise RequestFailedError("the stream ended without [DONE]")
        if not self._completion.completion_tokens or not self._completion.chunk_times:
            raise RequestFailedError("the stream told no usage of tokens, which stream_options.include_usage asks for")
        self._completion.text = "".join(self._texts)
