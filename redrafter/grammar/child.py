"""The process of one grammar: it compiles the grammar, then computes masks for the texts that follow it.

`redrafter.sandbox.child` forks it, and it ends when the other end of its socket is closed. A grammar can harm no other
process: the kernel limits memory and time, and ends this process at the limit.
"""

import json
import socket
from collections.abc import Callable
from typing import Any

import llguidance

from redrafter.errors import ArgumentError
from redrafter.grammar import limits
from redrafter.grammar.compiled import CompiledGrammar
from redrafter.grammar.source import GrammarSource
from redrafter.grammar.state import GrammarState
from redrafter.grammar.wire import Question, pack_answers, unpack_questions
from redrafter.sandbox.child import bounded_work, limit_memory, memory
from redrafter.sandbox.frames import receive_frame, send_frame

__all__ = ["prepare"]

COMPILE_NICENESS = 10  # of a compilation, so that texts that are being generated go first

_Answer = tuple[dict[int, bytes], bool, str | None]


def prepare(end: bytearray, tokenizer: bytearray) -> Callable[[socket.socket], None]:
    """Read a tokenizer, and return what a process for one grammar over its vocabulary does.

    Args:
        end: Id of the tokenizer's EOS token as JSON; null if it has none.
        tokenizer: The tokenizer as `tokenizers` writes it to a file.
    """
    description = json.loads(bytes(tokenizer)) | {"padding": None, "truncation": None}
    text = json.dumps(description, ensure_ascii=False)
    vocabulary = llguidance.LLTokenizer(text, eos_token=json.loads(bytes(end)))
    return lambda connection: _follow(connection, vocabulary)


def _follow(connection: socket.socket, vocabulary: Any) -> None:
    """Compile the grammar that is sent, then answer questions about its texts until the connection is closed.

    What is sent first is `+` and the bytes that the compiled grammar takes, or `-` and an error message.
    """
    held = memory()[1]
    limit_memory(limits.MAX_PROCESS_BYTES)
    kind, _, text = receive_frame(connection).decode().partition("\n")
    try:
        with bounded_work(limits.COMPILE_CPU_SECONDS, connection):
            grammar = CompiledGrammar(GrammarSource(kind, text), vocabulary, COMPILE_NICENESS)  # type: ignore[arg-type]
    except ArgumentError as error:
        return send_frame(connection, b"-", str(error).encode(errors="replace"))
    send_frame(connection, b"+%d" % (memory()[1] - held))
    _answer_questions(connection, grammar)


def _answer_questions(connection: socket.socket, grammar: CompiledGrammar) -> None:
    """Answer the program's questions, one frame after another."""
    states: dict[int, GrammarState] = {}
    while True:
        forgotten, questions = unpack_questions(receive_frame(connection))
        for text in forgotten:
            states.pop(text, None)
        if questions:
            with bounded_work(limits.step_cpu_seconds(len(questions))):
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
