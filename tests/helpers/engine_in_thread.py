"""An engine at the other end of a line, in a thread of this process instead of a process of its own."""

import socket
import threading
from typing import Any

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import EngineClient
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.engine_process.process import serve
from redrafter.serve.engine_process.start import Channel, EngineFacts
from redrafter.serve.server import Server

OPENAI_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class EngineThread:
    """Serves a scheduler, as `EngineProcess` does in another process."""

    exit_code: int | None = None

    def __init__(self, scheduler: Scheduler, tokenizer: Any):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._thread = threading.Thread(target=self._serve, args=(Channel(theirs), scheduler, tokenizer), daemon=True)
        self._thread.start()

    def _serve(self, *served: Any) -> None:
        self.exit_code = serve(*served)

    def end(self) -> None:
        self._thread.join(timeout=300)

    def describe_end(self) -> str:
        self.end()
        return "the engine has ended"


def client_of(scheduler: Scheduler, tokenizer: Any = None, facts: EngineFacts | None = None) -> EngineClient:
    """A client that has not started, of a scheduler that nobody else may run."""
    if facts is None:
        vocabulary, depth = scheduler.engine.target.vocab_size, scheduler.batch.depth
        facts = EngineFacts("tiny", (), vocabulary, scheduler.longest, frozenset(), OPENAI_DEFAULTS, depth, True)
    thread = EngineThread(scheduler, tokenizer)
    return EngineClient(thread.channel, facts, thread)


def server_of(pair: Pair) -> Server:
    """A server of a loaded pair; its engine has not started."""
    engine = ServedEngine.of(pair, ServeOptions(), LoadOptions())
    return Server(client_of(engine.scheduler, pair.tokenizer, engine.facts), pair.tokenizer, ServeOptions())
