"""Measured costs of steps are kept on disk for later starts, until something else decides them or they are wrong."""

import json

import pytest
import torch

from helpers.models import paged, tiny_drafter, tiny_model, with_tree
from redrafter.drafting.step_times import ENOUGH_TO_DOUBT, StepCosts
from redrafter.engine import step_timing
from redrafter.engine.step_timing import KeptCosts
from redrafter.files.home import HOME

MEASURED = StepCosts(((1, 0.001), (64, 0.002)), ((3, 0.0001),), 1e-9)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a list to which each measurement adds an entry, with a folder for results."""
    monkeypatch.setenv(HOME, str(tmp_path))
    runs = []
    monkeypatch.setattr(step_timing, "measure_step_costs", lambda *args: (runs.append(1), MEASURED)[1])
    return runs


def kept(engine, search=None):
    return KeptCosts(engine.make_memory(rows=2), search or engine.proposer)


@pytest.fixture
def engine():
    return paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))


def test_a_later_start_reads_the_costs_that_an_earlier_one_has_measured(measured, engine):
    assert kept(engine).find_or_measure() == MEASURED
    assert kept(paged(with_tree(tiny_model("llama"), tiny_drafter(), 3, 3))).find_or_measure() == MEASURED
    assert len(measured) == 1


@pytest.mark.costly
@pytest.mark.parametrize("change", ["tree", "drafter", "dtype", "torch", "package"])
def test_costs_are_measured_again_for_other_shapes_dtypes_and_versions(change, measured, engine, monkeypatch):
    kept(engine).find_or_measure()
    other = {
        "tree": lambda: with_tree(tiny_model("llama"), tiny_drafter(), 2, 3),
        "drafter": lambda: with_tree(tiny_model("llama"), tiny_drafter(exit_dim=8), 3, 3),
        "dtype": lambda: with_tree(tiny_model("llama").double(), tiny_drafter(), 3, 3),
    }.get(change, lambda: engine)()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "1.0")
    if change == "package":
        monkeypatch.setattr(step_timing, "__version__", "0.0")
    kept(paged(other)).find_or_measure()
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{DIGEST: 1}", '{DIGEST: {"forward": [[1, NaN]], "level": [[1, 1]]}}', '{DIGEST: {"level": []}}'],
)
def test_costs_that_cannot_be_read_are_measured_again(content, measured, engine, tmp_path):
    kept(engine).find_or_measure()
    file = tmp_path / "step-costs.json"
    (digest,) = json.loads(file.read_text())
    file.write_text(content.replace("DIGEST", json.dumps(digest)))
    for _ in range(2):
        assert kept(engine).find_or_measure() == MEASURED
    assert len(measured) == 2


@pytest.mark.parametrize(("factor", "is_kept"), [(1.4, True), (1.6, False), (0.6, False)])
def test_costs_are_forgotten_where_undrafted_steps_take_other_times(factor, is_kept, measured, engine, monkeypatch):
    memory, found = engine.make_memory(rows=2), kept(engine)
    monkeypatch.setattr("redrafter.engine.redrafter.KeptCosts", lambda *args: found)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "device", torch.device("cuda"))
        costs = engine.step_costs(memory)
        times = engine.times_by(costs)
        assert engine.step_costs(memory) is costs
    for _ in range(ENOUGH_TO_DOUBT):
        times.correct(1, engine.proposer, 9.0)  # drafted steps may take what they take
        times.correct(1, engine.undrafted, factor * costs.forward[0][1])
    kept(engine).find_or_measure()
    assert len(measured) == (1 if is_kept else 2)
