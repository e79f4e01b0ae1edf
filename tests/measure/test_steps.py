"""Times of a step and its parts: batches that are held at one position, and floors."""

from dataclasses import replace

import pytest
import torch

from helpers.models import HIDDEN, VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead
from redrafter import ReDrafter
from redrafter.measure import steps as steps_module
from redrafter.measure.decode import timed_run
from redrafter.measure.steps import StepWork, copy_bandwidth, measure_step, slot_bytes
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.target import Target

PROMPTS = [[5, 9, 14, 3, 22, 8], [7, 7, 30], [41, 12, 13, 60, 2, 4, 4, 19]]


@pytest.fixture(autouse=True)
def _rough(monkeypatch):
    """Two calls make a median here: nobody reads the times."""
    monkeypatch.setattr(steps_module, "MIN_TIMED_CALLS", 2)
    monkeypatch.setattr(steps_module, "MAX_CPU_SECONDS", 0.0)


@pytest.fixture
def engine() -> ReDrafter:
    return with_tree(tiny_model("llama"), tiny_drafter(), 3, 2)


def test_floors_count_what_one_forward_reads():
    for tied in (False, True):
        model = tiny_model("llama", tie_word_embeddings=tied)
        table = 4 * VOCAB * HIDDEN
        everything = sum(weight.nbytes for weight in model.parameters())
        assert forward_bytes(model) == (everything if tied else everything - table)
        assert slot_bytes(Target(model).shapes) == 4 * 3 * 2 * (8 + 8)


@pytest.mark.parametrize(
    ("form", "unread"),
    [
        ({}, HIDDEN * HIDDEN),
        ({"recurrence": "trtllm"}, HIDDEN * HIDDEN + HIDDEN),
        ({"rnn": False}, 0),
        # The share of h is read once, not four times, and that of the state three times.
        ({"recurrence": "gated"}, 3 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN) + 2 * HIDDEN * HIDDEN),
        ({"context_window": 8, "context_head_dim": 8}, HIDDEN * HIDDEN + 4 * 2 * 2 * HIDDEN * 8),  # no key, no value
    ],
    ids=["apple", "trtllm", "sum", "gated", "context"],
)
def test_a_draft_reads_what_depends_on_h_alone_once(form, unread):
    drafter = tiny_drafter(**form)
    whole = sum(weight.nbytes for weight in drafter.parameters())
    share = 2 * HIDDEN * HIDDEN + 2 * HIDDEN  # of h in the first residual layer, and its bias
    assert drafter.draft_bytes(4) == pytest.approx(4 * whole - 4 * (3 * share + unread), rel=5e-3)  # but for biases


def test_copies_count_what_is_read_and_what_is_written():
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e12


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_of_a_held_batch_is_the_same_step_over_and_over(engine, temperature):
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    texts = timed_run(engine, PROMPTS, 0, max_new_tokens=12, seed=0, eos_token_id=VOCAB - 1, **sampling).tokens
    work = StepWork(engine, PROMPTS, 6, temperature)
    with torch.inference_mode(), work.hold(engine.proposer_for(3)) as batch:
        before = batch.state.length.tolist()
        assert (batch.tokens, batch.longest) == (sum(before), max(before))
        for row, length in enumerate(before):
            assert length >= len(PROMPTS[row])
            written = [*PROMPTS[row], *texts[row]]
            assert batch.state.tokens[row, : length + 1].tolist() == written[: length + 1]
        reports = []
        for _ in range(3):
            batch.restore()
            reports.append(batch.captured.replay().wait().tolist())
        assert reports[0] == reports[1] == reports[2]
        batch.restore()
        assert batch.state.length.tolist() == before
        assert batch.step_ms() > 0


def test_the_prompts_of_a_held_batch_are_read_where_a_step_could_read_them(engine, monkeypatch):
    launch_ahead(monkeypatch)
    paged(engine)
    work = StepWork(engine, [[5] * 20, [6] * 20], 0)
    with torch.inference_mode(), work.hold(engine.proposer_for(2)) as batch:
        assert (batch.tokens, batch.longest) == (40, 20)


def test_a_held_batch_takes_the_step_of_its_proposer_whatever_the_batch_size(engine):
    proposer = replace(engine.proposer_for(3), shared_nodes=7)
    with torch.inference_mode(), StepWork(engine, PROMPTS, 4).hold(proposer) as batch:
        assert batch.captured.proposer.shared_nodes == 7


@pytest.mark.parametrize("drafts", [True, False])
def test_parts_add_up_to_the_step_and_carry_their_floors(engine, drafts):
    found = measure_step(StepWork(engine, PROMPTS[:2], 0), engine.proposer_for(2) if drafts else engine.undrafted, 1e9)
    assert found["step_ms"] == pytest.approx((found["draft_ms"] or 0) + found["verify_ms"] + found["rest_ms"])
    moved = forward_bytes(engine.model) + (6 + 3) * slot_bytes(engine.target.shapes)
    assert found["verify_floor_ms"] == pytest.approx(1e3 * moved / 1e9)
    assert (found["draft_floor_ms"] is None, found["nodes"] == 1) == (not drafts, not drafts)
