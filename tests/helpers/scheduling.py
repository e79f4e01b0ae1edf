"""Sequences for a scheduler, and what `generate` writes for each of them alone."""

import math
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from helpers.models import VOCAB, memory_with_host, new_pool
from helpers.seeing_models import Layout, prompts_with_images
from redrafter import Engine
from redrafter.model.images import ImageInputs
from redrafter.sampling.params import SamplingParams
from redrafter.sampling.processors import ThinkingBudget
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.row_caches import DenseRows
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sampling_tensors import SamplingTensors
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.scheduler.waiting_queue import Limits

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, seed=11),
    "top_k": SamplingParams(temperature=1.3, top_k=12, seed=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.8, seed=6),
    "min_p": SamplingParams(min_p=0.05, seed=7),
    "penalised": SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=-0.3),
    "biased": SamplingParams(seed=8, logit_bias={4: 3.0, 6: -100.0}),
    "minimum": SamplingParams(temperature=0, min_new_tokens=9, stop_token_ids=frozenset({2, 11, 30, 31, 32})),
    "ends": SamplingParams(seed=12, stop_token_ids=frozenset(range(2, 30))),
}


class Sink:
    """Keeps the deltas that it is called with, and a prompt's images, which an engine drops when it has read them."""

    def __init__(self, images: Mapping[str, Any] | None = None) -> None:
        self.deltas: list[SequenceDelta] = []
        self.images = dict(images or {})

    def __call__(self, sequence: TokenSequence, delta: SequenceDelta) -> None:
        assert not self.deltas or self.deltas[-1].finish is None
        self.deltas.append(delta)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]


def make_sequence(prompt: list[int], max_new_tokens: int, params: SamplingParams) -> TokenSequence:
    return TokenSequence(GenerationRequest(prompt, max_new_tokens, params), Sink())


def change(sequence: TokenSequence, **fields: object) -> None:
    """Change what is requested of a sequence that was not submitted yet."""
    sequence.request = replace(sequence.request, **fields)


def seeing_sequence(
    engine: Engine, layout: Layout, seed: int, params: SamplingParams, count: int = 20
) -> TokenSequence:
    """Return a sequence behind a random prompt with images."""
    inputs = prompts_with_images(engine.model, [layout], seed)
    ids = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    request = GenerationRequest(ids, count, replace(params, seed=seed), images=ImageInputs(inputs))
    return TokenSequence(request, Sink(inputs))


def launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let schedulers on a paged cache launch steps ahead of the host and read prompts in them, as on a GPU."""
    make = Scheduler.__init__

    def made(self: Scheduler, engine: Engine, memory: PagedMemory | None, *args: object, **more: object) -> None:
        make(self, engine, memory, *args, **more)
        self.overlap = memory is not None
        self.mixed_prefill = self.overlap and self.prefiller.can_mix

    monkeypatch.setattr(Scheduler, "__init__", made)


def scheduler(
    engine: Engine,
    blocks: int = 200,
    speculate: bool = True,
    host_blocks: int = 0,
    **limits: object,
) -> Scheduler:
    models = [engine.target] if engine.draft_model is None else [engine.target, engine.draft_model]
    memory = memory_with_host(engine, [new_pool(engine, model, blocks) for model in models], host_blocks)
    return Scheduler(engine, memory, Limits(**limits), speculate)


def dense_scheduler(engine: Engine, max_batch_size: int, speculate: bool = True) -> Scheduler:
    """Return a scheduler of sequences of any kind on the dense cache."""
    target, draft_model = engine.target, engine.draft_model if speculate else None
    sampling = SamplingTensors(max_batch_size, target.vocab_size, target.device)
    batch = RunningBatch(target, sampling, max_batch_size, DenseRows(target, draft_model, max_batch_size))
    limits = Limits(max_batch_size, sys.maxsize, chunked=False, paced=False)
    return Scheduler(engine, None, limits, speculate, batch)


class ThoughtLimit(LogitsProcessor):
    """Forces the end of a thought, which begins with the output, where its budget is spent: one text at a time."""

    def __init__(self, budget: ThinkingBudget, start: int):
        self.budget, self.start = budget, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[0, self.start :].tolist()
        if len(written) != self.budget.tokens or self.budget.end in written:
            return scores
        return torch.full_like(scores, -math.inf).index_fill(1, torch.tensor([self.budget.end]), 0.0)


def arguments_of(sequence: TokenSequence) -> dict[str, Any]:
    """Return the arguments of `generate` by which it writes a sequence alone."""
    params = sequence.request.params
    names = ["repetition_penalty", "frequency_penalty", "presence_penalty"]
    names += [] if params.greedy else ["seed", "temperature", "top_k", "top_p", "min_p"]
    kinds = {"do_sample": not params.greedy} | {name: getattr(params, name) for name in names}
    if params.min_new_tokens:
        kinds["min_new_tokens"] = params.min_new_tokens
    if params.logit_bias:
        kinds["logit_bias"] = params.logit_bias
    if params.thinking is not None:
        assert not params.thinking.begin
        kinds["logits_processor"] = [ThoughtLimit(params.thinking, len(sequence.request.prompt))]
    ids = torch.tensor([list(sequence.request.prompt)])
    kinds["attention_mask"] = torch.ones_like(ids)  # a text that is continued may hold the id of padding
    kinds["adapter"] = None if sequence.request.adapter is None else sequence.request.adapter.name
    kinds |= getattr(sequence.sink, "images", {})
    ends = sorted(params.stop_token_ids) or None
    return kinds | {"input_ids": ids, "max_new_tokens": sequence.request.max_new_tokens, "eos_token_id": ends}


def alone(engine: Engine, sequence: TokenSequence, speculate: bool = False) -> list[int]:
    """Return what `generate` writes for a sequence, without drafts by default."""
    found = engine.generate(**arguments_of(sequence), speculate=speculate)
    return found[0, len(sequence.request.prompt) :].tolist()


def run(scheduler: Scheduler, sequences: list[TokenSequence], apart: int = 0) -> None:
    """Serve sequences until all have ended. apart: rounds between the arrival of one and the next."""
    for each in sequences:
        scheduler.submit(each)
        for _ in range(apart):
            scheduler.round()
    go_on(scheduler)
    for each in sequences:
        assert each.sink.deltas[-1].error is None, each.sink.deltas[-1].error


def go_on(served: Scheduler) -> None:
    """Run rounds until all sequences have ended, whether or not with an error."""
    for _ in range(10_000):
        if served.idle:
            return
        served.round()
    raise AssertionError("the rounds do not end")


def same_alone(engine: Engine, sequences: Iterable[TokenSequence]) -> None:
    """Fail unless each sequence has written what it writes alone."""
    for each in sequences:
        assert each.sink.tokens == alone(engine, each)


def run_as_alone(served: Scheduler, sequences: list[TokenSequence], apart: int = 0) -> None:
    """Serve sequences, and fail unless each writes what it writes alone and nothing is held at the end."""
    run(served, sequences, apart)
    same_alone(served.engine, sequences)
    nothing_is_held(served)


def until_stepping(served: Scheduler, *sequences: TokenSequence) -> None:
    """Submit sequences, and run rounds until so many rows step."""
    served.submit(*sequences)
    while len(served.batch.rows) < len(sequences):
        served.round()


def random_sequences(count: int, seed: int = 0, longest: int = 40, max_new_tokens: int = 24) -> list[TokenSequence]:
    made = random.Random(seed)
    kinds = list(KINDS.values())
    sequences = []
    for _ in range(count):
        prompt = [made.randrange(3, VOCAB) for _ in range(made.randrange(1, longest))]
        params = replace(made.choice(kinds), seed=made.randrange(1000))
        sequences.append(make_sequence(prompt, made.randrange(1, max_new_tokens), params))
    return sequences


def nothing_is_held(scheduler: Scheduler) -> None:
    for manager in filter(None, (scheduler.memory.blocks, scheduler.memory.draft_blocks)):
        assert manager.num_free_blocks == manager.num_blocks
    assert not scheduler.batch.state.active.any()


def without_drafts(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Let every other sequence verify no drafts, and return all of them."""
    for each in sequences[::2]:
        change(each, params=replace(each.request.params, num_speculative_tokens=0))
    return sequences


def rejection_sampled(engine: Engine, sequence: TokenSequence) -> list[int]:
    """Return what `generate` writes for a sequence, by rejection sampling unless the sequence takes no drafts."""
    params = sequence.request.params
    return alone(engine, sequence, speculate=not params.greedy and params.speculate)
