"""`redrafter bench` in process on the boxed pair, and the arithmetic behind what it prints."""

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.command_line import fails, measured
from helpers.models import CONTEXT, HIDDEN, VOCAB, paged, tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead
from redrafter import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.app import loading, paths
from redrafter.bench.options import BenchOptions
from redrafter.bench.padded_model import SHAPES, PadShape
from redrafter.bench.sections import run_sections
from redrafter.bench.speedup import compare_texts, measure_rivals, measure_steady_state, steady_rate
from redrafter.bench.standing_batch import long_texts, measure_parts, open_standing_batch, random_drafter
from redrafter.cli import bench as bench_module
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.measure import run as run_module
from redrafter.measure.floors import Bandwidth, copy_bandwidth, resident_bytes, slot_bytes
from redrafter.measure.report import Report
from redrafter.measure.run import Workload
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.target import Target

PROMPTS = [[5, 9, 14, 3, 22, 8], [7, 7, 30], [41, 12, 13, 60, 2, 4, 4, 19]]
QUICK = ("--max-new-tokens", "12", "--repeats", "1", "--num-prompts", "2")
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
bench = partial(measured, "bench")


def workload(**changes) -> Workload:
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 3, 2)
    work = Workload(engine, PROMPTS, 0, num_prompts=2, max_new_tokens=8, temperature=0.0, seed=0)
    return Workload(**(vars(work) | changes))


@pytest.fixture(scope="module", autouse=True)
def _rough():
    """Two calls make a median here: nobody reads the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "MIN_TIMED_CALLS", 2)
        patch.setattr(run_module, "MAX_CPU_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The folder, the document and the tables of a run of all sections on the boxed pair."""
    folder = tmp_path_factory.mktemp("bench")
    args = [*QUICK, "--batch-sizes", "1,3", "--context", "40", "--draft-vocab-sizes", "64,2048"]
    args += ["--against", "eager,assisted", "--json", str(folder / "bench.json")]
    args += ["--plots", str(folder / "plots")] if HAS_MATPLOTLIB else []
    return folder, *bench(*args)


def test_a_run_ends_with_one_json_document_which_the_file_holds_too(everything):
    folder, document, _ = everything
    assert document == json.loads((folder / "bench.json").read_text())
    assert (document["complete"], document["errors"], document["dtype"]) == (True, [], "float32")
    assert document["options"]["max_new_tokens"] == 12
    assert [file.name for file in folder.iterdir() if file.is_file()] == ["bench.json"]


