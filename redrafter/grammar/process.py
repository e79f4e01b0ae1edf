"""The process of one grammar, as the program sees it that asks for masks."""

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

ANSWER_SLACK_SECONDS = 5.0  # wall-clock time that a process may wait for a processor

_numbers = count()


class GrammarProcess:
    """A process that compiles one grammar and follows its texts. It ends with this object, or by `end`.

    Attributes:
        lock: Held from a question to its answer.
        order: Threads that take the locks of several processes take them in this order.
        ended: Whether the process is known to have ended.
        memory: Bytes that the compiled grammar takes.
        forgotten: Numbers of dropped texts, of which the process is told with the next question.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Fork a process from the tokenizer's zygote, which is started if there is none."""
        self._connection = connect(tokenizer)
        self._owner, self.ended = os.getpid(), False
        weakref.finalize(self, _close, self._connection, self._owner)
        self.forgotten: deque[int] = deque()
        self.lock, self.order, self.memory = threading.Lock(), next(_numbers), 0

    @property
    def alive(self) -> bool:
        """Whether this process can ask the grammar's process; a process forked from this one cannot."""
        if self.ended or self._owner != os.getpid():
            return False
        watch = select.poll()
        watch.register(self._connection, 0)  # no event but the closing of the other end
        return not watch.poll(0)

    def end(self) -> None:
        """End the process, from any thread; a thread that waits for an answer gets none."""
        self.ended = True
        if self._owner == os.getpid():
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def compile(self, source: GrammarSource) -> None:
        """Let the process compile a grammar, and wait for it.

        Raises:
            ArgumentError: The grammar cannot be compiled.
        """
        try:
            self._connection.settimeout(COMPILE_WAIT_SECONDS)
            send_frame(self._connection, f"{source.kind}\n{source.text}".encode())
            reply = receive_frame(self._connection)
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
            self._connection.settimeout(ANSWER_SLACK_SECONDS + 2 * step_cpu_seconds(len(questions)))
            send_frame(self._connection, pack_questions(forgotten, questions))
        except OSError:
            self.end()

    def answers(self, count: int) -> list[Answer] | None:
        """Receive the answers to `count` questions; None if the process has ended or took too long."""
        try:
            return unpack_answers(receive_frame(self._connection), count)
        except (EOFError, OSError):
            self.end()
            return None

    def forget(self, text: int) -> None:
        """Let the process forget a text: now, or with the next question if another thread is asking one."""
        if self._owner != os.getpid():
            return  # this process is a fork; the text is its parent's
        self.forgotten.append(text)
        if self.lock.acquire(blocking=False):
            try:
                self.ask([])
            finally:
                self.lock.release()


def _close(connection: socket.socket, owner: int) -> None:
    """Close a connection; in a fork of the process that owns it, close the copy alone."""
    if os.getpid() == owner:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()
