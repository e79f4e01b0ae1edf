"""Sequences of every feature, drafted for in every way, write side by side what each writes alone.

They come one by one, some begin alike, some verify no drafts; blocks are many or few, on the device or on the host.
True paths are written into the trees of untrained drafters, so that drafts of all of them are accepted.
"""

import pytest

from helpers.features import ALIKE, FEATURES, OWN_WAYS, SIMPLE, case, pair, written_alone
from helpers.right_drafts import RightDrafts
from helpers.scheduling import dense_scheduler, launch_ahead, nothing_is_held, run, scheduler
from redrafter import ReDrafter
from redrafter.cache import block_manager

MEMORIES: dict[str, dict] = {
    "ample": {"max_batch_size": 5},
    "one row": {"max_batch_size": 1},
    "chunks": {"max_num_tokens": 40},
    "whole prompts": {"chunked": False},
    "no reuse": {"reuse": False, "max_batch_size": 3},
    "few blocks": {"blocks": 16},
    "host": {"blocks": 16, "host_blocks": 60, "max_num_tokens": 60, "max_batch_size": 2},
    "dense": {},
}
SCHEDULES = [(memory, order) for memory in MEMORIES for order in ("in turn", "ahead")]
SCHEDULES.remove(("dense", "ahead"))
PREEMPTING = ("few blocks", "ahead")
# Fast tests of tests/scheduler and of tests/engine/test_modes.py serve the other simple ones in a tenth of the time.
FAST = {
    of for of in SIMPLE if of[0] not in ("invariant", "adapters", "convolutions", "images and adapters", "fp8 images")
}
FEW = [PREEMPTING, ("dense", "in turn"), ("chunks", "in turn"), ("host", "in turn")]
CASES = [
    case(
        *of,
        "-".join(schedule),
        fast=of in FAST and schedule in (FEW[:2] if of == ("text", "drafter") else FEW[:1]),
        own=schedule == PREEMPTING,
    )
    for of in sorted(SIMPLE | OWN_WAYS)
    for schedule in (SCHEDULES if of[0] in ("text", "adapters") and of[1] not in (*ALIKE, "DFlash", "MTP") else FEW)
    if schedule[0] != "host" or FEATURES[of[0]].stores_keys
    if schedule[0] != "dense" or "dense" in FEATURES[of[0]].caches
]


@pytest.mark.parametrize(("feature", "engine", "schedule"), CASES)
def test_sequences_side_by_side_write_what_each_writes_alone(feature, engine, schedule, monkeypatch):
    memory, order = schedule.split("-")
    monkeypatch.setattr(block_manager, "MIN_SAVED", 1)  # texts are short
    made, dense = pair(feature, engine), memory == "dense"
    made.engine.drop_graphs()
    expected, sequences = written_alone(feature), made.sequences()
    made.expect([[*sequence.request.prompt, *text] for sequence, text in zip(sequences, expected, strict=True)])
    if order == "ahead":
        launch_ahead(monkeypatch)
    served = dense_scheduler(made.engine, 3) if dense else scheduler(made.engine, **MEMORIES[memory])
    drafts = RightDrafts([[*each.request.prompt, *tokens] for each, tokens in zip(sequences, expected, strict=True)])
    with made.watched(), drafts.drafted():
        run(served, sequences, apart=1)
    assert [sequence.sink.tokens for sequence in sequences] == expected
    if isinstance(made.engine, ReDrafter):
        accepted = sum(sequence.stats.accepted for sequence in sequences)
        steps = sum(sequence.stats.draft_steps for sequence in sequences)
        # Of an untrained drafter hardly any are; sequences that share the nodes of a step verify few each, and unlikely
        # drafts of a table are left out.
        few = "shared" in engine or engine == "recycled tokens"
        assert accepted > (0.25 if few else 0.8) * steps, "few drafts are accepted"
    if dense:
        return
    nothing_is_held(served)
    if memory != "no reuse":
        assert any(sequence.reused for sequence in sequences) or made.feature.images or made.feature.adapters
    else:
        assert not any(sequence.reused for sequence in sequences)
    assert served.running_set.preempted or memory != "few blocks"
    assert served.memory.blocks.onboarded or memory != "host" or made.feature.images or made.feature.adapters