def test_both_ways_write_the_same_tokens_and_are_timed(everything):
    batches = everything[1]["batches"]
    assert [(one["batch_size"], one["batches"], one["tokens"]) for one in batches] == [(1, 2, 24), (3, 1, 36)]
    for one in batches:
        same = {"divergent": 0, "first": None, "largest_margin": None, "equal": True}
        assert one["equality"] == {"rows": one["tokens"] // 12} | same
        copied = {1: 16, 3: 4}[one["batch_size"]]
        assert one["shape"] == {"num_beams": 5, "draft_len_per_beam": 5, "nodes": 12, "draft_from_text": copied}
        assert 1 < one["tokens_per_step"] < 6
        assert one["accepted_by_depth"][0] <= 1
        assert one["plain"]["steps"] == 11 * one["batches"] > one["speculative"]["steps"]
        assert all(value > 0 for way in ("plain", "speculative") for value in one[way].values())


def test_parts_add_up_to_the_step_and_carry_their_floors(everything):
    document = everything[1]
    expected = [(rows, asked, drafts) for asked in (None, 40) for rows in (1, 3) for drafts in (False, True)]
    assert [(one["batch_size"], one["asked"], one["speculative"]) for one in document["parts"]] == expected
    size = document["bytes"]
    for one in document["parts"]:
        assert one["step_ms"] == pytest.approx((one["draft_ms"] or 0) + one["verify_ms"] + one["rest_ms"])
        moved = size["weights_per_forward"] + one["kv_bytes"]
        assert one["verify_floor_ms"] == pytest.approx(1e3 * moved / document["bandwidth"]["bytes_per_second"])
        assert (one["draft_floor_ms"] is None) == (not one["speculative"])
        assert (one["host_gap_ms"] is None) == (one["asked"] is not None)
        if one["asked"] == 40:
            assert one["context"] == 40
            assert one["kv_bytes"] == 40 * one["batch_size"] * size["keys_and_values_per_token"]
    assert [(one["batch_size"], one["ids"]) for one in document["heads"]] == [(1, 64), (3, 64), (1, 2048), (3, 2048)]


def test_rivals_and_pictures_are_beside_it(everything):
    folder, document, _ = everything
    found = [(one["name"], one["error"], one["same_texts"]) for one in document["rivals"]]
    assert found == [("eager", None, 2), ("assisted", None, 2)]
    assert all(one["tokens_per_second"] > 0 and one["speedup"] > 0 for one in document["rivals"])
    assert "prompt lookup of 10" in document["rivals"][1]["what"]
    names = ["throughput", "ratio", "acceptance", "step"] if HAS_MATPLOTLIB else []
    assert document.get("plots", []) == [str(folder / "plots" / f"{name}.png") for name in names]
    for path in document.get("plots", []):
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_sampling_is_compared_by_tokens_too():
    document, _ = bench(*QUICK, "--num-prompts", "1", "--temperature", "0.8", "--seed", "3")
    assert document["batches"][0]["equality"]["divergent"] == 0
    assert not {"rivals", "plots"} & {*document}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--against eager,vllm", "'vllm'"),
        ("--pad-to llama-9", "llama-3.1-8b"),
        ("--batch-sizes 0,2", "--batch-sizes must be from 1 to"),
        ("--batch-sizes two", "'two'"),
        ("--max-new-tokens 1", "must be from 2 to 1000000"),
        ("--max-new-tokens 1000", "context is 1024"),
        ("--prompts nowhere.txt", "nowhere.txt"),
        ("--draft-vocab-sizes 3", "num_beams=5"),
        ("--pad-head-rank 8", "--pad-head-rank is for --pad-to"),
        ("--pad-head-rank 0 --pad-to llama-3.2-1b", "--pad-head-rank must be from 1"),
        ("--pad-head-rank 8 --pad-to llama-3.2-1b", "cannot pad head_rank=256 to 8"),
        ("--pad-head-rank 8 --pad-to llama-3.2-1b --model {published}", "no head_rank that could be padded to 8"),
        ("--json /nowhere/bench.json", "cannot write /nowhere/bench.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(folder, capsys, args, message):
    assert message in fails(capsys, "bench", *args.format(published=folder / "merged").split())


def test_plots_without_matplotlib_say_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert "pip install '.[bench]' in a checkout" in fails(capsys, "bench", "--plots", str(tmp_path))


def test_a_padded_pair_is_measured_and_every_table_says_what_it_is(monkeypatch):
    monkeypatch.setitem(SHAPES, "twice", PadShape(192, 320, 41, 6, 2, 32, 2304))
    args = ("--pad-to", "twice", "--batch-sizes", "2", "--draft-len-per-beam", "3", "--max-new-tokens", "6")
    document, tables = bench(*QUICK, *args)
    assert tables.count(document["padded"]) == 3
    assert "boxed's text at twice's cost" in document["padded"]
    assert document["batches"][0]["equality"]["equal"] is True
    assert document["batches"][0]["shape"] == {
        "num_beams": 5,
        "draft_len_per_beam": 3,
        "nodes": 12,
        "draft_from_text": 16,
    }
    assert document["bytes"]["weights_per_forward"] > 4 * 18e6 / 2


def test_a_padded_pair_is_measured_on_the_gpu_of_a_machine_that_has_one(monkeypatch, capsys):
    def pad(*args, device, **options):
        raise ReDrafterError(f"padded on {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "_check_device", lambda *args: None)
    monkeypatch.setattr(bench_module, "pad_drafter", pad)
    for device, typed in (("cuda", ()), ("cuda:1", ("--device", "cuda:1")), ("cpu", ("--device", "cpu"))):
        assert f"padded on {device}\n" in fails(capsys, "bench", *QUICK, "--pad-to", "llama-3.2-1b", *typed)


def test_floors_count_what_one_forward_reads():
    for tied in (False, True):
        model = tiny_model("llama", tie_word_embeddings=tied)
        table = 4 * VOCAB * HIDDEN
        everything = sum(weight.nbytes for weight in model.parameters())
        assert forward_bytes(model) == (everything if tied else everything - table)
        assert resident_bytes(model, model) == pytest.approx(everything, rel=0.01)
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
    assert drafter.draft_bytes(4) == 4 * whole - 4 * (3 * share + unread)


def test_a_random_drafter_has_the_shape_but_for_its_head():
    drafter = tiny_drafter()
    small, full = random_drafter(drafter, 20), random_drafter(drafter, VOCAB)
    assert small.lm_head.weight.shape == (20, 2 * HIDDEN)
    assert len(small.draft_ids.unique()) == 20
    assert full.lm_head.weight.shape == (VOCAB, 2 * HIDDEN)
    assert full.draft_ids is None
    assert full.draft_bytes(3) == drafter.draft_bytes(3)
    with pytest.raises(ArgumentError, match="draft_vocab_size"):
        random_drafter(drafter, VOCAB + 1)


def test_copies_count_what_is_read_and_what_is_written():
    found = copy_bandwidth(torch.device("cpu"))
    assert found.buffer_bytes == 2**28
    assert 1e8 < found.bytes_per_second < 1e12
    assert Bandwidth(2e9, 1).ms(10**6) == 0.5


def test_a_divergence_is_found_with_its_margin():
    work = workload()
    plain = [run for batch in work.batches(1) for run in work.run_batch(batch, False).tokens]
    assert compare_texts(work, plain, plain)["equal"]
    other = [plain[0], [*plain[1][:5], (plain[1][5] + 1) % VOCAB, *plain[1][6:]]]
    found = compare_texts(work, plain, other)
    with torch.no_grad():
        logits = work.engine.model(torch.tensor([[*PROMPTS[1], *plain[1][:5]]])).logits[0, -1]
    best = logits.topk(2)
    assert int(best.indices[0]) == plain[1][5]
    assert (found["rows"], found["divergent"], found["equal"]) == (2, 1, False)
    assert (found["first"]["prompt"], found["first"]["token"]) == (1, 5)
    assert (found["first"]["plain"], found["first"]["speculative"]) == (plain[1][5], other[1][5])
    margin = float(best.values[0] - best.values[1])
    assert found["first"]["margin"] == found["largest_margin"] == pytest.approx(margin, abs=1e-4)
    assert found["first"]["top_two"] == (other[1][5] == int(best.indices[1]))
    sampled = compare_texts(workload(temperature=1.0), plain, other)
    assert (sampled["divergent"], sampled["first"]["margin"], sampled["largest_margin"]) == (1, None, None)
    assert not found["first"]["near_tie"]
    assert not sampled["first"]["near_tie"]


def test_batches_take_prompts_in_turn_and_every_row_is_one():
    work = workload(num_prompts=4)
    assert work.batches(1) == [[PROMPTS[i]] for i in (0, 1, 2, 0)]
    assert work.batches(3) == [PROMPTS, PROMPTS]
    assert work.batches(5) == [[*PROMPTS, *PROMPTS[:2]]]


def test_no_token_ends_a_text_and_the_models_habits_are_gone():
    engine, tokenizer = workload().engine, type("T", (), {"pad_token_id": None, "eos_token_id": 4})
    engine.model.generation_config.update(eos_token_id=list(range(VOCAB)), repetition_penalty=3.0)
    work = Workload.from_options(engine, tokenizer, PROMPTS, BenchOptions(max_new_tokens=8), 8)
    work.check()
    assert work.pad_token == 4
    assert engine.model.generation_config.eos_token_id is None
    run = work.run_batch(PROMPTS, True)
    assert [len(row) for row in run.tokens] == [8, 8, 8]
    assert run.tokens == work.run_batch(PROMPTS, False).tokens
    assert 0 < run.first_token < run.seconds
    assert run.steps <= 7
    with pytest.raises(ArgumentError, match=f"context is {CONTEXT}"):
        Workload.from_options(engine, tokenizer, PROMPTS, BenchOptions(max_new_tokens=90)).check()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_of_a_standing_batch_is_the_same_step_over_and_over(temperature):
    work = workload(temperature=temperature, max_new_tokens=12)
    proposer = work.proposer(3, True)
    with torch.inference_mode(), open_standing_batch(work, proposer, 3) as batch:
        expected = [[*text, *row] for text, row in zip(PROMPTS, work.run_batch(PROMPTS, False).tokens, strict=True)]
        before = batch.state.length.tolist()
        assert (batch.tokens, batch.longest) == (sum(before), max(before))
        for row, length in enumerate(before):
            assert length >= len(PROMPTS[row])
            assert batch.state.tokens[row, : length + 1].tolist() == expected[row][: length + 1]
        reports = []
        for _ in range(3):
            batch.restore()
            reports.append(batch.captured.replay().wait().tolist())
        assert reports[0] == reports[1] == reports[2]
        batch.restore()
        assert batch.state.length.tolist() == before
        assert batch.step_ms() > 0
        assert batch.check() is None


def test_the_prompts_of_a_standing_batch_are_read_where_a_step_could_read_them(monkeypatch):
    launch_ahead(monkeypatch)
    work = workload()
    paged(work.engine)
    with torch.inference_mode(), open_standing_batch(work, work.proposer(2, True), 2, context=20) as batch:
        assert (batch.tokens, batch.longest) == (40, 20)
    assert measure_parts(work, Bandwidth(1e9, 1), 1, 20, speculate=False)["context"] == 20


def test_a_standing_batch_takes_the_step_of_its_proposer_whatever_the_batch_size():
    work = workload()
    proposer = replace(work.proposer(3, True), shared_nodes=7)
    with torch.inference_mode(), open_standing_batch(work, proposer, 3) as batch:
        assert batch.captured.proposer.shared_nodes == 7


def test_contexts_past_the_models_own_are_timed_and_marked():
    work = workload()
    found = measure_parts(work, Bandwidth(1e9, 1), 2, CONTEXT + 30, speculate=True)
    assert found["context"] == CONTEXT + 30
    assert found["beyond"]
    assert found["kv_bytes"] == 2 * found["context"] * slot_bytes(work.engine.target.shapes)
    assert not measure_parts(work, Bandwidth(1e9, 1), 2, 20, speculate=False)["beyond"]


def test_long_texts_share_no_block():
    texts = long_texts(PROMPTS, 9, 40)
    assert [len(text) for text in texts] == [40] * 9
    assert len({tuple(text[:BLOCK_SIZE]) for text in texts}) == 9
    assert texts[0][:17] == [token for prompt in PROMPTS for token in prompt]


def test_a_section_that_fails_costs_only_itself(tmp_path, capsys):
    report = Report({"model": "m"}, path=tmp_path / "r.json")
    with report.section("one"):
        raise UnsupportedError("no\nsuch thing")
    with report.section("two"):
        report.document["speed"] = float("inf")
    assert report.finish() == 1
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["errors"] == [{"section": "one", "error": "UnsupportedError: no"}]
    assert document["speed"] is None
    assert "Traceback" not in err
    assert json.loads((tmp_path / "r.json").read_text()) == document


def test_every_table_carries_the_note(capsys):
    report = Report({}, note="This is not that.")
    row = report.table("title", [("a", 3), ("b", 6)])
    row(1, 2.5)
    row(2, None)
    assert capsys.readouterr().out == "\ntitle\nThis is not that.\na        b\n1    2.500\n2        -\n"


def test_a_rival_that_fails_is_reported(monkeypatch):
    work = workload()
    honest = work.engine.model.generate

    def generate(*args, **kwargs):
        if "cache_implementation" in kwargs:
            raise RuntimeError("out of luck\nand more")
        return honest(*args, **kwargs)

    monkeypatch.setattr(work.engine.model, "generate", generate)
    static, eager = measure_rivals(work, ["static", "eager"], None)
    assert static["error"] == "RuntimeError: out of luck"
    assert static["tokens_per_second"] is None
    assert eager["error"] is None
    assert eager["same_texts"] == eager["prompts"] == 2


def test_where_speculation_is_off_the_table_says_so(monkeypatch, capsys):
    work = workload()
    monkeypatch.setattr(work.engine, "proposer_for", lambda rows: work.engine.plain)
    report = Report({})
    run_sections(report, work, BenchOptions(batch_sizes=(2,), repeats=1, draft_vocab_sizes=(20,)))
    assert report.finish() == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert " off " in out
    assert document["batches"][0]["shape"] is None
    assert [one["speculative"] for one in document["parts"]] == [False]
    assert "heads" not in document


def test_a_number_given_twice_is_measured_once():
    options = BenchOptions(batch_sizes=(2, 2, 1), context=(5, 5))
    assert options.batch_sizes == (2, 1)
    assert options.context == (5,)


def test_the_steady_rate_counts_from_the_last_row_that_begins_at_once_to_the_last_text_that_begins():
    arrivals = [(0.0, 0, 1), (1.0, 1, 1), (2.0, 0, 3), (3.0, 1, 2), (3.0, 2, 1), (5.0, 3, 1), (6.0, 3, 9)]
    assert steady_rate(arrivals, 2) == (3 + 2 + 1 + 1) / (5.0 - 1.0)
    assert steady_rate(arrivals, 4) is steady_rate(arrivals, 5) is None  # no text waits


def test_waves_are_decoded_in_one_call_and_leave_the_engine_as_it_was():
    work = workload(max_new_tokens=12)
    options = work.engine.options
    result = measure_steady_state(work, 2, 3)
    assert (result["batch_size"], result["prompts"]) == (2, 6)
    assert work.engine.options is options
    assert result["plain"]["tokens_per_step"] == 1
    assert result["speculative"]["tokens_per_step"] >= 1
    for speed in (result["plain"], result["speculative"]):
        assert speed["tokens_per_second"] > 0
        assert speed["steady_tokens_per_second"] is not None
