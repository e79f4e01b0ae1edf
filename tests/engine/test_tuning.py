"""Trees by batch size: the table, where it is found, and that no token depends on it."""

import json

import pytest
import torch

from helpers.generation import noted, same_undrafted
from helpers.models import CONTEXT, DRAFTER_ALONE, VOCAB, tiny_drafter, tiny_model, uneven_batch
from redrafter import ArgumentError, CheckpointError, MismatchError, ReDrafter
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.models import quantize_drafter, quantize_model
from redrafter.drafting.estimates import StepCosts
from redrafter.drafting.policy import MOST_COPIED
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.tuning import (
    Tuning,
    device_name,
    drafter_fingerprint,
    measured_on,
    target_fingerprint,
    tuning_path,
)
from redrafter.features import FeatureSet
from redrafter.model.shared_model import Revision, SharedModel
from redrafter.model.supported import Support
from redrafter.model.target import Target
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.tree.sizes import TreeShape

SHAPES: dict[int, TreeShape | None] = {1: TreeShape(3, 4, 9), 2: None, 4: TreeShape(1, 3, 4), 8: TreeShape(5, 2, 11)}


def tuned(target, drafter=None, shapes=SHAPES, /, **changes) -> Tuning:
    drafter = drafter or tiny_drafter()
    facts = {"device": device_name(target.device), "dtype": "float32", "target": target_fingerprint(target)}
    return Tuning(shapes, **(facts | {"drafter": drafter_fingerprint(drafter)} | changes))


@pytest.fixture(scope="module")
def target(llama):
    return Target(llama)


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    return tmp_path


def test_a_tuning_is_read_as_it_was_written(target, tmp_path):
    facts = {"versions": {"torch": "2"}, "prompts": "p.txt", "date": "today", "measured": ({"batch": 1},)}
    tuning = tuned(target, step_costs={1: 1.2, 4: 1.5}, **facts)
    path = tmp_path / "some" / "where.json"
    tuning.write(path)
    assert Tuning.from_file(path) == tuning
    assert [file.name for file in path.parent.iterdir()] == ["where.json"]
    assert json.loads(path.read_text())["shapes"]["2"] is None


def test_a_tuning_without_step_costs_is_read(target, tmp_path):
    document = tuned(target).to_dict()
    del document["step_costs"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert Tuning.from_file(tmp_path / "old.json") == tuned(target)


@pytest.mark.parametrize(("rows", "ratio"), [(1, 1.2), (2, None), (3, 2.5), (4, 2.5), (8, None)])
def test_drafting_pauses_by_the_measured_cost_of_a_step(target, rows, ratio, monkeypatch):
    monkeypatch.setattr(ReDrafter, "pauses", True)
    engine = ReDrafter(target, tiny_drafter(), tuning=tuned(target, step_costs={1: 1.2, 4: 2.5}))
    policy, whole = engine.draft_policy([rows], None), engine.proposer_for(rows)
    search = whole.without_text or whole
    assert policy.first(rows) is search
    cost = policy.times.time_of(search, rows) / policy.times.time_of(engine.plain, rows)
    assert ratio is None or cost == pytest.approx(ratio)


def test_the_costs_of_a_tuning_are_those_of_steps(target, tmp_path, monkeypatch):
    costs = StepCosts(((1, 0.5), (64, 0.75)), ((8, 0.5),), ((1, 0.125),), ((5, 0.25),), 0.001)
    tuning = tuned(target, costs=costs)
    tuning.write(tmp_path / "tuning.json")
    assert Tuning.from_file(tmp_path / "tuning.json") == tuning
    engine = ReDrafter(target, tiny_drafter(), tuning=tuning)
    assert engine.step_costs(None) == costs
    asked: list[StepCosts | None] = []
    monkeypatch.setattr("redrafter.engine.redrafter.text_nodes", lambda *given: asked.append(given[3]) or 0)
    engine.proposer_for(1)
    assert asked == [costs], "copies follow from them too"


def test_the_entry_of_the_smallest_size_that_holds_the_rows(target):
    tuning = tuned(target)
    assert [tuning.shape_for(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 500)] == [
        SHAPES[size] for size in (1, 2, 4, 4, 8, 8, 8, 8)
    ]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 5, "temperature": 1.3}])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_a_tuning_changes_no_token(target, rows, sampling, monkeypatch):
    taken = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, batch, *_: (len(batch.rows), step.proposer))
    engine = ReDrafter(target, tiny_drafter(), tuning=tuned(target), options=DRAFTER_ALONE)
    ids, mask = uneven_batch(rows)
    how = {"max_new_tokens": 14, "eos_token_id": None, "return_dict_in_generate": True, **sampling}
    out = same_undrafted(engine, ids, mask, **how)
    taken = [(count, proposer) for count, proposer in taken if proposer is engine.proposer_for(count)]
    assert taken[0][0] == rows
    assert out.stats.drafted == sum(count * (proposer.nodes - 1) for count, proposer in taken)


