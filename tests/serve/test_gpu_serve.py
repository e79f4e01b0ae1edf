"""On a GPU: the server's rows, of every kind, in captured steps."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.chats import tiny_tokenizer
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import (
    KINDS,
    alone,
    make_sequence,
    nothing_is_held,
    random_sequences,
    rejection_sampled,
    run,
    without_drafts,
)
from redrafter import DraftTarget, Engine
from redrafter.engine.options import EngineOptions
from redrafter.grammar.grammar import Grammar
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import CapturedStep, GraphCapturer
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.waiting_queue import Limits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=False)


def served(engine: Engine, **limits: object) -> Scheduler:
    return Scheduler(engine, engine.make_memory(), Limits(**limits))


def recurrent(model_type: str = "llama", **changes: object) -> Engine:
    model = tiny_model(model_type, **changes).cuda()
    model.generation_config.eos_token_id = None
    size = {"vocab_size": changes["vocab_size"]} if "vocab_size" in changes else {}
    engine = with_tree(model, tiny_drafter(**size).cuda(), 4, 4)
    engine.options = OPTIONS
    return engine


def draft_model() -> Engine:
    models = [tiny_model("llama"), tiny_model("gpt2", num_hidden_layers=1)]
    models[0].generation_config.eos_token_id = None
    return DraftTarget(*(Target(model.cuda()) for model in models), options=OPTIONS)


def check_captured(engine: Engine, sequences: list, expected: Callable = alone, **limits: object) -> None:
    scheduler = served(engine, **limits)
    run(scheduler, sequences, apart=1)
    for each in sequences:
        assert each.sink.tokens == expected(engine, each)
    nothing_is_held(scheduler)
    assert all(step.graph is not None for step in scheduler.batch.captured_steps.values())


@pytest.mark.parametrize("make", [recurrent, draft_model])
def test_rows_without_drafts_share_captured_steps(make):
    check_captured(make(), without_drafts(random_sequences(24, seed=3)), max_batch_size=6)


def test_rows_come_and_go_without_a_wait_for_the_device(monkeypatch):
    scheduler, capture = served(recurrent(), max_batch_size=4), GraphCapturer.capture
    run(scheduler, random_sequences(24, seed=3), apart=1)

    def capture_waiting(self: GraphCapturer, step: CapturedStep) -> None:
        torch.cuda.set_sync_debug_mode("default")
        capture(self, step)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(GraphCapturer, "capture", capture_waiting)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(scheduler, random_sequences(24, seed=4), apart=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drafts_are_kept_by_their_odds_in_captured_steps():
    models = [tiny_model("llama"), tiny_model("qwen2", num_hidden_layers=1)]
    models[0].generation_config.eos_token_id = None
    targets = (Target(model.cuda()) for model in models)
    engine = DraftTarget(*targets, draft_len=3, acceptance="rejection", options=OPTIONS)
    check_captured(engine, without_drafts(random_sequences(24, seed=5)), rejection_sampled, max_batch_size=5)


@pytest.mark.parametrize("make", [recurrent, draft_model])
@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 5, "max_num_tokens": 60}], ids=str)
def test_requests_of_all_kinds_write_what_each_does_alone(make, limits):
    kinds = [make_sequence([5, 6, 7], 20, replace(each)) for each in KINDS.values()]
    check_captured(make(), [*random_sequences(40), *kinds], **limits)


def test_rows_with_and_without_a_grammar_share_steps():
    pytest.importorskip("llguidance")
    tokenizer = tiny_tokenizer()
    engine = recurrent(vocab_size=290, max_position_embeddings=256)
    grammar = Grammar({"regex": r"(ab|[0-9]{2}){1,4}(é|x)?"}, tokenizer)
    kind = replace(KINDS["sampled"], stop_token_ids=frozenset({2}), grammar=grammar)
    guided = [make_sequence([7, 8, seed], 40, replace(kind, seed=seed)) for seed in range(6)]
    sequences = [*guided, *random_sequences(12)]
    run(served(engine), sequences[::2] + sequences[1::2], apart=1)
    for each in guided:
        ids = torch.tensor([list(each.request.prompt)])
        settings = {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 0,
            "seed": each.request.params.seed,
            "max_new_tokens": 40,
        }
        settings |= {"eos_token_id": 2, "speculate": False, "grammar": grammar, "tokenizer": tokenizer}
        found = engine.generate(ids, torch.ones_like(ids), **settings)
        assert each.sink.tokens == found[0, 3:].tolist()
