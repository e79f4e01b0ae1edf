"""A row whose logits are no numbers ends with an error of its own, and other rows write what each writes alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from helpers.adapters import saved
from helpers.features import make_engine
from helpers.generation import ON_BOTH_CACHES, noted
from helpers.models import tiny_model
from helpers.recurrent import recurrent_model
from helpers.scheduling import (
    KINDS,
    alone,
    change,
    dense_scheduler,
    go_on,
    make_sequence,
    nothing_is_held,
    same_alone,
    scheduler,
    until_stepping,
)
from redrafter import DraftTarget, Engine
from redrafter.drafting.eagle import EagleDrafter
from redrafter.errors import NotFiniteError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import TokenSequence

BAD = 90  # an id in no prompt but those that are to fail


@pytest.fixture
def engine() -> Engine:
    return make_engine("drafter")


@contextmanager
def not_finite(engine: Engine, token: int = BAD) -> Iterator[None]:
    """Let a token's embedding, and so all that follows the token, be no numbers."""
    weight = engine.model.get_input_embeddings().weight
    kept = weight.data[token].clone()
    weight.data[token] = torch.nan
    yield
    weight.data[token] = kept


CACHES = pytest.mark.parametrize(
    "on",
    [
        lambda engine, **how: dense_scheduler(engine, 2, **how),
        lambda engine, **how: scheduler(engine, blocks=12, max_batch_size=2, **how),
    ],
    ids=["dense", "paged"],
)


def serve(served: Scheduler, *sequences: TokenSequence) -> None:
    served.submit(*sequences)
    go_on(served)


def check(engine: Engine, fine: list[TokenSequence], failed: list[TokenSequence]) -> None:
    for each in failed:
        last = each.sink.deltas[-1]
        assert (last.finish, type(last.error)) == ("error", NotFiniteError)
    same_alone(engine, fine)


@CACHES
@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
def test_a_row_in_the_place_of_one_that_failed_writes_its_own_text(on, kind, engine):
    served = on(engine, speculate=False)
    long, short = make_sequence([5] * 30, 60, KINDS[kind]), make_sequence([7, 8], 50, KINDS[kind])
    unwritten = next(token for token in range(80, 97) if token not in alone(engine, long) + alone(engine, short))
    failed = make_sequence([*range(3, 75), unwritten, *range(3, 12)], 10, KINDS[kind])
    with not_finite(engine, unwritten):
        serve(served, long, failed, short)
    check(engine, [long, short], [failed])
    assert failed.sink.tokens == []


@CACHES
def test_what_was_written_before_is_kept(on, engine):
    each = make_sequence([5, 6, 7], 40, KINDS["sampled"])
    whole = alone(engine, each)
    end = next(index for index in range(5, 40) if whole[index] not in [5, 6, 7, *whole[:index]])
    other = make_sequence([5, 6, 7], end + 1, KINDS["sampled"])
    with not_finite(engine, whole[end]):
        serve(on(engine, speculate=False), each, other)
    check(engine, [], [each])
    assert each.sink.tokens == whole[: end + 1]
    assert f"after {4 + end} tokens" in str(each.sink.deltas[-1].error)
    assert other.sink.tokens == whole[: end + 1]  # which ends with the token that nothing can follow
    assert other.sink.deltas[-1].finish == "length"


@CACHES
def test_rows_with_an_adapter_that_overflows_leave_others_alone(on, engine, tmp_path):
    wrong, folder = saved(tmp_path / "wrong")
    for name, weight in wrong.named_parameters():
        if "lora_" in name:
            weight.data.fill_(1e30)
    wrong.save_pretrained(folder)
    engine.load_adapter("wrong", folder)
    fine = [make_sequence([5 + n] * (9 + n), 40, KINDS["sampled"]) for n in range(3)]
    failed = [make_sequence([20 + n] * 30, 40, KINDS["sampled"]) for n in range(2)]
    for each in failed:
        change(each, adapter=engine.target.adapters.hold("wrong"))
    serve(on(engine), fine[0], failed[0], fine[1], failed[1], fine[2])
    check(engine, fine, failed)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_blocks_of_a_row_that_failed_are_found_by_nobody(ahead, engine):
    served = scheduler(engine, speculate=False)
    served.overlap = ahead
    system = [3 + n % 60 for n in range(2 * BLOCK_SIZE)]
    first = make_sequence([*system, 9], 5, KINDS["greedy"])
    serve(served, first)
    prompt = [*system, BAD, *[4 + n % 50 for n in range(3 * BLOCK_SIZE)]]
    failed, again = make_sequence(prompt, 14, KINDS["greedy"]), make_sequence(prompt, 14, KINDS["greedy"])
    with not_finite(engine):
        serve(served, failed)
    check(engine, [first], [failed])
    serve(served, again)
    check(engine, [again], [])
    assert again.reused == len(system)  # of the first one, whose blocks stay
    nothing_is_held(served)


