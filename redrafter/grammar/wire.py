"""What passes between a program and the processes of its grammars: frames of bytes, most of them lists of int32."""

import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Answer", "Question", "receive_frame", "send_frame"]

_LENGTH = struct.Struct("=I")
MAX_FRAME_BYTES = 1 << 30  # bytes


def send_frame(to: socket.socket, *parts: bytes) -> None:
    """Send a frame, the parts one after the other. Raises `OSError` where nobody takes it."""
    frame = b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))
    to.sendall(frame)


def receive_frame(source: socket.socket) -> bytearray:
    """Receive a frame. Raises `EOFError` where the other side is gone, `TimeoutError` as the socket has it."""
    [size] = _LENGTH.unpack(_receive(source, _LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise EOFError("this is no frame")
    return _receive(source, size)


def _receive(source: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        try:
            count = source.recv_into(rest)
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other side is gone")
        rest = rest[count:]
    return found


class Question(NamedTuple):
    """What may follow in a text at the nodes of a tree.

    Args:
        text: a number that stands for the text in its grammar's process.
        ends: ids that end the text; needed where it is new.
        known: how many of the tokens that were told before still stand.
        new: the tokens behind those, up to the root of the tree.
        tokens: of the tree, root first.
        parents: the node above each node.
        levels: how many levels of the tree to look at.
    """

    text: int
    ends: Sequence[int]
    known: int
    new: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    levels: int


class Answer(NamedTuple):
    """A mask for each node that the grammar lets the text come to, how the text stands, and what is wrong with it."""

    masks: Mapping[int, memoryview]
    ended: bool
    error: str | None


def pack_questions(forgotten: Sequence[int], questions: Sequence[Question]) -> bytes:
    """Write texts that may be forgotten, and questions on others."""
    numbers = array("i", (len(forgotten), *forgotten, len(questions)))
    for each in questions:
        numbers.extend((each.text, len(each.ends), each.known, len(each.new), len(each.tokens), each.levels))
        for part in (each.ends, each.new, each.tokens, each.parents):
            numbers.extend(part)
    return numbers.tobytes()


def unpack_questions(frame: bytes | bytearray) -> tuple[list[int], list[Question]]:
    """Read what `pack_questions` wrote."""
    numbers = array("i", bytes(frame)).tolist()
    end = numbers[0] + 1
    forgotten, count = numbers[1:end], numbers[end]
    place, questions = end + 1, []

    def take(size: int) -> list[int]:
        nonlocal place
        place += size
        return numbers[place - size : place]

    for _ in range(count):
        text, ends, known, new, nodes, levels = take(6)
        questions.append(Question(text, take(ends), known, take(new), take(nodes), take(nodes), levels))
    return forgotten, questions


def pack_answers(answers: Sequence[tuple[Mapping[int, bytes], bool, str | None]]) -> list[bytes]:
    """Write answers, as parts of a frame."""
    numbers, rest = array("i"), []
    for masks, ended, error in answers:
        said = b"" if error is None else error.encode(errors="replace")
        width = len(next(iter(masks.values()), b""))
        numbers.extend((ended, -1 if error is None else len(said), len(masks), width, *masks))
        rest += [said, *masks.values()]
    return [_LENGTH.pack(len(numbers)), numbers.tobytes(), *rest]


def unpack_answers(frame: bytes | bytearray, count: int) -> list[Answer]:
    """Read so many answers."""
    view = memoryview(frame)
    [size] = _LENGTH.unpack(view[: _LENGTH.size])
    begin = _LENGTH.size + size * 4
    numbers, rest, answers = array("i", bytes(view[_LENGTH.size : begin])).tolist(), view[begin:], []
    for _ in range(count):
        ended, said, nodes, width = numbers[:4]
        error = None if said < 0 else bytes(rest[:said]).decode()
        rest = rest[max(said, 0) :]
        masks = {node: rest[place * width : (place + 1) * width] for place, node in enumerate(numbers[4 : 4 + nodes])}
        answers.append(Answer(masks, bool(ended), error))
        numbers, rest = numbers[4 + nodes :], rest[nodes * width :]
    return answers
