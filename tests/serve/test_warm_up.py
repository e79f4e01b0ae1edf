"""The engine's thread captures the remaining steps while it has no sequences, and serves clients in between."""

import asyncio
import itertools

import pytest

pytest.importorskip("fastapi")

from helpers.engine_in_thread import begun, written
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.processes import soon
from helpers.scheduling import alone, launch_ahead, make_sequence, nothing_is_held, scheduler
from redrafter import ArgumentError, DraftTarget, ReDrafter
from redrafter.drafting.recycled import RecycledConfig, RecycledTokens
from redrafter.model.target import Target
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.prefill import rooms_of
from redrafter.serve.engine_process import warm_up as warm_up_module
from redrafter.serve.engine_process.warm_up import warm_up

SETTINGS = [SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=5)]


@pytest.fixture
def served():
    return scheduler(with_tree(tiny_model("llama"), tiny_drafter(), 2, 3), max_batch_size=2)


def test_an_idle_engine_works_ahead_though_a_piece_is_refused(served):
    done = []

    def refuse() -> None:
        raise ArgumentError("the adapter was unloaded")

    served.later.extend([lambda: done.append(1), refuse, lambda: done.append(2)])
    client = begun(served)
    try:
        assert soon(lambda: done == [1, 2])
    finally:
        client.stop()


def test_an_engine_that_sleeps_works_ahead_once_it_wakes(served):
    done = []
    served.later.append(lambda: done.append(1))
    served.asleep = True
    client = begun(served)
    try:
        assert not soon(lambda: done, 0.2)
        served.asleep = False
        asyncio.run(written(client, [5, 6], 2))
        assert soon(lambda: done)
    finally:
        client.stop()


async def test_clients_of_an_engine_that_warms_up_get_their_own_tokens(served):
    warm_up(served, SETTINGS[0])
    left = len(served.later)
    cases = [([5 + number, 6, 7], 12, SETTINGS[number % 2]) for number in range(6)]
    client = begun(served)
    try:
        texts = [await written(client, *case) for case in cases]
        assert len(served.later) < left
        served.later.clear()
        assert await asyncio.to_thread(soon, lambda: served.idle)
    finally:
        client.stop()
    assert texts == [alone(served.engine, make_sequence(*case)) for case in cases]
    nothing_is_held(served)


@pytest.mark.parametrize("drafts", ["recycled", "of a draft model"])
def test_steps_of_all_that_the_policy_may_choose_are_captured_while_idle(monkeypatch, drafts):
    # A step that is first captured while clients wait takes as long as dozens of others.
    launch_ahead(monkeypatch)
    monkeypatch.setattr(ReDrafter, "pauses", True)
    monkeypatch.setattr(DraftTarget, "pauses", False)  # as on a GPU
    monkeypatch.setattr(warm_up_module, "RARE", ())
    target = Target(tiny_model("llama", max_position_embeddings=512))
    table = RecycledTokens(RecycledConfig(hidden_size=8, vocab_size=target.vocab_size, entries=16))
    engine = ReDrafter(target, table) if drafts == "recycled" else DraftTarget(target, target, adaptive=True)
    served = scheduler(engine, max_batch_size=4)
    warm_up(served, SETTINGS[0])
    for piece in served.later:
        piece()
    batch = served.batch
    captured = {
        (key.rows, key.sampling.greedy, key.proposer, key.chunks) for key in batch.captured_steps if key.sampling
    }
    wanted = set()
    for size, sampled in itertools.product(batch.sizes, (False, True)):
        choices = [*batch.policy.choices(size, sampled=sampled), served.engine.undrafted]
        nodes = [each.nodes * size for each in (choices[0], choices[-1])]
        wanted |= {(size, not sampled, id(each), 0) for each in choices}
        choices = [*batch.policy.choices(size, sampled=sampled, mixed=True), served.engine.undrafted]
        wanted |= {(size, not sampled, id(each), room) for each in choices for room in rooms_of(size, nodes)}
    kinds = {mixed: len({key[2] for key in wanted if (key[3] > 0) == mixed}) for mixed in (False, True)}
    if drafts == "recycled":
        assert kinds[True] > 6, "trees with and without copies, copies alone, and undrafted steps"
    else:
        assert kinds == {False: 1 + engine.draft_len, True: 2}
    assert captured >= wanted
