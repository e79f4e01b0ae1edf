"""A request whose text the model has no numbers for ends with the reason, and others get theirs."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

GOOD = [[5, 6, 7], [40, 41, 42, 43], [90] * 20]


def ask(url: str, prompt: list[int], **how: object) -> httpx.Response:
    body = {"model": "boxed", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **how}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def without(embedding: torch.nn.Module, token: int) -> Any:
    """Return a forward of an embedding that has no numbers for a token."""
    embed = embedding.forward
    return lambda ids: embed(ids).masked_fill((ids == token)[..., None], torch.nan)


def failures(server: Any) -> float:
    lines = server.metrics.text().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if '_total{finished_reason="error"' in line)


def test_others_are_answered_and_later_ones_too(server, url, loaded, monkeypatch):
    before, embedding = failures(server), loaded.engine.model.get_input_embeddings()
    bad = embedding.num_embeddings - 1
    expected = [ask(url, prompt).json()["choices"][0]["text"] for prompt in GOOD]
    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(embedding, "forward", without(embedding, bad))
        wrong = [pool.submit(ask, url, [*range(10, 60 + n), bad, 9, 8]) for n in range(3)]
        for text, prompt in zip(expected, GOOD, strict=True):
            assert pool.submit(ask, url, prompt).result().json()["choices"][0]["text"] == text
        for answer in (future.result() for future in wrong):
            assert answer.status_code == 500
            assert "no finite number after" in answer.json()["error"]["message"]
    assert [ask(url, prompt).json()["choices"][0]["text"] for prompt in GOOD] == expected
    assert failures(server) == before + 3
    assert ask(url, [*range(10, 60), bad, 9, 8]).status_code == 200  # nothing of it is found


def test_a_stream_has_what_was_written_before_and_then_the_reason(url, loaded, monkeypatch):
    engine = loaded.engine
    embedding, written = engine.model.get_input_embeddings(), ask(url, GOOD[0]).json()["choices"][0]["text"]
    ids = engine.generate(
        torch.tensor(GOOD[:1]), max_new_tokens=24, do_sample=False, speculate=False, eos_token_id=None
    )
    tokens = ids[0, len(GOOD[0]) :].tolist()
    last = next(n for n in range(6, 24) if tokens[n] not in tokens[:n] + GOOD[0])
    monkeypatch.setattr(embedding, "forward", without(embedding, tokens[last]))
    lines = ask(url, GOOD[0], stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
    assert text
    assert written.startswith(text)
    assert "no finite number after" in events[-1]["error"]["message"]
