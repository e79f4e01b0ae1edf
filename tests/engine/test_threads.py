"""Requests that share an engine, or a model, on the dense cache: each writes what it writes alone."""

import sys
import time
from collections.abc import Iterator

import pytest
import torch

from helpers.drafters import random_drafter
from helpers.models import in_threads, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import DraftTarget, Engine, PromptLookup
from redrafter.scheduler.cuda_graphs import CUDAGraphRunner

THREADS, ROUNDS = 6, 2
WAYS = [
    {"do_sample": False},
    {"do_sample": False, "speculate": False},
    {"do_sample": True, "temperature": 0.8, "seed": 5},
    {"do_sample": True, "top_k": 20, "seed": 5, "speculate": False},
]


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def engine_of(kind: str) -> Engine:
    model = tiny_model("gemma2" if kind == "layers" else "llama")
    if kind == "drafter":
        return with_tree(model, tiny_drafter(), 3, 3)
    if kind == "layers":
        return with_tree(model, random_drafter(target_layers=(0, 2)), 3, 3)
    if kind == "draft model":
        return DraftTarget.from_pretrained(model, tiny_model("gpt2", num_hidden_layers=1), draft_len=3, num_beams=2)
    return PromptLookup.from_pretrained(model)


@pytest.mark.parametrize("kind", ["drafter", "layers", "draft model", "lookup"])
def test_threads_that_share_an_engine_write_what_each_writes_alone(kind):
    engine = engine_of(kind)

    def work(index: int) -> torch.Tensor:
        ids, mask = uneven_batch(rows=1 + index % 3, longest=5 + index, seed=index)
        return engine.generate(ids, mask, max_new_tokens=12, **WAYS[index % len(WAYS)])

    alone = [work(index) for index in range(THREADS)]
    for _ in range(ROUNDS):
        for beside_others, expected in zip(in_threads(work, THREADS), alone, strict=True):
            assert torch.equal(beside_others, expected)
    hooked = [module for module in engine.model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert engine.model.get_output_embeddings() not in hooked


def test_threads_may_share_a_model_between_engines_and_with_plain_forwards():
    model = tiny_model("llama")
    engines = [with_tree(model, tiny_drafter(), 3, 3), PromptLookup.from_pretrained(model)]
    ids, mask = uneven_batch(rows=3)

    def work(index: int) -> torch.Tensor:
        ask = model.generate if index % 3 == 2 else engines[index % 3].generate
        return ask(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)

    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for _ in range(ROUNDS):
        assert all(torch.equal(text, expected) for text in in_threads(work, THREADS))


def test_first_requests_at_once_make_one_set_of_graphs(monkeypatch):
    made = []

    def slowly(*_: object, **__: object) -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(CUDAGraphRunner, "on", slowly)
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 2, 2)
    assert len(set(in_threads(lambda _: engine.open_graphs(), 4))) == len(made) == 1
