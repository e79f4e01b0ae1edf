"""The process of one grammar, seen from the program that asks it."""

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from redrafter.errors import ArgumentError
from redrafter.grammar.limits import COMPILE_CPU_SECONDS, COMPILE_WAIT_SECONDS, MAX_PROCESS_BYTES, step_cpu_seconds
from redrafter.grammar.source import GrammarSource
from redrafter.grammar.wire import Answer, Question, pack_questions, receive_frame, send_frame, unpack_answers
from redrafter.grammar.zygotes import connect

__all__ = ["GrammarProcess"]

ANSWER_SLACK_SECONDS = 5.0  # seconds of a clock, for a process that is ready and has to wait for a processor

_numbers = count()


class GrammarProcess:
    """A process that compiles one grammar and follows its texts. It ends with this object, or when told to.

    Attributes:
        lock: held from a question to its answer.
        order: the order in which several locks are taken.
        ended: whether it is known that nothing more can be asked.
        memory: how many bytes the compiled grammar takes.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Start it: fork it from the tokenizer's zygote, which is started where there is none."""
        self._connection = connect(tokenizer)
        self._owner, self.ended = os.getpid(), False
        weakref.finalize(self, _close, self._connection, self._owner)
        self._forgotten: deque[int] = deque()
        self.lock, self.order, self.memory = threading.Lock(), next(_numbers), 0

    @property
    def alive(self) -> bool:
        """Tell whether this process can ask the grammar's process. A process forked from this one cannot."""
        if self.ended or self._owner != os.getpid():
            return False
        watch = select.poll()
        watch.register(self._connection, 0)  # for the other end's closing alone
        return not watch.poll(0)

    def end(self) -> None:
        """End it; from any thread. Who waits for an answer is told that there is none."""
        self.ended = True
        if self._owner == os.getpid():
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def compile(self, source: GrammarSource) -> None:
        """Read a grammar; wait until it is compiled. Raises `ArgumentError` where it cannot be."""
        try:
            self._connection.settimeout(COMPILE_WAIT_SECONDS)
            send_frame(self._connection, f"{source.kind}\n{source.text}".encode())
            said = receive_frame(self._connection)
        except TimeoutError as error:
            self.end()
            raise ArgumentError(f"grammar: too complex: it was not compiled in {COMPILE_WAIT_SECONDS} s") from error
        except (EOFError, OSError) as error:
            self.end()
            raise ArgumentError(
                "grammar: too complex: its compilation ended unfinished; it may take "
                f"{COMPILE_CPU_SECONDS} s of a processor and {MAX_PROCESS_BYTES >> 20} MB of memory"
            ) from error
        if said[:1] != b"+":
            self.end()
            raise ArgumentError(said[1:].decode())
        self.memory = max(int(said[1:]), 0)

    def ask(self, questions: Sequence[Question]) -> None:
        """Send questions. The caller holds the lock until it has called `answers`."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        try:
            self._connection.settimeout(ANSWER_SLACK_SECONDS + 2 * step_cpu_seconds(len(questions)))
            send_frame(self._connection, pack_questions(forgotten, questions))
        except OSError:
            self.end()

    def answers(self, count: int) -> list[Answer] | None:
        """Receive the answers to so many questions; None where the process has ended, or is ended now."""
        try:
            return unpack_answers(receive_frame(self._connection), count)
        except (EOFError, OSError):
            self.end()
            return None

    def forget(self, text: int) -> None:
        """Let the process forget a text, at once where it is not being asked, else with the next question."""
        if self._owner != os.getpid():
            return  # the text of another process, whose copy this is
        self._forgotten.append(text)
        if self.lock.acquire(blocking=False):
            try:
                self.ask([])
            finally:
                self.lock.release()


def _close(connection: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # else it is a copy of another process's, who goes on
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()
