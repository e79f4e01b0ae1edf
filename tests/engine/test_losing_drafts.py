"""Drafts of a draft model that lose time are omitted, call after call, and gain again once they pay."""

from collections.abc import Callable
from copy import deepcopy

import pytest

from helpers.generation import ON_BOTH_CACHES, same_undrafted
from helpers.models import tiny_model, uneven_batch
from redrafter import DraftTarget
from redrafter.drafting.loss_budget import ALLOWED
from redrafter.engine.engine import Engine
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import CapturedStep

SAMPLED = {"do_sample": True, "seed": 3}
DRAFTED = 4.0  # time of a drafted step, in undrafted ones
PROMPTS = uneven_batch(3)


class Work:
    """Replaces the clock: steps and prompts that a draft model reads take the time that a test sets."""

    def __init__(self, monkeypatch, draft: Target, drafted: float, read: float = 0.01):
        self.seconds, self.steps, self.read_tokens = 0.0, list[bool](), 0
        run, prefill = CapturedStep.run_step, draft.prefill

        def counted(step: CapturedStep) -> None:
            self.steps.append(step.proposer.depth > 0)
            self.seconds += drafted if self.steps[-1] else 1.0
            run(step)

        def reading(prompts, **options):
            count = sum(prompts.ends) - sum(prompts.starts)
            self.read_tokens += count
            self.seconds += read * count
            return prefill(prompts, **options)

        monkeypatch.setattr(CapturedStep, "run_step", counted)
        monkeypatch.setattr(draft, "prefill", reading)
        monkeypatch.setattr(Engine, "clock", staticmethod(lambda: self.seconds))
        monkeypatch.setattr(Engine, "pauses", True)


def decode(engine: Engine, rows: int = 1, new: int = 40, **how) -> None:
    ids, mask = (x[:rows] for x in PROMPTS)
    same_undrafted(engine, ids, mask, **{"max_new_tokens": new, "eos_token_id": None} | how)


@pytest.mark.parametrize("how", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"adaptive": True}], ids=["chain", "tree", "adaptive"])
@pytest.mark.parametrize("rows", [1, 3])
@ON_BOTH_CACHES
def test_drafts_that_lose_are_stopped_and_stay_so_in_later_calls(
    llama, on: Callable[[Engine], Engine], arguments, how, rows, monkeypatch
):
    draft = tiny_model("llama", num_hidden_layers=1, initializer_range=0.5)
    engine = on(DraftTarget.from_pretrained(llama, draft, **arguments))
    work = Work(monkeypatch, engine.draft_model, drafted=DRAFTED)
    lost = []
    for _ in range(3):
        before = work.seconds
        decode(engine, rows, **how)  # 39 steps without drafts, and as many again where nothing is drafted
        lost.append(work.seconds - before - 2 * 39)
    assert sum(work.steps) > 0, "drafting shows what drafts cost and gain"
    assert sum(lost) < ALLOWED + 2 * DRAFTED, lost
    assert sum(lost[1:]) < DRAFTED, "what was learnt is kept for later calls"


@pytest.mark.parametrize("how", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@ON_BOTH_CACHES
def test_a_draft_model_reads_what_undrafted_steps_have_written(llama, on, rows, how, monkeypatch):
    engine = on(DraftTarget.from_pretrained(llama, deepcopy(llama)))  # it guesses all that it has read
    monkeypatch.setattr(Engine, "pauses", True)
    made = engine.draft_policy

    def policy_of(sizes, memory):
        policy = made(sizes, memory)
        honest, turns = policy.choose, iter(range(10**6))
        policy.choose = lambda step: engine.undrafted if next(turns) // 3 % 2 else honest(step)
        return policy

    engine.draft_policy = policy_of
    decode(engine, rows, **how)
    ids, mask = (x[:rows] for x in PROMPTS)
    settings = {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True} | how
    stats = engine.generate(ids, mask, **settings).stats
    assert stats.undrafted_steps > 2 * rows
    assert stats.accepted >= 0.9 * (stats.drafted - stats.copies), "only copies are rejected"


def test_drafts_that_pay_are_made_in_every_call(llama, monkeypatch):
    engine = DraftTarget.from_pretrained(llama, deepcopy(llama))
    work = Work(monkeypatch, engine.draft_model, drafted=1.5)
    for _ in range(2):
        work.steps.clear()
        engine.generate(*(x[:1] for x in PROMPTS), max_new_tokens=60, eos_token_id=None, do_sample=False)
        assert sum(work.steps) > 0.7 * len(work.steps)


def test_no_clock_decides_what_rejection_sampling_writes(llama, monkeypatch):
    draft = tiny_model("llama", num_hidden_layers=1)
    engine = DraftTarget.from_pretrained(llama, draft, acceptance="rejection")
    work = Work(monkeypatch, engine.draft_model, drafted=9.0)
    engine.generate(*PROMPTS, max_new_tokens=30, eos_token_id=None, **SAMPLED)
    assert all(work.steps)
