"""The process of one grammar, as the program sees it that asks for masks."""

import json
import sys
import threading
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.grammar.limits import COMPILE_CPU_SECONDS, COMPILE_WAIT_SECONDS, MAX_PROCESS_BYTES, step_cpu_seconds
from redrafter.grammar.source import GrammarSource
from redrafter.grammar.wire import Answer, Question, pack_questions, unpack_answers
from redrafter.sandbox.frames import receive_frame, send_frame
from redrafter.sandbox.process import NotPreparedError, SandboxedProcess, Zygote, zygote_of

__all__ = ["GrammarProcess", "zygote_for"]

ANSWER_SLACK_SECONDS = 5.0  # wall-clock time that a process may wait for a processor

_numbers = count()


class GrammarProcess(SandboxedProcess):
    """A process that compiles one grammar and follows its texts. It ends with this object, or by `end`.

    Attributes:
        lock: Held from a question to its answer.
        order: Threads that take the locks of several processes take them in this order.
        memory: Bytes that the compiled grammar takes.
        forgotten: Numbers of dropped texts, of which the process is told with the next question.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Fork a process from the tokenizer's zygote, which is started if there is none.

        Raises:
            MissingDependencyError: llguidance is not installed, or the system is Windows.
            ArgumentError: llguidance cannot read the tokenizer.
            ReDrafterError: No process can be started.
        """
        super().__init__(lambda: zygote_for(tokenizer))
        self.forgotten: deque[int] = deque()
        self.lock, self.order, self.memory = threading.Lock(), next(_numbers), 0

    def compile(self, source: GrammarSource) -> None:
        """Let the process compile a grammar, and wait for it.

        Raises:
            ArgumentError: The grammar cannot be compiled.
        """
        try:
            self.connection.settimeout(COMPILE_WAIT_SECONDS)
            send_frame(self.connection, f"{source.kind}\n{source.text}".encode())
            reply = receive_frame(self.connection)
        except TimeoutError as error:
            self.end()
            raise ArgumentError(f"grammar: too complex: it was not compiled in {COMPILE_WAIT_SECONDS} s") from error
        except (EOFError, OSError) as error:
            self.end()
            raise ArgumentError(
                "grammar: too complex: its compilation ended unfinished; it may take "
                f"{COMPILE_CPU_SECONDS} s of a processor and {MAX_PROCESS_BYTES >> 20} MB of memory"
            ) from error
        if reply[:1] != b"+":
            self.end()
            raise ArgumentError(reply[1:].decode())
        self.memory = max(int(reply[1:]), 0)

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions; the caller holds the lock until it has called `answers`."""
        forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
        try:
            self.connection.settimeout(ANSWER_SLACK_SECONDS + 2 * step_cpu_seconds(len(questions)))
            send_frame(self.connection, pack_questions(forgotten, questions))
        except OSError:
            self.end()

    def answers(self, count: int) -> list[Answer] | None:
        """Receive the answers to `count` questions; None if the process has ended or took too long."""
        try:
            return unpack_answers(receive_frame(self.connection), count)
        except (EOFError, OSError):
            self.end()
            return None

    def forget(self, text: int) -> None:
        """Let the process forget a text: now, or with the next question if another thread is asking one."""
        if not self.owned:
            return  # this process is a fork; the text is its parent's
        self.forgotten.append(text)
        if self.lock.acquire(blocking=False):
            try:
                self.ask([])
            finally:
                self.lock.release()


def zygote_for(tokenizer: Any) -> Zygote:
    """Return the zygote of a tokenizer, a new one if there is none or it has died."""
    if sys.platform == "win32":
        raise MissingDependencyError("grammars need sockets that Windows has not: use Linux or macOS")
    if find_spec("llguidance") is None:
        raise MissingDependencyError(f"grammars need llguidance: {how_to_install('guided')}")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("only fast tokenizers are supported")

    def start() -> Zygote:
        end = json.dumps(tokenizer.eos_token_id).encode()
        return Zygote("redrafter.grammar.child", [end, backend.to_str().encode()])

    try:
        return zygote_of(tokenizer, start)
    except NotPreparedError as error:
        if not error.missing:
            raise _unreadable(str(error)) from error
        raise MissingDependencyError(
            f"grammars need llguidance, which cannot be imported: {error}; {how_to_install('guided')}"
        ) from error


def _unreadable(why: str) -> ArgumentError:
    """Make the error for a tokenizer that llguidance cannot read."""
    return ArgumentError(f"grammar: no grammar can be written with this tokenizer: {' '.join(why.split()):.300}")
