"""`redrafter bench` in process on the boxed pair, and the arithmetic of its records."""

import csv
import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from helpers.chats import write
from helpers.command_line import fails, measured
from helpers.models import CONTEXT, VOCAB, tiny_drafter, tiny_model, with_tree
from redrafter import ArgumentError, ReDrafter
from redrafter.app import paths
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.cli import measure as measure_module
from redrafter.cli.measure import _batches, bench_pair
from redrafter.cli.measure_options import BenchOptions
from redrafter.measure import trial as trial_module
from redrafter.measure.record import UNDRAFTED
from redrafter.measure.trial import Trial, check_room, describe, fixed_length, run_trials, transformers_trial

PROMPTS = [[5, 9, 14, 3, 22, 8], [7, 7, 30], [41, 12, 13, 60, 2, 4, 4, 19]]
QUICK = ("--device", "cpu", "--max-new-tokens", "8", "--repeats", "1", "--num-prompts", "2")
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
bench = partial(measured, "bench")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The folder, the records and the table of a run of all modes on the boxed pair."""
    folder = tmp_path_factory.mktemp("bench")
    args = [*QUICK, "--batch-sizes", "1,3", "--against", "eager", "--csv", str(folder / "bench.csv")]
    args += ["--markdown", str(folder / "bench.md")]
    args += ["--plot", str(folder / "bench.png")] if HAS_MATPLOTLIB else []
    return folder, *bench(*args)


def test_modes_write_the_same_tokens_and_are_timed(everything):
    _, records, _ = everything
    modes = ["undrafted", "drafter", "HF eager"]
    expected = [(1, mode) for mode in modes] + [(3, mode) for mode in modes[:2]]
    assert [(one["batch_size"], one["mode"]) for one in records] == expected
    for one in records:
        assert one["texts"] == {1: 2, 3: 3}[one["batch_size"]]
        assert one["tokens"] == 8 * one["texts"]
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert min(one["speedup"], one["first_call_s"]) > 0
        assert one.get("same", one["texts"]) == one["texts"]
        assert ("same" in one) == (one["mode"] != "undrafted")
        if one["mode"] == "drafter":
            assert 1 < one["tokens_per_step"] < 6
            assert one["drafted"] >= one["accepted"] == sum(one["accepted_by_depth"])
            assert min(one["first_token_ms"], one["ms_per_token"], one["draft_ms"], one["verify_ms"]) > 0
        assert ("step_ms" in one) == (one["mode"] in modes[:2])
        assert one["conditions"]["options"]["max_new_tokens"] == 8


def test_the_table_is_printed_and_written_in_other_forms(everything):
    folder, records, out = everything
    assert out.splitlines()[1] == "boxed, drafter drafter, float32"
    shown = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert shown[0][:3] == ["batch", "tok/s", "speedup"]
    assert [line[0] for line in shown[1:]] == ["undrafted", "drafter", "HF", "undrafted", "drafter"]
    with (folder / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["speedup"]) for row in rows] == [one["speedup"] for one in records]
    assert float(rows[1]["position_1"]) == records[1]["acceptance"][0]
    text = (folder / "bench.md").read_text()
    assert text.count("\n| ") == 1 + len(records)
    assert "- boxed, drafter drafter, float32" in text
    if HAS_MATPLOTLIB:
        assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--against eager,vllm", "'vllm'"),
        ("--against eager --batch-sizes 2", "add 1 to --batch-sizes"),
        ("--batch-sizes 0,2", "--batch-sizes must be from 1 to"),
        ("--max-new-tokens 1", "must be from 2 to 1000000"),
        ("--max-new-tokens 1000", "1000 new ones are more than the 1024 of the model's context"),
        ("--prompts nowhere.txt", "nowhere.txt"),
        ("--json /nowhere/bench.json", "cannot write /nowhere/bench.json"),
        ("--plot bench.jpg", "--plot draws a .png"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(capsys, args, message):
    assert message in fails(capsys, "bench", *args.split())


def test_pictures_without_matplotlib_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert "pip install '.[bench]' in a checkout" in fails(capsys, "bench", "--plot", "x.png")


def test_a_file_of_prompts_is_not_overwritten(capsys, tmp_path):
    prompts = write(tmp_path / "p.jsonl", ['"ja"'])
    for command in ("bench", "compare", "evaluate"):
        assert "--json would overwrite" in fails(capsys, command, "--prompts", prompts, "--json", prompts)


def test_batches_take_prompts_in_turn_and_every_row_is_one():
    assert _batches({"": PROMPTS}, 1, 4) == ([[PROMPTS[i]] for i in (0, 1, 2, 0)], {"": range(4)})
    assert _batches({"": PROMPTS}, 3, 4)[0] == [PROMPTS, PROMPTS]
    assert _batches({"": PROMPTS}, 5, 4)[0] == [[*PROMPTS, *PROMPTS[:2]]]
    by_category = [PROMPTS[:2], PROMPTS[2:], PROMPTS[:1]], {"a": range(2), "b": range(2, 3)}
    assert _batches({"a": PROMPTS, "b": PROMPTS[:1]}, 2, None) == by_category


def trials(temperature: float = 0.0, new: int = 8) -> list[Trial]:
    """Return undrafted decoding and a drafter's, of a tiny pair."""
    engine = with_tree(tiny_model("llama"), tiny_drafter(), 3, 2)
    engine.model.generation_config.update(eos_token_id=list(range(VOCAB)), repetition_penalty=3.0)
    tokenizer = type("T", (), {"pad_token_id": None, "eos_token_id": 4})
    arguments = fixed_length(engine, tokenizer, new, temperature) | {"seed": 0}
    assert engine.model.generation_config.pad_token_id == 4
    return [Trial(mode, engine, arguments | {"speculate": mode != UNDRAFTED}, 0) for mode in (UNDRAFTED, "drafter")]


