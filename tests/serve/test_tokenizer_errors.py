"""Tokenizers that fail to decode: the request that asked for the text is told why, and no other notices."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.processes import soon
from redrafter.engine.detokenizer import DecodingError, Detokenizer, decode_texts, decode_tokens

PROMPT = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
ROUTES: dict[str, dict[str, Any]] = {
    "a completion": {"max_tokens": 900},
    "a stream": {"max_tokens": 900, "stream": True},
    "stop strings": {"max_tokens": 900, "stop": ["never written"]},
    "a stream with stop strings": {"max_tokens": 900, "stop": ["never written"], "stream": True},
    "log-probabilities": {"max_tokens": 900, "logprobs": 2},
    "several texts": {"max_tokens": 900, "n": 3},
}


class Strict:
    """A tokenizer that raises on ids from `known` on, as sentencepiece does, and on one that is `broken`."""

    def __init__(self, tokenizer: Any, known: int, broken: int | None = None):
        self.tokenizer, self.known, self.broken = tokenizer, known, broken

    def __len__(self) -> int:
        return self.known

    def decode(self, tokens: list[int], **options: Any) -> str:
        if any(token >= self.known or token == self.broken for token in tokens):
            raise IndexError("piece id is out of range.")
        return str(self.tokenizer.decode(tokens, **options))


@pytest.fixture
def broken(loaded, monkeypatch) -> Iterator[None]:
    """Let the tokenizer fail at a token that the greedy text after `PROMPT` has, a good way in."""
    decode: Callable[..., str] = loaded.tokenizer.decode
    ids = loaded.tokenizer(PROMPT["prompt"], return_tensors="pt").input_ids
    whole = loaded.engine.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None)
    text = whole[0, ids.shape[1] :].tolist()
    bad = next(token for index, token in enumerate(text) if index > 20 and token not in text[:index])

    def fail(tokens: list[int], **options: Any) -> str:
        if bad in tokens:
            raise RuntimeError("this id has no piece")
        return decode(tokens, **options)

    monkeypatch.setattr(loaded.tokenizer, "decode", fail)


@pytest.mark.parametrize("kind", ROUTES)
def test_a_request_whose_text_cannot_be_decoded_is_told_so_and_ends(kind, server, url, broken, monkeypatch):
    written, observe = [], server.engine.on_delta
    monkeypatch.setattr(server.engine, "on_delta", lambda *given: (written.extend(given[1].tokens), observe(*given)))
    body = PROMPT | ROUTES[kind]
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    if body.get("stream"):
        assert answer.status_code == 200
        error = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]
        assert len(answer.text.split("\n\n")) > 3  # the text before it
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert "the tokenizer failed to decode" in error["message"]
    assert "RuntimeError: this id has no piece" in error["message"]
    assert soon(lambda: server.engine.idle)
    assert len(written) < 900
    again = httpx.post(f"{url}/v1/completions", json=PROMPT | {"max_tokens": 5}, timeout=300)
    assert again.json()["usage"]["completion_tokens"] == 5


def test_ids_that_a_tokenizer_does_not_know_are_decoded_as_nothing(loaded):
    ids = loaded.tokenizer("The old man looked at the sea").input_ids
    strict = Strict(loaded.tokenizer, known=len(loaded.tokenizer))
    unknown = len(loaded.tokenizer) + 3
    mixed = [unknown, *ids[:4], unknown, unknown, *ids[4:]]
    assert decode_tokens(strict, mixed) == decode_tokens(loaded.tokenizer, mixed) == decode_tokens(strict, ids)
    for tokenizer in (strict, loaded.tokenizer):
        texts = [mixed, ids, [loaded.tokenizer.all_special_ids[0], *ids[:2]]]
        assert decode_texts(tokenizer, texts) == [decode_tokens(tokenizer, text) for text in texts]
    detokenizer = Detokenizer(strict)
    pieces = "".join(map(detokenizer.push, ([token] for token in mixed))) + detokenizer.finish()
    assert pieces == decode_tokens(loaded.tokenizer, ids, skip_special_tokens=True)
    strict.broken = ids[1]  # one that it knows
    with pytest.raises(DecodingError, match=r"IndexError: piece id is out of range"):
        decode_tokens(strict, [*ids, len(loaded.tokenizer)])
