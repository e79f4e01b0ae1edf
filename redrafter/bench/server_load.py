"""Load for a server of OpenAI's protocol: so many streams of `/v1/completions` at once, each timed chunk by chunk."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redrafter.bench.http_stream import Address, Connection, EventLines, RequestFailedError
from redrafter.errors import ArgumentError, ReDrafterError

__all__ = ["Completion", "CompletionStream", "Load", "LoadError", "LoadRun", "Server", "find_server", "run_load"]

MAX_REQUEST_SECONDS = 3600.0  # a request that takes longer has failed


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


class LoadError(ReDrafterError):
    """No request of a load was answered."""


@dataclass(frozen=True)
class Server:
    """A server to be measured.

    Attributes:
        address: Where it listens.
        model: Name of the model to ask for.
        kind: What the server says who owns the model, such as `vllm`; None where it does not say.
        version: What it answers to `/version`; None where it does not say.
        key: API key; None for none.
    """

    address: Address
    model: str
    kind: str | None = None
    version: str | None = None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Load:
    """The requests that a server is sent; request i continues prompt i, modulo their number.

    Attributes:
        prompts: Texts to continue.
        max_new_tokens: Tokens of each completion; no end token ends one early.
        temperature: 0 for greedy decoding.
        seed: Seed of request 0; request i has this plus i.
    """

    prompts: Sequence[str]
    max_new_tokens: int
    temperature: float
    seed: int

    def body(self, index: int, model: str) -> bytes:
        """Return the JSON body of a request.

        Args:
            index: Number of the request.
            model: Name of the model to ask for.
        """
        body = {
            "model": model,
            "prompt": self.prompts[index % len(self.prompts)],
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed + index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    def text_key(self, index: int) -> int:
        """Return a number that two requests share if and only if they ask for the same text."""
        return index if self.temperature else index % len(self.prompts)


@dataclass(frozen=True)
class LoadRun:
    """The requests of one load on one server.

    Attributes:
        concurrency: Requests in flight.
        completions: All requests, in the order in which they ended.
        began: When the first was sent.
        ended: When the last had ended.
        client_cpu_share: Processor time of this process in between, by the time that passed.
    """

    concurrency: int
    completions: list[Completion]
    began: float
    ended: float
    client_cpu_share: float

    @property
    def answered(self) -> list[Completion]:
        """Requests that did not fail."""
        return [completion for completion in self.completions if completion.error is None]


async def find_server(address: Address, model: str | None, key: str | None) -> Server:
    """Ask a server what it serves.

    Args:
        address: Where it listens.
        model: Name of the model to ask for; None for the first that it lists.
        key: API key; None for none.

    Raises:
        ArgumentError: It cannot be reached, or does not list its models.
    """
    try:
        models = await _get_json(address, "/v1/models", key)
        first = models["data"][0]
        name = model or str(first["id"])
    except RequestFailedError as error:
        hint = "; give --api-key" if str(error).startswith("HTTP 401") else ""
        raise ArgumentError(f"--url {address.url}: GET /v1/models: {error}{hint}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ArgumentError(f"--url {address.url}: /v1/models lists no model: is it OpenAI's protocol?") from error
    try:
        version = (await _get_json(address, "/version", key)).get("version")
    except (RequestFailedError, ValueError, AttributeError):
        version = None  # OpenAI's protocol has no such route
    return Server(address, name, first.get("owned_by"), version, key)


async def _get_json(address: Address, path: str, key: str | None) -> Any:
    pieces: list[bytes] = []
    connection = Connection(address, key)
    try:
        await connection.request("GET", path, b"", pieces.append)
    finally:
        connection.close()
    return json.loads(b"".join(pieces))


async def run_load(server: Server, load: Load, concurrency: int, num_requests: int) -> LoadRun:
    """Keep `concurrency` requests in flight until `num_requests` have ended, after one of each slot that is not timed.

    Args:
        server: The server to ask.
        load: What to ask for.
        concurrency: Requests in flight.
        num_requests: Requests to send.

    Raises:
        LoadError: Every request before the timed ones failed.
    """
    connections = [Connection(server.address, server.key) for _ in range(concurrency)]
    try:
        warm_up = await _drive(connections, server, load, concurrency)
        if all(completion.error for completion in warm_up):
            raise LoadError(f"no request was answered; the first: {warm_up[0].error}")
        began, cpu_began = time.perf_counter(), time.process_time()
        completions = await _drive(connections, server, load, num_requests)
        ended = time.perf_counter()
        cpu_share = (time.process_time() - cpu_began) / (ended - began)
        return LoadRun(concurrency, completions, began, ended, cpu_share)
    finally:
        for connection in connections:
            connection.close()


async def _drive(connections: list[Connection], server: Server, load: Load, num_requests: int) -> list[Completion]:
    """Send requests over all connections, the next one over each as soon as the last has ended."""
    completions: list[Completion] = []
    indices = iter(range(num_requests))  # which all slots take from

    async def fill_slot(connection: Connection, indices: Iterator[int]) -> None:
        for index in indices:
            completions.append(await _complete(connection, index, load.body(index, server.model)))

    await asyncio.gather(*(fill_slot(connection, indices) for connection in connections))
    return completions


async def _complete(connection: Connection, index: int, body: bytes) -> Completion:
    """Send one request, and time its stream; a failure is noted, not raised."""
    completion = Completion(index, time.perf_counter())
    stream = CompletionStream(completion)
    request = connection.request("POST", "/v1/completions", body, stream.take)
    try:
        await asyncio.wait_for(request, MAX_REQUEST_SECONDS)
        stream.finish()
        completion.sent = connection.sent_at  # many may begin at once, and each waits for its turn in this process
    except RequestFailedError as error:
        completion.error = str(error)
    except asyncio.TimeoutError:
        completion.error = f"not answered within {MAX_REQUEST_SECONDS:g} s"
    completion.ended = time.perf_counter()
    return completion