def test_no_token_ends_a_text_and_the_models_habits_are_gone():
    plain, drafter = trials()
    run = drafter.run_batch(PROMPTS, 0)
    assert [len(row) for row in run.tokens] == [8, 8, 8]
    assert run.tokens == plain.run_batch(PROMPTS, 0).tokens
    assert 0 < run.first_token < run.seconds
    with pytest.raises(ArgumentError, match=f"90 new ones are more than the {CONTEXT} of"):
        check_room(9, 90, None, CONTEXT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_difference_is_found_with_its_place(monkeypatch, temperature):
    both, run = trials(temperature), Trial.run_batch

    def losing(self, batch, first, **changes):
        found = run(self, batch, first, **changes)
        if self.mode == "drafter" and batch[0] == PROMPTS[1]:
            found.tokens[0][5] = (found.tokens[0][5] + 1) % VOCAB
        return found

    monkeypatch.setattr(Trial, "run_batch", losing)
    batches = [[prompt] for prompt in PROMPTS]
    run_trials(both, batches, 2)
    record = describe(both[1], both[0], batches)
    [found] = record.differences
    assert (record.same, record.texts, found.prompt, found.token) == (2, 3, 1, 5)
    assert found.other == (found.undrafted + 1) % VOCAB
    # A part of the batches has the seeds and the prompts of its own.
    assert describe(both[1], both[0], batches, range(2, 3)).same == 1
    [found] = describe(both[1], both[0], batches, range(1, 3)).differences
    assert (found.prompt, found.token) == (0, 5)


def test_speeds_are_medians_and_a_speedup_is_the_median_ratio():
    both = trials()
    run_trials(both, [PROMPTS], 3)
    for trial, seconds in zip(both, ([1.0, 2.0, 4.0], [1.0, 1.0, 8.0]), strict=True):
        trial.ran.repeats = [
            [replace(runs[0], seconds=value)] for runs, value in zip(trial.ran.repeats, seconds, strict=True)
        ]
    record = describe(both[1], both[0], [PROMPTS])
    assert (record.seconds, record.tokens_per_second, record.speedup) == (1.0, 24.0, 1.0)


def test_a_baseline_that_fails_is_reported_and_left_out(monkeypatch):
    both = trials()
    rival = transformers_trial(both[0], "static", PROMPTS)
    assert (rival.pad_to, rival.arguments["cache_implementation"]) == (8, "static")

    def broken(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr(trial_module, "transformers_run", broken)
    run_trials([*both, rival], [PROMPTS[:1]], 2)
    record = describe(rival, both[0], [PROMPTS[:1]])
    assert (record.error, record.tokens_per_second) == ("RuntimeError: no", None)


@pytest.fixture
def tiny(monkeypatch) -> Pair:
    """A tiny pair, whose prompts are given."""
    monkeypatch.setattr(measure_module, "encode", lambda *_, **__: PROMPTS)
    tokenizer = type("T", (), {"pad_token_id": 0, "eos_token_id": None, "decode": str})
    return Pair("m", "drafter", "d", tokenizer, with_tree(tiny_model("llama"), tiny_drafter(), 3, 2))


def test_where_speculation_is_off_there_is_one_step(tiny, monkeypatch, capsys):
    monkeypatch.setattr(ReDrafter, "proposer_for", lambda self, rows: self.undrafted)
    assert bench_pair(tiny, LoadOptions(), BenchOptions(max_new_tokens=4, num_prompts=1, repeats=1), "a note") == 0
    out = capsys.readouterr().out
    assert "a note" in out
    assert "  draft  " not in out


def test_a_run_that_is_cut_short_leaves_and_prints_what_it_has_measured(tiny, monkeypatch, capsys, tmp_path):
    honest = measure_module.run_trials

    def stop(trials, batches, *more):
        if len(batches[0]) == 2:
            raise KeyboardInterrupt
        honest(trials, batches, *more)

    monkeypatch.setattr(measure_module, "run_trials", stop)
    settings = {"max_new_tokens": 4, "num_prompts": 1, "repeats": 1, "batch_sizes": (1, 2)}
    options = BenchOptions(**settings, json=str(tmp_path / "bench.jsonl"))
    with pytest.raises(KeyboardInterrupt):
        bench_pair(tiny, LoadOptions(), options)
    assert len(Path(options.json).read_text().splitlines()) == 2
    assert "  undrafted " in capsys.readouterr().out
