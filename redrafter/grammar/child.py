"""The process of one grammar: compiles it, then follows the texts that are written in it.

It is forked by `grammar_zygote` and ends when the other end of its socket is closed. Whatever a grammar does to it,
nobody else is harmed: memory and time are limited by the kernel, which ends the process.
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

COMPILE_NICENESS = 10  # of a compilation: texts that are being written go first

_Answer = tuple[dict[int, bytes], bool, str | None]


def run_child(connection: socket.socket, vocabulary: Any) -> None:
    """Say hello, compile the grammar that is sent, say how that went, and answer questions on its texts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, at_first = _memory()
    if before:
        resource.setrlimit(resource.RLIMIT_AS, (before + limits.MAX_PROCESS_BYTES, before + limits.MAX_PROCESS_BYTES))
    try:
        send_frame(connection)
        kind, _, text = receive_frame(connection).decode().partition("\n")
        grammar = _compile(connection, GrammarSource(kind, text), vocabulary)  # type: ignore[arg-type]
        if grammar is not None:
            send_frame(connection, b"+%d" % (_memory()[1] - at_first))
            _follow(connection, grammar)
    except (EOFError, OSError):
        return  # nobody asks any more


def _compile(connection: socket.socket, source: GrammarSource, vocabulary: Any) -> CompiledGrammar | None:
    try:
        with _ending_with(connection), _seconds(limits.COMPILE_CPU_SECONDS):
            return CompiledGrammar(source, vocabulary, COMPILE_NICENESS)
    except ArgumentError as error:
        send_frame(connection, b"-", str(error).encode(errors="replace"))
        return None


def _follow(connection: socket.socket, grammar: CompiledGrammar) -> None:
    states: dict[int, GrammarState] = {}
    while True:
        forgotten, questions = unpack_questions(receive_frame(connection))
        for text in forgotten:
            states.pop(text, None)
        if questions:
            with _seconds(limits.step_cpu_seconds(len(questions))):
                answers = pack_answers([_answer(states, grammar, each) for each in questions])
            send_frame(connection, *answers)


def _answer(states: dict[int, GrammarState], grammar: CompiledGrammar, asked: Question) -> _Answer:
    if asked.text not in states:
        states[asked.text] = GrammarState(grammar, asked.ends)
    state = states[asked.text]
    if asked.known > len(state.text):
        raise EOFError("whoever asks speaks of another text")
    state.advance([*state.text[: asked.known], *asked.new])
    return state.masks(asked.tokens, asked.parents, asked.levels), state.ended, state.error


@contextmanager
def _seconds(count: float) -> Iterator[None]:
    """Let the kernel end this process if it takes longer, in seconds of a processor."""
    signal.setitimer(signal.ITIMER_PROF, count)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _ending_with(connection: socket.socket) -> Iterator[None]:
    """Let the kernel end this process when the other end of the connection is closed, even while Python stands still.
    Nothing may come on it meanwhile."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    watch = select.poll()
    watch.register(connection, 0)  # for the other end's closing alone
    if watch.poll(0):
        raise EOFError("the other side is gone")
    try:
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)


def _memory() -> tuple[int, int]:
    """Return how many bytes this process has reserved and how many it holds; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0, 0
    with open("/proc/self/statm") as file:
        reserved, held = file.read().split()[:2]
    return int(reserved) * resource.getpagesize(), int(held) * resource.getpagesize()
