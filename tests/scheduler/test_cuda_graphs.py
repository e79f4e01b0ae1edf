"""Captured steps are shared between requests; here they run uncaptured, on a paged cache."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from helpers.generation import same_undrafted
from helpers.models import paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import DraftTarget, Engine
from redrafter.scheduler import captured_step
from redrafter.scheduler.captured_step import CapturedStep, GraphCapturer

NEW = 12
IDS, MASK = uneven_batch()
SAMPLED = {
    "top_p": ({"top_p": 0.9, "top_k": 0}, {"top_p": 0.4, "top_k": 0}),
    "top_k": ({"top_k": 12}, {"top_k": 3}),
    "min_p": ({"min_p": 0.05, "top_k": 0}, {"min_p": 0.3, "top_k": 0}),
    "temperature": ({"temperature": 0.7}, {"temperature": 1.4}),
    "temperature 1": ({"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.6}),
    "temperatures of rows": ({"temperature": 0.7, "top_p": 0.8}, {"temperature": [0.5, 1.5, 1.0, 0.2], "top_p": 0.9}),
    "penalties": (
        {"repetition_penalty": 1.4, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": -0.5},
    ),
    "lengths": ({"min_new_tokens": 12, "top_p": 0.8}, {"min_new_tokens": 3, "top_p": 0.6, "eos_token_id": [2, 30, 31]}),
    "all": (
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 0.9},
    ),
}
GREEDY = {
    "repetition_penalty": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.1}),
    "penalties": ({"frequency_penalty": 0.5}, {"presence_penalty": 1.5}),
    "lengths": ({"min_new_tokens": 9}, {"min_new_tokens": 4, "eos_token_id": [2, 30]}),
    "bias": ({"logit_bias": {4: 3.0, 6: -2.0}}, {"logit_bias": {7: -100.0}}),
    "min_length": ({"min_length": 16}, {"min_length": 19, "eos_token_id": [2, 30]}),
}
# Pairs of requests that differ in settings alone: the second makes no step of its own.
PAIRS = {f"sampled {name}": [{"do_sample": True, "seed": 3} | each for each in pair] for name, pair in SAMPLED.items()}
PAIRS |= {f"greedy {name}": [{"do_sample": False} | each for each in pair] for name, pair in GREEDY.items()}


@pytest.fixture
def engine() -> Engine:
    return paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[CapturedStep]:
    """Every step that is made from here on."""
    made: list[CapturedStep] = []
    monkeypatch.setattr(GraphCapturer, "capture", lambda self, step: made.append(step))
    return made


def write(engine: Engine, speculate: bool = True, **arguments: object) -> torch.Tensor:
    return engine.generate(IDS, MASK, max_new_tokens=NEW, speculate=speculate, **arguments)


def check_shared(steps: list[CapturedStep]) -> None:
    """Fail if a step was made twice for one number of rows; a batch whose rows end goes on in a smaller one.

    Those that read prompts are others.
    """
    sizes = [len(step.state.length) for step in steps if step.chunks is None]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("name", PAIRS)
def test_other_settings_make_no_step(engine, steps, name):
    first, second = PAIRS[name]
    texts = [write(engine, **settings) for settings in (first, second, first)]
    check_shared(steps)
    assert torch.equal(texts[0], texts[2])  # settings that were loaded in between are gone
    dense = with_tree(engine.model, engine.drafter, 3, 3)
    for settings, text in zip((first, second), texts, strict=False):
        assert torch.equal(write(dense, **settings), text)
        assert torch.equal(write(engine, speculate=False, **settings), text)


def test_steps_are_captured_once_for_the_same_constants_and_anew_for_others(engine, steps):
    made = []
    for size in (2, 2, 3):
        same_undrafted(engine, IDS, MASK, max_new_tokens=NEW, do_sample=False, no_repeat_ngram_size=size)
        made.append(sum(step.proposer is not engine.undrafted for step in steps))
    assert made[0] == made[1] < made[2]


def test_rows_that_are_left_keep_their_settings_in_a_smaller_batch(engine, steps):
    ids, mask = uneven_batch(rows=5)
    settings = {"temperature": [0.6, 0.9, 1.2, 0.8, 1.0], "top_p": 0.9, "repetition_penalty": 1.1, "seed": 4}
    settings |= {"do_sample": True, "max_new_tokens": 30, "eos_token_id": [2, 5, 11, 30, 31, 32, 40]}
    text = same_undrafted(engine, ids, mask, **settings)
    assert len({len(step.state.length) for step in steps}) > 1  # or no batch became smaller
    assert torch.equal(text, with_tree(engine.model, engine.drafter, 3, 3).generate(ids, mask, **settings))


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_draft_model_sees_the_settings_that_were_loaded(steps, acceptance):
    models = tiny_model("llama"), tiny_model("gpt2", num_hidden_layers=1)
    how = {"draft_len": 3, "acceptance": acceptance, "draft_from_text": False}
    engine, dense = (DraftTarget.from_pretrained(*models, **how) for _ in range(2))
    engine, common = paged(engine), {"do_sample": True, "seed": 3, "top_k": 0}
    write(engine, top_p=0.9, **common)
    text = write(engine, top_p=0.5, **common)
    check_shared(steps)
    assert torch.equal(text, write(dense, top_p=0.5, **common))


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_reset_their_graphs_at_exit(ranks, monkeypatch):
    reset, at_exit = [], []
    graph = type("Graph", (), {"reset": lambda self: reset.append(self), "pool": lambda self: None})
    monkeypatch.setattr(captured_step, "atexit", SimpleNamespace(register=lambda *call: at_exit.append(call)))
    monkeypatch.setattr(captured_step, "capture", lambda run, other, watched: graph())
    capturer = GraphCapturer(
        SimpleNamespace(ranks=SimpleNamespace(size=ranks), device=torch.device("cuda"), hooked=False)
    )
    steps = [SimpleNamespace(sampler=SimpleNamespace(capturable=True), run_step=None, graph=None) for _ in range(3)]
    for step in steps:
        capturer.capture(step)
    del steps[0]  # it was dropped before
    for call, *arguments in at_exit:
        call(*arguments)
    assert {*reset} == ({step.graph for step in steps} if ranks > 1 else set())


def test_steps_of_a_gpu_are_captured_on_one_stream_of_it(monkeypatch):
    """torch's default is a stream of the GPU that captures first, also for captures on another GPU."""
    captured: list[tuple[int, int]] = []

    class Stream:
        def __init__(self, gpu: int = -1):
            self.gpu = gpu

        def wait_stream(self, other: "Stream") -> None:
            pass

    def graph(_: object, *, stream: Stream, **__: object) -> nullcontext:
        captured.append((stream.gpu, id(stream)))
        return nullcontext()

    fakes = {"Stream": Stream, "graph": graph, "current_stream": Stream, "stream": nullcontext, "CUDAGraph": object}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    captured_step.capture_stream.cache_clear()
    for gpu in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda gpu=gpu: gpu)
        captured_step.capture(lambda: None)
    captured_step.capture_stream.cache_clear()  # these are no streams
    assert [gpu for gpu, _ in captured] == [0, 1, 0]
    assert captured[0] == captured[2]
