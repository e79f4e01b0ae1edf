"""An engine at the other end of a line, in a thread of this process instead of a process of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

from helpers.serving import Address, listening
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import Stats
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import EngineClient, ServedSequence
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.engine_process.messages import Submit
from redrafter.serve.engine_process.process import serve
from redrafter.serve.engine_process.start import Channel, EngineFacts
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.routes.app import server_app
from redrafter.serve.server import Server, load_server

GREEDY = SamplingParams(temperature=0)
OPENAI_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class EngineThread:
    """Serves a scheduler, as `EngineProcess` does in another process."""

    exit_code: int | None = None

    def __init__(self, scheduler: Scheduler, tokenizer: Any, facts: EngineFacts | None = None):
        ours, theirs = Pipe()
        self.facts = facts
        self.channel = Channel(ours)
        self._thread = threading.Thread(target=self._serve, args=(Channel(theirs), scheduler, tokenizer), daemon=True)
        self._thread.start()

    def _serve(self, *served: Any) -> None:
        self.exit_code = serve(*served)

    def wait_until_loaded(self) -> EngineFacts | None:
        return self.facts

    def end(self) -> None:
        self._thread.join(timeout=300)

    def describe_end(self) -> str:
        self.end()
        return "the engine has ended"


def client_of(scheduler: Scheduler, tokenizer: Any = None, facts: EngineFacts | None = None) -> EngineClient:
    """A client that has not started, of a scheduler that nobody else may run."""
    if facts is None:
        facts = EngineFacts("tiny", (), scheduler.bounds, frozenset(), OPENAI_DEFAULTS, True)
    thread = EngineThread(scheduler, tokenizer)
    return EngineClient(thread.channel, facts, thread)


def begun(scheduler: Scheduler, on_failure: Callable[[str], object] = lambda reason: None) -> EngineClient:
    """Return a client of a scheduler, which has started; `on_failure` gets the reason for which the engine ends."""
    client = client_of(scheduler)
    client.start(on_failure)
    return client


def asked(
    client: EngineClient, /, prompts: Any, count: int, params: Any = GREEDY, find_stop: Any = None, **more: Any
) -> Any:
    """The stream of the texts after some prompts."""
    sequences = [ServedSequence(prompt, frozenset(), Stats(accepted_by_depth=[0] * 4), find_stop) for prompt in prompts]
    return client.deltas(Submit(prompts, count, params, **more), sequences)


async def written(
    client: EngineClient, /, prompt: list[int], count: int, params: Any = GREEDY, **more: Any
) -> list[int]:
    """The tokens after a prompt."""
    stream = asked(client, [prompt], count, params, **more)
    return [token async for _, deltas in stream for delta in deltas for token in delta.tokens]


def server_of(pair: Pair, options: ServeOptions | None = None, load: LoadOptions | None = None) -> Server:
    """A server of a loaded pair; its engine has not started."""
    engine = ServedEngine.from_pair(pair, options or ServeOptions(), load or LoadOptions())
    client = client_of(engine.scheduler, pair.tokenizer, engine.facts)
    return Server(client, pair.tokenizer, options or ServeOptions())


class ServerHere(Address):
    """A server that answers at an address, in this process: it starts sooner than a `Program`."""

    def __init__(self, server: Server, url: str):
        self.server, self.url = server, url


@contextmanager
def serving(load: LoadOptions, draft: DraftOptions | None = None, **options: Any) -> Iterator[ServerHere]:
    """A server of what some options load, as long as the context lasts."""
    pair, served = Pair.load(load, draft), ServeOptions(**options)
    engine = ServedEngine.from_pair(pair, served, load)
    server = load_server(EngineThread(engine.scheduler, pair.tokenizer, engine.facts), served, load, ApiKeys())
    server.engine.start()
    try:
        with listening(server_app(server)) as url:
            yield ServerHere(server, url)
    finally:
        server.close()