def test_each_shape_is_one_proposer_and_a_size_without_one_is_decoded_plainly(target):
    engine = ReDrafter(target, tiny_drafter(), tuning=tuned(target), options=DRAFTER_ALONE)
    proposers = {rows: engine.proposer_for(rows) for rows in SHAPES}
    assert all(engine.proposer_for(rows) is proposer for rows, proposer in proposers.items())
    assert isinstance(proposers.pop(2), PlainProposer)
    for rows, proposer in proposers.items():
        assert TreeShape(proposer.beams, proposer.depth, proposer.nodes) == SHAPES[rows]
    assert len(set(proposers.values())) == 3


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"draft_len_per_beam": 4}, {"node_budget": 3}])
@pytest.mark.parametrize("named", [False, True])
def test_a_shape_that_is_asked_for_wins_over_a_tuning(llama, target, home, named, asked):
    drafter = tiny_drafter()
    path = tuning_path(target, drafter)
    tuned(target, drafter).write(path)
    asked = asked | {"draft_from_text": False}
    engine = ReDrafter.from_pretrained(llama, drafter, tuning=path if named else "auto", **asked)
    assert engine.tuning is None
    assert engine.proposer_for(2) is engine.proposer_for(4) is engine.proposer


def test_a_tuning_is_picked_up(llama, target, home):
    drafter = tiny_drafter()
    assert ReDrafter.from_pretrained(llama, drafter).tuning is None
    path = tuning_path(target, drafter)
    assert home in path.parents
    assert "float32" in path.name
    tuned(target, drafter).write(path)
    assert ReDrafter.from_pretrained(llama, drafter).proposer_for(3).without_text.depth == 3
    assert ReDrafter.from_pretrained(llama, drafter, tuning=None).tuning is None
    other = home / "other.json"
    tuned(target, drafter, {1: TreeShape(2, 2, 5)}).write(other)
    assert ReDrafter.from_pretrained(llama, drafter, tuning=other).proposer_for(64).nodes == 5
    other_drafter = tiny_drafter(exit_dim=40)
    assert ReDrafter.from_pretrained(llama, other_drafter).tuning is None


def trained_anew(drafter):
    drafter.lm_head.weight.data *= 1.2


@pytest.mark.parametrize(
    "changes",
    [
        [trained_anew],
        [quantize_drafter],
        [
            lambda drafter: drafter.config.update({"context_window": 8}),
            lambda drafter: drafter.config.update({"context_window": 9}),
            lambda drafter: drafter.config.update({"context_window": 9, "context_heads": 8}),
        ],
    ],
    ids=["trained anew", "quantised", "reads more of the text"],
)
def test_other_drafters_have_tunings_of_their_own(changes):
    found = {drafter_fingerprint(tiny_drafter()), drafter_fingerprint(tiny_drafter())}
    for change in changes:
        drafter = tiny_drafter()
        change(drafter)
        found.add(drafter_fingerprint(drafter))
    assert len(found) == 1 + len(changes)


