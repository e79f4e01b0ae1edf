"""The process of one grammar: it compiles the grammar, then computes masks for the texts that follow it.

`redrafter.grammar.zygote` forks it, and it ends when the other end of its socket is closed. A grammar can harm no other
process: the kernel limits memory and time, and ends this process at the limit.
"""

import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redrafter.errors import ArgumentError
from redrafter.grammar import limits
from redrafter.grammar.compiled import CompiledGrammar
from redrafter.grammar.source import GrammarSource
from redrafter.grammar.state import GrammarState
from redrafter.grammar.wire import Question, pack_answers, receive_frame, send_frame, unpack_questions

__all__ = ["run_child"]

COMPILE_NICENESS = 10  # of a compilation, so that texts that are being generated go first

_Answer = tuple[dict[int, bytes], bool, str | None]


def run_child(connection: socket.socket, vocabulary: Any) -> None:
    """Compile the grammar that is sent, then answer questions about its texts until the connection is closed.

    An empty frame is sent first, then `+` and the bytes that the compiled grammar takes, or `-` and an error message.

    Args:
        connection: Socket to the program that uses the grammar.
        vocabulary: llguidance's view of the tokenizer.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reserved, held = _memory()
    if reserved:
        limit = reserved + limits.MAX_PROCESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        send_frame(connection)
        kind, _, text = receive_frame(connection).decode().partition("\n")
        grammar = _compile(connection, GrammarSource(kind, text), vocabulary)  # type: ignore[arg-type]
        if grammar is not None:
            send_frame(connection, b"+%d" % (_memory()[1] - held))
            _answer_questions(connection, grammar)
    except (EOFError, OSError):
        return  # the program is gone


def _compile(connection: socket.socket, source: GrammarSource, vocabulary: Any) -> CompiledGrammar | None:
    """Compile a grammar; report an error to the program and return None where it cannot be."""
    try:
        with _killed_on_disconnect(connection), _cpu_time_limit(limits.COMPILE_CPU_SECONDS):
            return CompiledGrammar(source, vocabulary, COMPILE_NICENESS)
    except ArgumentError as error:
        send_frame(connection, b"-", str(error).encode(errors="replace"))
        return None


def _answer_questions(connection: socket.socket, grammar: CompiledGrammar) -> None:
    """Answer the program's questions, one frame after another."""
    states: dict[int, GrammarState] = {}
    while True:
        forgotten, questions = unpack_questions(receive_frame(connection))
        for text in forgotten:
            states.pop(text, None)
        if questions:
            with _cpu_time_limit(limits.step_cpu_seconds(len(questions))):
                answers = pack_answers([_answer(states, grammar, question) for question in questions])
            send_frame(connection, *answers)


def _answer(states: dict[int, GrammarState], grammar: CompiledGrammar, question: Question) -> _Answer:
    """Advance one text and return its masks, whether it has ended, and its error if it has one."""
    if question.text not in states:
        states[question.text] = GrammarState(grammar, question.ends)
    state = states[question.text]
    if question.known > len(state.text):
        raise EOFError("the program refers to tokens that it has not sent")
    state.advance([*state.text[: question.known], *question.new])
    return state.masks(question.tokens, question.parents, question.levels), state.ended, state.error


@contextmanager
def _cpu_time_limit(count: float) -> Iterator[None]:
    """Let the kernel end this process once the context has taken `count` seconds of processor time."""
    signal.setitimer(signal.ITIMER_PROF, count)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _killed_on_disconnect(connection: socket.socket) -> Iterator[None]:
    """Let the kernel end this process when the other end of the connection is closed, even while Python is blocked.

    Nothing may arrive on the connection within the context: that would end the process as well.
    """
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    watch = select.poll()
    watch.register(connection, 0)  # no event but the closing of the other end
    if watch.poll(0):
        raise EOFError("the other side is gone")
    try:
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)


def _memory() -> tuple[int, int]:
    """Return the bytes of address space that this process has reserved, and the bytes it holds; 0 outside Linux."""
    if sys.platform != "linux":
        return 0, 0
    with open("/proc/self/statm") as file:
        reserved, held = file.read().split()[:2]
    return int(reserved) * resource.getpagesize(), int(held) * resource.getpagesize()
