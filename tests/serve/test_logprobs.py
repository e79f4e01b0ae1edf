"""Log-probabilities of prompts and of texts, and the best of several, as a server tells them."""

import re
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from helpers.serving import Program
from helpers.tokenizers import TEXTS, byte_level, sentencepiece_like
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import ChoiceContext
from redrafter.serve.answers.formats import ChatChoice, CompletionChoice
from redrafter.serve.protocol.requests import ChatRequest, CompletionRequest


def post(program: Program, path: str = "completions", **body: object) -> httpx.Response:
    return program.post(f"/v1/{path}", body)


TEXT = "The old man looked at the sea, caf\u00e9 \U0001f600 and"


def told_bytes(token: str) -> bytes:
    """The bytes of a token of a completion, of which those of a part of a character are escaped."""
    return re.sub(rb"\\x(..)", lambda found: bytes.fromhex(found[1].decode()), token.removeprefix("bytes:").encode())


def lines_of(kind: type, tokenizer: Any, ids: list[int], body: dict[str, Any]) -> tuple[str, Any]:
    """The text and the `logprobs` field of an answer that is streamed token by token."""
    request = (CompletionRequest if kind is CompletionChoice else ChatRequest).model_validate(body)
    whole, streamed = (kind([1], request, ChoiceContext(tokenizer)) for _ in range(2))
    likeliest = {token: -2.0 for token in range(len(tokenizer))}
    deltas = [SequenceDelta([token], logprobs=[(-1.0, likeliest)]) for token in ids]
    deltas.append(SequenceDelta([], finish="length", logprobs=[]))
    whole.append([SequenceDelta(ids, finish="length", logprobs=[(-1.0, likeliest)] * len(ids))])
    chunks = [streamed.format_chunks(0, *streamed.append([delta])) for delta in deltas]
    entry = whole.format_choice(0)
    name = "tokens" if kind is CompletionChoice else "content"
    assert [each for [chunk] in chunks for each in (chunk["logprobs"] or {name: []})[name]] == entry["logprobs"][name]
    return whole.text, entry["logprobs"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_the_bytes_of_a_texts_tokens_join_to_it_whatever_the_vocabulary(make):
    tokenizer = make(TEXTS, 600)
    ids = tokenizer("The fox says: caf\u00e9 \U0001f978\U0001f978 \u4f60 over", add_special_tokens=False).input_ids
    text, logprobs = lines_of(
        ChatChoice,
        tokenizer,
        ids,
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
    )
    entries = logprobs["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode() != b""
    for entry in entries:  # the bytes of a token do not depend on which token was drawn
        same = [other for other in entry["top_logprobs"] if other["bytes"] == entry["bytes"]]
        assert entry["token"] in [other["token"] for other in same]
    text_again, told = lines_of(CompletionChoice, tokenizer, ids, {"prompt": "a", "logprobs": 5})
    assert text_again == text
    assert b"".join(map(told_bytes, told["tokens"])) == text.encode()
    read, inside = 0, b""
    for token, offset, top in zip(
        map(told_bytes, told["tokens"]), told["text_offset"], told["top_logprobs"], strict=True
    ):
        assert offset == read
        inside += token
        with suppress(UnicodeDecodeError):
            read, inside = read + len(inside.decode()), b""
        assert len(top) == len(tokenizer)


def test_log_probabilities_of_a_prompt_are_those_of_the_model_echoed_or_asked_for(program, pair):
    model, tokenizer = pair[0].model, pair[1]
    answer = post(program, prompt=TEXT, max_tokens=0, echo=True, logprobs=2).json()
    [choice] = answer["choices"]
    ids = tokenizer(TEXT).input_ids
    with torch.no_grad():
        lines = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    told = choice["logprobs"]
    expected = lines[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = lines[:-1].max(dim=-1).values.tolist()
    assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    offsets = told["text_offset"]
    assert offsets == sorted(offsets)
    assert TEXT[offsets[-1] :] == tokenizer.decode(ids[-1:])
    pieces = [told_bytes(token) for token in told["tokens"]]
    assert b"".join(pieces[1:]) == TEXT.encode()  # the first is not shown in a text
    assert [piece.decode(errors="replace") for piece in pieces] == [tokenizer.decode([token]) for token in ids]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_what_follows_is_told_behind_the_prompt_also_in_a_stream(program):
    body = {"prompt": [TEXT, "She said"], "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 3, "n": 2}
    whole = post(program, **body).json()["choices"]
    found = [{name: [] for name in whole[0]["logprobs"]} for _ in whole]
    for part in program.parts("/v1/completions", body | {"stream": True}):
        [choice] = part["choices"]
        for name, values in choice["logprobs"].items():
            found[choice["index"]][name] += values
    assert [choice["logprobs"]["tokens"] for choice in whole] == [each["tokens"] for each in found]
    assert [choice["logprobs"]["text_offset"] for choice in whole] == [each["text_offset"] for each in found]
    for mine, theirs in zip(found, whole, strict=True):
        told = theirs["logprobs"]["token_logprobs"]
        assert told[0] is None
        assert mine["token_logprobs"][1:] == pytest.approx(told[1:], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"max_tokens": 0}, 400, "echo=true"),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs is not supported"),
        ({"best_of": 2}, 400, "best_of is not supported"),
        ({"prompt": ["a b c d e f g " * 20] * 200, "echo": True, "logprobs": 20}, 400, "ask for fewer"),
    ],
)
def test_what_cannot_be_told_is_refused(body, status, says, program):
    answer = post(program, **{"prompt": "a"} | body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