def test_a_quantised_model_has_tunings_of_its_own():
    model = tiny_model("llama")
    quantize_model(model, "llama")
    pair = Target(model), tiny_drafter()
    assert "-float32-fp8-" in tuning_path(*pair).name
    Tuning(SHAPES, **measured_on(*pair)).check(*pair, "a tuning")


@pytest.mark.parametrize(
    ("what", "other"),
    [("device", "NVIDIA H200"), ("dtype", "bfloat16"), ("target", "00000000"), ("drafter", "00000000")],
)
def test_a_tuning_of_anything_else_is_refused_with_both_values(llama, target, tmp_path, what, other):
    path = tmp_path / "tuning.json"
    tuned(target, **{what: other}).write(path)
    here = getattr(tuned(target), what)
    with pytest.raises(MismatchError, match=f"{path} was measured on another {what}: {other}, .* {here};"):
        ReDrafter.from_pretrained(llama, tiny_drafter(), tuning=path)


SHAPE = '{"shapes": {"1": null}, '
WRONG_SHAPES = ("{}", '{"one": null}', '{"0": null}', '{"1": 5}', '{"1": {"num_beams": 0}}', '{"1": {"beams": 5}}')
WRONG_CURVES = (
    "5",
    '{"steps": [[1, 1]]}',
    '{"steps": [[2, 1], [1, 2]], "trees": [[1, 1]], "searches": [[1, 0]], "levels": [[1, 0]]}',
)
WRONG_COSTS = ("[]", '{"one": 1.2}', '{"2": 1.2}', '{"1": "1.2"}', '{"1": 0}')


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"shapes": ', "{}", '{"shapes": {"1": null}}'),
        *(f'{{"shapes": {wrong}, ...}}' for wrong in WRONG_SHAPES),
        *(SHAPE + f"{wrong}, ...}}" for wrong in ('"colour": "blue"', '"measured": 5', '"measured": [5]')),
        *(SHAPE + f'"step_costs": {wrong}, ...}}' for wrong in WRONG_COSTS),
        *(SHAPE + f'"costs": {wrong}, ...}}' for wrong in WRONG_CURVES),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_broken_tuning_is_an_error_that_names_it(llama, target, home, named, text):
    drafter = tiny_drafter()
    rest = tuned(target, drafter).to_dict()
    del rest["shapes"]
    for name in ("measured", "step_costs"):
        if f'"{name}"' in text:
            del rest[name]
    path = tuning_path(target, drafter)
    path.parent.mkdir()
    path.write_text(text.replace("...", json.dumps(rest)[1:-1]))
    with pytest.raises(CheckpointError, match=f"{path} is not a tuning"):
        ReDrafter.from_pretrained(llama, drafter, tuning=path if named else "auto")
    ReDrafter.from_pretrained(llama, drafter, tuning=None)


