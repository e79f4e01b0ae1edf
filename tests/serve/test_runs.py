"""Runs of drafted and of other text in streams, which the page colours."""

import json
import random
from itertools import accumulate
from typing import Any

import httpx
import pytest

from helpers.chats import tiny_tokenizer

pytest.importorskip("fastapi")

from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import Choice, ChoiceContext
from redrafter.serve.protocol.requests import CompletionRequest

TEXT = "Zoë paid 3 € for 日本 🙂🙂, naïve as ever. "
TALK = [{"role": "user", "content": "Tell me of the sea"}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "find", "parameters": NOTHING}}


def streamed(url: str, kind: str, drafts: bool = True, **body: Any) -> list[dict[str, Any]]:
    """The parts, the one with the usage last."""
    body |= {"stream": True, "stream_options": {"include_usage": True, "include_drafts": drafts}}
    lines = httpx.post(f"{url}/v1/{kind}", json=body, timeout=300).raise_for_status().text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def text_in(choice: dict[str, Any]) -> str:
    return (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""


def choices_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for part in parts for choice in part["choices"]]


@pytest.mark.parametrize("stops", [[], ["€ for"], ["🙂, n", "paid 4"], [". Zoë paid 3 € for 日本 🙂!"]])
def test_every_character_is_of_the_token_that_completes_it(stops):
    tokenizer, made, whole = tiny_tokenizer(), random.Random(len(stops)), TEXT * 6
    shown = min((whole.index(stop) for stop in stops if stop in whole), default=len(whole))
    end = min((whole.index(stop) + len(stop) for stop in stops if stop in whole), default=len(whole))
    request = CompletionRequest(prompt="", stop=stops, stream=True, stream_options={"include_drafts": True})
    for _ in range(20):
        choice, runs, drafted = Choice([5], request, ChoiceContext(tokenizer)), [], []
        left = tokenizer(whole[:end]).input_ids  # the engine stops here
        while left:
            size = made.randint(1, 7)
            piece, left, accepted = left[:size], left[size:], made.randint(0, size)
            drafted += [place < accepted for place in range(len(piece))]
            new, _ = choice.append([SequenceDelta(piece, accepted, finish=None if left else "length")])
            added = choice.draft_runs()["drafts"]
            assert "".join(run["text"] for run in added) == new
            runs += added
        ends = accumulate(len(character.encode()) for character in whole[:shown])
        assert choice.text == whole[:shown]
        assert [run["accepted"] for run in runs for _ in run["text"]] == [
            drafted[end - 1] for end in ends
        ]  # a token for each byte


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completions", {"prompt": ["The sea", "She said"], "n": 2, "temperature": 0.8}),
        ("completions", {"prompt": "The sea", "echo": True}),
        ("completions", {"prompt": "The sea", "logprobs": 2, "stop": ["e", "zz"], "ignore_eos": True}),
        ("completions", {"prompt": "Say", "structured_outputs": {"choice": [TEXT]}, "stop": ["ever."]}),
        ("chat/completions", {"messages": TALK, "n": 3, "stop": [" th"], "logprobs": True}),
        ("chat/completions", {"messages": TALK, "tools": [TOOL], "tool_choice": "auto"}),
    ],
)
def test_runs_join_to_the_text_of_each_part_and_change_nothing(url, kind, body):
    settings = {"seed": 5, "max_tokens": 60} | body
    parts, plain = (choices_of(streamed(url, kind, drafts, **settings)) for drafts in (True, False))
    assert not any("drafts" in choice for choice in plain)
    for choice in parts:
        runs = choice.pop("drafts", [])
        assert "".join(run["text"] for run in runs) == text_in(choice)
        assert all(run["text"] for run in runs)
    logprobs: tuple[list[float], list[float]] = [], []
    assert without_floats(whole(parts), logprobs[0]) == without_floats(whole(plain), logprobs[1])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)  # the last digits depend on what is computed beside them
    assert any(map(text_in, parts))


def without_floats(told: Any, floats: list[float]) -> Any:
    """Return nested lists and dicts with None for all floats, which are added to `floats`."""
    if isinstance(told, float):
        floats.append(told)
        return None
    if isinstance(told, dict):
        return {key: without_floats(value, floats) for key, value in told.items()}
    return [without_floats(each, floats) for each in told] if isinstance(told, list | tuple) else told


def whole(choices: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Join all that the parts of each choice tell, which are as many as the server had time for."""
    joined: dict[int, list[Any]] = {}
    for choice in choices:
        told = joined.setdefault(choice["index"], ["", [], None, []])
        told[0] += text_in(choice)
        logprobs = choice["logprobs"] or {}
        told[1] += logprobs.get("content") or list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))
        told[2] = choice["finish_reason"] or told[2]
        told[3] += [call["function"] for call in choice.get("delta", {}).get("tool_calls", ())]
    return joined


def test_an_answer_that_is_a_call_has_no_runs_and_drafts_are_for_streams_only(url):
    settings = {"messages": TALK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "seed": 2}
    parts = choices_of(streamed(url, "chat/completions", **settings))
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert not any(choice.get("drafts") for choice in parts)
    body = {"prompt": "a", "stream_options": {"include_drafts": True}}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code == 400


@pytest.mark.parametrize("stopped", [False, True])
def test_runs_hold_as_many_drafts_as_the_usage_counts(url, stopped):
    body = {"prompt": "The old man looked at the sea and", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"]
    stop = " ".join(whole.split(" ")[20:22])[:-1] if stopped else None  # ends within a word
    *parts, last = streamed(url, "completions", logprobs=0, stop=stop, **body)
    choices = choices_of(parts)
    marks = [run["accepted"] for choice in choices for run in choice["drafts"] for _ in run["text"]]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    count = place = hidden = 0
    for token in tokens:
        mine = marks[place : place + len(token)]
        place += len(token)
        if place > len(marks):
            hidden += 1  # a part of the stop string, which is not shown
        else:
            [own] = set(mine)  # it is plain English: no token ends within a character
            count += own
    spec = last["metrics"]["speculative_decoding"]
    assert (hidden > 0) == stopped
    assert count > 5
    assert 0 <= spec["num_accepted_draft_tokens"] - count <= hidden