def rejecting() -> Engine:
    return DraftTarget(make_engine("undrafted").target, Target(tiny_model("llama")), acceptance="rejection")


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_engine("prompt lookup"),
        lambda: make_engine("draft model"),
        rejecting,
        lambda: make_engine("draft model", recurrent_model("lfm2")),
    ],
    ids=["prompt lookup", "draft model", "rejection", "recurrent states"],
)
@CACHES
def test_whatever_drafts_leaves_nothing_behind(on, make: Callable[[], Engine]):
    engine = make()
    served, before = on(engine), make_sequence([7, 8], 50, KINDS["greedy"])
    serve(served, before)
    accepted, after = before.stats.accepted, make_sequence([7, 8], 50, KINDS["greedy"])
    failed = [make_sequence([*range(3, 30 + n), BAD, *range(30, 40)], 40, KINDS["greedy"]) for n in range(3)]
    with not_finite(engine):
        serve(served, *failed)
    serve(served, after)
    check(engine, [after], failed)
    assert after.stats.accepted == accepted


@CACHES
def test_a_head_that_reads_the_cache_drafts_by_numbers_again(on, monkeypatch):
    engine = make_engine("EAGLE")
    served, drafted = on(engine), noted(monkeypatch, EagleDrafter, "step")
    failed = [make_sequence([*range(3, 70 + n), BAD, *range(30, 32)], 8, KINDS["greedy"]) for n in range(3)]
    with not_finite(engine):
        serve(served, *failed)
    drafted.clear()
    after = make_sequence([7, 8], 50, KINDS["greedy"])
    serve(served, after)
    check(engine, [after], failed)
    assert all(logits.isfinite().all() for logits, *_ in drafted)


@pytest.mark.parametrize("new", [0, 4])
def test_scores_of_a_prompt_that_are_no_numbers_are_an_error(new, engine):
    served, params = scheduler(engine), replace(KINDS["greedy"], prompt_logprobs=1)
    failed, fine = make_sequence([5, BAD, 6, 7], new, params), make_sequence([5, 6, 7], new, params)
    with not_finite(engine):
        serve(served, failed, fine)
    check(engine, [fine] if new else [], [failed])
    assert fine.sink.deltas[-1].finish == "length"


@ON_BOTH_CACHES
def test_a_call_says_which_row_failed_and_the_next_one_is_right(on, engine):
    ids = torch.tensor([[5, 6, 7], [5, BAD, 7], [8, 9, 4]])
    expected = engine.generate(ids, max_new_tokens=20, do_sample=False, speculate=False)
    served = on(engine)
    with not_finite(engine), pytest.raises(NotFiniteError, match=r"row 1: .* no finite number after 3 tokens"):
        served.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(served.generate(ids, max_new_tokens=20, do_sample=False), expected)


@CACHES
def test_a_largest_logit_that_is_infinite_is_an_error_and_one_that_is_never_written_is_none(on, engine, monkeypatch):
    head = engine.model.lm_head.forward
    for value, failing in ((torch.inf, True), (-torch.inf, False)):
        served, each = on(engine), make_sequence([5, 6, 7], 6, KINDS["greedy"])
        with monkeypatch.context() as patch:
            changed = lambda hidden, value=value: head(hidden).index_fill(-1, torch.tensor([90]), value)  # noqa: E731
            patch.setattr(engine.model.lm_head, "forward", changed)
            serve(served, each)
            check(engine, [] if failing else [each], [each] if failing else [])


@CACHES
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_single_infinite_logit_ends_a_row_that_is_drawn_by_rejection_sampling(on, value, monkeypatch):
    engine = rejecting()
    served, each = on(engine), make_sequence([5, 6, 7], 40, KINDS["sampled"])
    until_stepping(served, each)
    head = engine.model.lm_head.forward
    changed = lambda hidden: head(hidden).index_fill(-1, torch.tensor([90]), value)  # noqa: E731
    monkeypatch.setattr(engine.model.lm_head, "forward", changed)
    go_on(served)
    check(engine, [], [each])