def test_a_tuning_that_is_not_there_is_an_error_when_named(llama, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        ReDrafter.from_pretrained(llama, tiny_drafter(), tuning=tmp_path / "nowhere.json")


def test_a_tuning_that_cannot_be_written_is_an_error(target, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot write"):
        tuned(target).write(tmp_path / "file" / "tuning.json")


def test_a_shape_that_the_drafter_cannot_have_is_refused(target):
    with pytest.raises(ArgumentError, match=f"num_beams={VOCAB + 1}"):
        ReDrafter(target, tiny_drafter(), tuning=tuned(target, None, {1: TreeShape(VOCAB + 1, 2, 3)}))


def test_an_untuned_engine_on_a_gpu_has_a_proposer_for_each_size(monkeypatch):
    monkeypatch.setattr("redrafter.drafting.drafter.RecurrentDrafter.prepare", lambda *_: None)  # asks for its memory

    class OnGPU(Target):
        device, varlen, features, config, context = torch.device("cuda"), Support(), FeatureSet("it"), None, None
        shared, revision = SharedModel(), Revision(0, 0, 0)

        def __init__(self) -> None:
            """Bind no model."""

        def read_aux_hidden(self, layers: object) -> None:
            """Read none."""

    monkeypatch.setattr(ReDrafter, "_assumed", StepCosts.assumed("cuda", 0.1, 1.0, 5))
    gpu = OnGPU()
    both = ReDrafter(gpu, tiny_drafter())
    assert both.proposer_for(1) is both.proposer_for(1)
    assert both.proposer_for(1).nodes == 42  # with what is copied from the text
    assert both.proposer_for(1).without_text is both.proposer_for(4).without_text is both.proposer
    engine = ReDrafter(gpu, tiny_drafter(), options=DRAFTER_ALONE)
    assert engine.proposer_for(1) is engine.proposer_for(4) is engine.proposer
    assert 4 <= engine.proposer_for(16).nodes < 12
    assert 64 < engine.proposer_for(64).shared_nodes < 256
    assert engine.proposer_for(200).shared_nodes < 2 * 256
    assert ReDrafter(gpu, tiny_drafter(), TreeShape(node_budget=20)).proposer_for(500).nodes == 20


def test_an_untuned_cpu_verifies_fewer_nodes_in_larger_batches(target):
    engine = ReDrafter(target, tiny_drafter(), options=DRAFTER_ALONE)
    proposers = [engine.proposer_for(rows) for rows in (1, 2, 4, 8, 16, 32)]
    nodes = [proposer.nodes for proposer in proposers]
    assert nodes[:2] == [12, 12]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[-1] < 5
    assert proposers[0] is proposers[1] is engine.proposer
    asked = ReDrafter(target, tiny_drafter(), TreeShape(node_budget=20), options=DRAFTER_ALONE)
    assert {asked.proposer_for(rows) for rows in (1, 8, 64, 500)} == {asked.proposer}


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"node_budget": 3}])
def test_steps_keep_to_a_shape_that_is_asked_for(llama, home, asked, monkeypatch):
    monkeypatch.setattr(ReDrafter, "pauses", True)
    engine = ReDrafter.from_pretrained(llama, tiny_drafter(), **asked)
    copying = WithPromptLookup(engine.plain, MOST_COPIED)
    both = engine.proposer_for(1)
    assert set(engine.draft_policy([1], None).proposers) == {engine.plain, copying, both, both.without_text}
    assert len(set(ReDrafter.from_pretrained(llama, tiny_drafter()).draft_policy([1], None).proposers)) > 3


def test_what_an_engine_may_use_is_passed_on(llama, home):
    drafter = tiny_drafter()
    engine = ReDrafter.from_pretrained(llama, drafter, max_input_len=7, max_seq_len=CONTEXT, compile=False)
    assert (engine.options.max_input_len, engine.options.max_seq_len, engine.options.compile) == (7, CONTEXT, False)
    with pytest.raises(ArgumentError, match="kv_cache_free_gpu_memory_fraction"):
        ReDrafter.from_pretrained(llama, drafter, kv_cache_free_gpu_memory_fraction=2)
    pair = Pair.load(LoadOptions(max_input_len=9, compile=False, tuning="none"))
    assert (pair.engine.options.max_input_len, pair.engine.options.compile, pair.engine.tuning) == (9, False, None)


def test_a_cpu_searches_as_deep_as_was_trained_unless_more_is_asked_for(target):
    """The depth that a training measured best holds for more nodes than a CPU verifies by default."""
    drafter = tiny_drafter(draft_beams=3, draft_len_per_beam=6, trained_draft_len=4)
    shapes = {None: (3, 4, 12), TreeShape(draft_len_per_beam=6): (3, 6, 12), TreeShape(node_budget=16): (3, 6, 16)}
    for shape, searched in shapes.items():
        proposer = ReDrafter(target, drafter, shape).proposer
        assert (proposer.beams, proposer.depth, proposer.nodes) == searched
