"""What a program and the processes of its grammars say to each other: the contents of frames, mostly lists of int32."""

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LENGTH = struct.Struct("=I")


class Question(NamedTuple):
    """The question for the masks of allowed next tokens of one text, at the nodes of a tree.

    Attributes:
        text: Number that stands for the text in the grammar's process.
        ends: Ids that end the text; needed when the text is new.
        known: How many of the tokens sent before are still part of the text.
        new: The tokens after those, up to the root of the tree.
        tokens: Tokens of the tree, root first.
        parents: Index of each node's parent.
        levels: How many levels of the tree need masks.
    """

    text: int
    ends: Sequence[int]
    known: int
    new: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    levels: int


class Answer(NamedTuple):
    """The answer to a question.

    Attributes:
        masks: The mask of allowed next tokens, by node, at the nodes that the grammar allows.
        ended: Whether the text has an end token.
        error: Why the grammar could not be followed further; None while all is well.
    """

    masks: Mapping[int, memoryview]
    ended: bool
    error: str | None


def pack_questions(forgotten: Sequence[int], questions: Sequence[Question]) -> bytes:
    """Return a frame's content with the numbers of texts to be forgotten, and questions about others."""
    numbers = array("i", (len(forgotten), *forgotten, len(questions)))
    for question in questions:
        text, ends, known, new, tokens, parents, levels = question
        numbers.extend((text, len(ends), known, len(new), len(tokens), levels))
        for part in (ends, new, tokens, parents):
            numbers.extend(part)
    return numbers.tobytes()


def unpack_questions(frame: bytes | bytearray) -> tuple[list[int], list[Question]]:
    """Return the texts to be forgotten and the questions that `pack_questions` wrote."""
    numbers = array("i", bytes(frame)).tolist()
    end = numbers[0] + 1
    forgotten, count = numbers[1:end], numbers[end]
    position, questions = end + 1, []

    def take(size: int) -> list[int]:
        nonlocal position
        position += size
        return numbers[position - size : position]

    for _ in range(count):
        text, ends, known, new, nodes, levels = take(6)
        questions.append(Question(text, take(ends), known, take(new), take(nodes), take(nodes), levels))
    return forgotten, questions


def pack_answers(answers: Sequence[tuple[Mapping[int, bytes], bool, str | None]]) -> list[bytes]:
    """Return answers as parts of a frame's content."""
    numbers, rest = array("i"), []
    for masks, ended, error in answers:
        message = b"" if error is None else error.encode(errors="replace")
        width = len(next(iter(masks.values()), b""))
        numbers.extend((ended, -1 if error is None else len(message), len(masks), width, *masks))
        rest += [message, *masks.values()]
    return [_LENGTH.pack(len(numbers)), numbers.tobytes(), *rest]


def unpack_answers(frame: bytes | bytearray, count: int) -> list[Answer]:
    """Return the `count` answers that `pack_answers` wrote."""
    view = memoryview(frame)
    [size] = _LENGTH.unpack(view[: _LENGTH.size])
    begin = _LENGTH.size + size * 4
    numbers, rest, answers = array("i", bytes(view[_LENGTH.size : begin])).tolist(), view[begin:], []
    for _ in range(count):
        ended, message_bytes, nodes, width = numbers[:4]
        error = None if message_bytes < 0 else bytes(rest[:message_bytes]).decode()
        rest = rest[max(message_bytes, 0) :]
        masks = {node: rest[index * width : (index + 1) * width] for index, node in enumerate(numbers[4 : 4 + nodes])}
        answers.append(Answer(masks, bool(ended), error))
        numbers, rest = numbers[4 + nodes :], rest[nodes * width :]
    return answers
