"""Collect what a reader of answers reports of a text that comes in pieces."""

import random
import re

from redrafter.serve.answers.reader import ChatReader


def split(text: str, trial: int, rng: random.Random) -> list[str]:
    """Return a text in `trial % 8` + 1 random pieces; in its characters in trial 8, and whole in trial 0."""
    cuts = list(range(len(text))) if trial == 8 else sorted(rng.randrange(len(text) + 1) for _ in range(trial % 8))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(reader: ChatReader, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return what a reader reports of pieces of a text: content, thoughts, and the calls' names and arguments."""
    texts, calls = {"content": "", "reasoning_content": ""}, list[list[str]]()
    for number, piece in enumerate(pieces):
        for delta, spans in reader.push(piece, last=number == len(pieces) - 1):
            assert "".join(reader.text[begin:end] for begin, end in spans) == delta.get("content", "")
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call["id"])
                    calls.append([call["function"]["name"], ""])
                else:
                    assert call["index"] == len(calls) - 1
                    assert call["function"]["arguments"]
                calls[-1][1] += call["function"]["arguments"]
            for name, text in delta.items():
                texts[name] += text
    return texts["content"], texts["reasoning_content"], [(name, arguments) for name, arguments in calls]
