"""A scheduler keeps what it learnt of drafts over sleep and waking, and forgets it with other models."""

import pytest

from helpers.models import DRAFTER_ALONE, tiny_drafter, tiny_model
from helpers.scheduling import KINDS, make_sequence, run, scheduler
from redrafter import ReDrafter
from redrafter.drafting import policy, step_times
from redrafter.engine.changes import ChangeDrafter, Sleep, Wake
from redrafter.model.target import Target


@pytest.mark.parametrize("changed", ["nothing", "drafter"])
def test_drafting_pauses_on_after_sleep_and_is_tried_at_once_with_another_drafter(changed, monkeypatch):
    monkeypatch.setattr(ReDrafter, "pauses", True)
    monkeypatch.setattr(step_times, "LEVEL", ((1, 2.0),))  # too much for random drafts
    monkeypatch.setattr(policy, "PRIOR_OF_SEARCH", 4.0)
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = ReDrafter(Target(model), tiny_drafter(), options=DRAFTER_ALONE)
    served = scheduler(engine, max_batch_size=2)

    def drafted() -> int:
        sequence = make_sequence([5, 9, 14, 3], 6, KINDS["sampled"])
        run(served, [sequence])
        return sequence.stats.drafted

    assert drafted() > 0
    run(served, [make_sequence([8, 8, 60], 20, KINDS["sampled"])])
    assert drafted() == 0, "drafting pauses"
    for change in [Sleep(engine), Wake(engine)] if changed == "nothing" else [ChangeDrafter(engine, tiny_drafter())]:
        served.change(change)
    assert (drafted() > 0) == (changed == "drafter")
