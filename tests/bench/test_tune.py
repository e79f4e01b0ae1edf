"""`redrafter tune`, in process, on the boxed pair; and its arithmetic."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.command_line import fails, ran
from helpers.models import paged, tiny_drafter, tiny_model
from redrafter import ReDrafter, boxed_pair
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.bench.standing_batch import at_size
from redrafter.bench.tuner import NO_MEMORY, Timing, Tuner, candidates, choose, deeper, table
from redrafter.cli import main
from redrafter.convert.describe import describe
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.call import GenerateCall
from redrafter.engine.tuning import Tuning, measured_on, tuning_path
from redrafter.measure.report import facts, head
from redrafter.measure.run import Workload
from redrafter.model.target import Target
from redrafter.tree import beam_search
from redrafter.tree.sizes import TreeShape

SMALL, LARGE = TreeShape(1, 3, 4), TreeShape(5, 5, 26)


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pair():
    return ReDrafter.from_pretrained(boxed_pair(), tuning=None)


def tuner(
    pair, batch_sizes=(1, 2), seconds=60.0, report=lambda line: None, prompts=((1, 40, 50), (1, 60)), new=6
) -> Tuner:
    work = Workload(pair, prompts, 0, num_prompts=1, max_new_tokens=new, temperature=0.0, seed=0)
    return Tuner(work, batch_sizes, seconds, report)


@pytest.fixture
def quick(monkeypatch):
    """Let steps take 10 ms, or 11 with a tree whose rows share no nodes, and longer drafts write more tokens a step."""

    def step_ms(self, proposer, size):
        return 10.0 + (proposer.depth > 0 and proposer.shared_nodes is None)

    monkeypatch.setattr(Tuner, "step_ms", step_ms)
    monkeypatch.setattr(Tuner, "tokens_per_step", lambda self, proposer: 1.0 + proposer.depth / 10)


def test_what_tune_writes_is_what_from_pretrained_picks_up(home, capsys):
    (home / "prompts.txt").write_text("The old man looked at\n\ndef main():\n")
    args = ["--batch-sizes", "2,1", "--beams", "2", "--lengths", "3", "--max-new-tokens", "3", "--json"]
    assert main(["tune", *args, "--prompts", str(home / "prompts.txt"), "--temperature", "0.5"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert "written to" in err
    assert found["model"] == str(boxed_pair())
    assert [row["batch"] for row in found["table"]] == [1, 2]
    for row in found["table"]:
        assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] * row["tokens_per_step"] / row["step_ms"])
    tuning = Tuning.from_file(found["file"])
    assert tuning.to_dict() == found["tuning"]
    assert tuning.prompts == "prompts.txt"
    assert tuning.versions["torch"]
    assert tuning.date
    assert {row["batch"] for row in found["table"] if row["shape"] is not None} == set(tuning.step_costs)
    assert {(row["batch"], row["shape"] is None) for row in tuning.measured} >= {(1, True), (2, True), (1, False)}

    engine = ReDrafter.from_pretrained(boxed_pair())
    assert engine.tuning == tuning
    for rows, shape in tuning.shapes.items():
        assert isinstance(engine.proposer_for(rows), PlainProposer) == (shape is None)


def test_the_table_is_printed_and_drawn(home, quick, capsys):
    pytest.importorskip("matplotlib")
    out, plot = home / "tuning.json", home / "tuning.png"
    args = ["--batch-sizes", "1", "--beams", "1", "--lengths", "3"]
    assert main(["tune", *args, "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == "batch"
    assert printed[1].split()[0] == "1"
    assert len(printed) == 2
    assert list(Tuning.from_file(out).shapes) == [1]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_tree_whose_rows_share_nodes_is_written_printed_and_drawn(home, quick, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    load = Pair.load

    def load_paged(options):
        pair = load(options)
        paged(pair.engine)
        return pair

    monkeypatch.setattr(Pair, "load", load_paged)
    args = ["--batch-sizes", "16,32", "--beams", "4", "--lengths", "3", "--plot", str(home / "tuning.png")]
    assert main(["tune", *args, "--out", str(home / "tuning.json")]) == 0
    shape = TreeShape(4, 3, 13, 128)
    assert Tuning.from_file(home / "tuning.json").shapes == {16: TreeShape(4, 3, 4), 32: shape}
    assert "4x3, 128 shared" in capsys.readouterr().out
    assert (home / "tuning.png").is_file()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--beams=0", "--beams"),
        ("--lengths=3,x", "--lengths"),
        ("--batch-sizes=", "--batch-sizes"),
        ("--num-beams=3", "unrecognized"),
        ("--temperature=-1", "--temperature"),
        ("--max-new-tokens=1", "--max-new-tokens"),
        ("--prompts=/nowhere.txt", "/nowhere.txt"),
        ("--beams=5000", "--beams 5000"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, args, says):
    assert says in fails(capsys, "tune", args)


def test_candidates_are_every_lattice_at_several_budgets(pair):
    found = [(each.beams, each.depth, each.nodes) for each in candidates(pair.proposer, (1, 5, 9999), (3, 5))]
    own = [(5, 5, n) for n in (8, 12, 16, 26)]  # with 4 nodes, drafts of 5 are those of 3
    assert found[:4] == own
    assert sorted(found[4:]) == [(1, 3, 4), (1, 5, 6), (5, 3, 4), (5, 3, 8), (5, 3, 16)]
    assert [n for *_, n in found[4:]] == sorted(n for *_, n in found[4:])
    assert all(each.drafter is pair.drafter for each in candidates(pair.proposer, (1,), (3,)))


def test_rows_may_share_the_nodes_of_candidates(pair):
    found = candidates(pair.proposer, (1, 3, 5, 10), (3, 5), share=True)
    assert [each for each in found if each.shared_nodes is None] == candidates(pair.proposer, (1, 3, 5, 10), (3, 5))
    assert [(each.beams, each.depth, each.nodes, each.shared_nodes) for each in found if each.shared_nodes] == [
        *((beams, 2, 1 + 2 * beams, 64) for beams in (1, 2)),
        *((beams, 3, 1 + 3 * beams, 128) for beams in (3, 4)),  # a chain of 3 has no more nodes than these
        *((beams, 4, 1 + 4 * beams, 256) for beams in (3, 5, 8)),
    ]


def test_trees_that_rows_share_are_timed_at_large_batches_with_as_many_nodes_a_row(pair, monkeypatch):
    lines: list[str] = []
    made = tuner(pair, batch_sizes=(16, 32, 64, 200), report=lines.append)
    monkeypatch.setattr(made, "step_ms", lambda proposer, size: 10.0 + 5 * (proposer.nodes == 12))
    monkeypatch.setattr(made, "tokens_per_step", lambda proposer: 1.0 + proposer.depth / 10)
    made.measure_trees([pair.proposer, replace(pair.proposer, beams=4, depth=4, nodes=17, shared_nodes=256)])
    assert [each.batch for each in made.timings if each.shape is not None and each.shape.shared_nodes] == [32, 64]
    shapes = choose(made.timings)
    assert shapes == {16: None, 32: TreeShape(4, 4, 17, 256), 64: TreeShape(4, 4, 17, 512), 200: None}
    assert "2/2, 4 x 4, 8 nodes a row, shared: 1.40 tokens a step; ms a step: 10.00 at 32, 10.00 at 64" in lines[-1]


def test_the_steps_of_rows_that_share_nodes_are_measured(monkeypatch):
    seen, share = set(), beam_search.share_nodes

    def share_nodes(tree, score, total):
        seen.add((len(score), total))
        return share(tree, score, total)

    monkeypatch.setattr(beam_search, "share_nodes", share_nodes)
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = paged(ReDrafter(Target(model), tiny_drafter()), blocks=300)
    made = tuner(engine, batch_sizes=(32,), new=40, prompts=[[1, 3 + row] for row in range(24)])
    tree = RecurrentProposer(engine.drafter, engine.target, 3, 3, 10, 128)
    made.measure_trees([tree])
    plain, shared = made.timings
    assert shared.shape == TreeShape(3, 3, 10, 128)
    assert 1 < shared.tokens_per_step <= 4
    assert min(plain.step_ms, shared.step_ms) > 0
    assert (8, 32) in seen  # of 24 prompts, 8 remain after the first 16
    assert all(total == 4 * rows for rows, total in seen)


def test_a_proposer_for_other_rows_shares_as_many_nodes_for_each(pair):
    shared = replace(pair.proposer, shared_nodes=128)
    assert [at_size(shared, rows).shared_nodes for rows in (1, 16, 48)] == [4, 64, 192]
    assert at_size(shared, 64, sized_for=64) is shared
    assert at_size(pair.proposer, 48) is pair.proposer
    assert at_size(pair.plain, 48) is pair.plain


def plain_and(*trees: tuple[TreeShape, int, float]) -> list[Timing]:
    """Return timings of plain decoding and of trees, given by batch size and tokens per step; a step takes 10 ms."""
    plain = [Timing(batch, None, 1.0, 10.0) for batch in (1, 2)]
    return plain + [Timing(batch, shape, tokens_per_step, 10.0) for shape, batch, tokens_per_step in trees]


@pytest.mark.parametrize(
    ("timings", "sizes"),
    [
        (plain_and((LARGE, 1, 3.0), (SMALL, 1, 2.0)), [(5, 7, 26), (5, 7, 36)]),
        (plain_and((LARGE, 1, 2.0), (SMALL, 1, 3.0)), []),
        (plain_and((LARGE, 1, 2.0), (SMALL, 1, 3.0), (LARGE, 2, 3.0)), [(5, 7, 26), (5, 7, 36)]),
        (plain_and((LARGE, 1, 0.9)), []),
        (plain_and((TreeShape(1, 5, 6), 1, 3.0), (LARGE, 2, 3.0)), [(1, 7, 8), (5, 7, 26), (5, 7, 36)]),
        (plain_and((TreeShape(3, 5, 7), 1, 3.0), (TreeShape(3, 5, 8), 2, 3.0)), [(3, 7, 8), (3, 7, 22)]),
        (plain_and((TreeShape(4, 5, 21, 128), 1, 3.0)), []),
        (plain_and(), []),
    ],
    ids=["deepest", "shorter", "deepest in one batch", "slower than plain", "two", "few nodes", "shared", "none"],
)
def test_deeper_trees_are_tried_where_the_deepest_is_the_fastest(pair, timings, sizes):
    own = replace(pair.proposer, shared_nodes=32)
    found = deeper(own, timings, 7)
    assert [(each.beams, each.depth, each.nodes) for each in found] == sizes
    assert all(each.shared_nodes is None and each.drafter is own.drafter for each in found)


@pytest.mark.parametrize(("paying", "depths"), [(3, {3, 5}), (5, {3, 5, 7}), (7, {3, 5, 7, 10}), (10, {3, 5, 7, 10})])
def test_drafts_are_made_longer_while_that_pays(pair, monkeypatch, paying, depths):
    lines: list[str] = []
    made = tuner(pair, batch_sizes=(1,), report=lines.append)
    monkeypatch.setattr(made, "step_ms", lambda proposer, size: 10.0)
    monkeypatch.setattr(made, "tokens_per_step", lambda proposer: 1.5 - abs(proposer.depth - paying) / 100)
    made.measure_trees(candidates(pair.proposer, (5,), (3, 5)), (7, 10))
    shapes = [each.shape for each in made.timings if each.shape is not None]
    assert {shape.draft_len_per_beam for shape in shapes} == depths
    assert choose(made.timings)[1].draft_len_per_beam == paying
    assert sum(line.startswith("deeper, 5 x ") for line in lines) == sum(
        shape.draft_len_per_beam > 5 for shape in shapes
    )


@pytest.mark.parametrize(("args", "deepest"), [([], 10), (["--lengths", "3,5"], 5)])
def test_lengths_that_are_typed_are_all_that_is_tried(home, quick, args, deepest):
    out = home / "tuning.json"
    assert main(["tune", *args, "--batch-sizes", "1", "--beams", "2", "--out", str(out)]) == 0
    assert Tuning.from_file(out).shapes[1].draft_len_per_beam == deepest


def test_the_fastest_is_chosen_and_off_where_none_is_worth_it():
    timings = [
        *(Timing(batch, None, 1.0, 10.0) for batch in (1, 2, 4, 8)),
        *(Timing(batch, SMALL, 2.0, ms) for batch, ms in ((1, 12.0), (2, 12.0), (4, 19.8))),
        *(Timing(batch, LARGE, 3.0, ms) for batch, ms in ((1, 15.0), (2, 20.0))),
    ]
    shapes = choose(timings)
    assert shapes == {1: LARGE, 2: SMALL, 4: None, 8: None}
    rows = table(timings, shapes)
    assert [round(row["ratio"], 2) for row in rows] == [2.0, 1.67, 1.0, 1.0]
    assert rows[0]["tokens_per_second"] == pytest.approx(200)
    assert rows[2]["tokens_per_second"] == 400
    assert [row["step_cost"] for row in rows] == [1.5, 1.2, 1.0, 1.0]


def test_a_tree_is_not_followed_to_larger_batches_once_a_smaller_one_beats_it(pair, monkeypatch):
    made = tuner(pair, batch_sizes=(1, 2, 4, 300))
    cost = {1: 10.0, 4: 12.0, 8: 12.1, 16: 60.0}
    monkeypatch.setattr(made, "step_ms", lambda proposer, size: cost[proposer.nodes])
    monkeypatch.setattr(made, "tokens_per_step", lambda proposer: 2.0)
    made.measure_trees(candidates(pair.proposer, (1, 5), (3,)))
    sizes = {
        nodes: {each.batch for each in made.timings if each.shape is not None and each.shape.node_budget == nodes}
        for nodes in cost
    }
    assert sizes[4] == {1, 2, 4}  # 300 x 4 nodes are too many
    assert sizes[16] == {1}
    assert choose(made.timings)[300] is None


def test_a_tune_whose_time_ends_early_writes_no_table(home, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("redrafter.bench.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))

    def step_ms(self, proposer, size):
        now[0] += 1.0
        return 10.0 if proposer.depth else 1.0  # undrafted decoding is faster than these first trees

    monkeypatch.setattr(Tuner, "step_ms", step_ms)
    monkeypatch.setattr(Tuner, "tokens_per_step", lambda self, proposer: 1.0 + proposer.depth / 10)
    args = ["tune", "--batch-sizes", "1,2", "--beams", "1", "--seconds", "2", "--out", str(home / "tuning.json")]
    code, out, err = ran(*args)
    assert (code, out) == (2, "")
    assert "--seconds 2 ended after 1 trees, before all were measured, so no table is written" in err
    assert not [file for file in home.rglob("*.json") if file.parent.name != "passed-tests"]
    assert "more than 0" in fails(capsys, "tune", "--seconds", "0")


def test_bench_and_info_name_the_table_in_use(home):
    name = str(boxed_pair())
    assert describe(name)["tuning"] == "none; redrafter tune measures one"
    pair = Pair.load(LoadOptions())
    path = tuning_path(pair.engine.target, pair.engine.drafter)
    measured = measured_on(pair.engine.target, pair.engine.drafter)
    Tuning({1: TreeShape(5, 5, 8), 2: None}, **measured, date="2026-01-02").write(path)
    line = f"{path}, measured 2026-01-02: batch 1: 5x5, 8 nodes; batch 2: off"
    assert describe(name)["tuning"] == [f"{measured['device']}, float32: {line}"]
    for tuning, named in (("auto", line), (None, "rule, without a table of redrafter tune")):
        work = tuner(ReDrafter.from_pretrained(boxed_pair(), tuning=tuning)).work
        assert f"trees by {named}" in [*head(facts(work, {"model": "boxed", "prompts": "two"}, {}))]


def test_a_batch_without_memory_is_left_out_and_prompts_are_written_on_fewer_at_a_time(pair, monkeypatch):
    lines: list[str] = []
    made = tuner(pair, report=lines.append, prompts=[[1, 40 + row] for row in range(5)])
    decode, sizes = GenerateCall.decode, []

    def full(call, scheduler):
        sizes.append(len(call.rows))
        if len(call.rows) > 2:
            raise NO_MEMORY[0]("full")
        return decode(call, scheduler)

    def step_ms(proposer, size):
        if size == 2:
            raise NO_MEMORY[0]("full")
        return 10.0

    monkeypatch.setattr(GenerateCall, "decode", full)
    monkeypatch.setattr(made, "step_ms", step_ms)
    made.measure_trees(candidates(pair.proposer, (1,), (3,)))
    assert list(choose(made.timings)) == [1]
    assert any("does not fit" in line for line in lines)
    assert sizes == [5, 5, 4, 2, 2, 1]


def test_prompts_are_cut_to_the_context(pair):
    prompts = [list(range(3, 1503)), [1]]
    made = tuner(pair, prompts=prompts)
    for new in (6, 5000):
        request = made.request(prompts, new, frozenset())
        assert max(request.limits) <= pair.target.context
        assert request.lengths[1] == 1
    assert made.step_ms(pair.proposer, 1) > 0
