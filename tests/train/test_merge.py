"""Shards of a run, put together, are what one run writes, or are refused."""

import json
from pathlib import Path

import pytest

import redrafter.cli
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.train.regenerate.journal import Journal, merge

ROWS = 11
FAILED = {3, 7}


def shard_file(folder: Path, index: int, count: int, **settings: object) -> Path:
    """Write what the run of one shard leaves."""
    rows = range(index, ROWS, count)
    failed = [{"row": row, "error": f"no {row}"} for row in rows if row in FAILED]
    answered = [{"row": row, "loss_mask": [1] * row, "shown": "é"} for row in rows if row not in FAILED]
    output = folder / f"own.{index}-{count}.jsonl"
    with Journal(output, {}) as journal:
        journal.add([*reversed(answered), *failed])
        counts = {
            "input": len(rows),
            "success": len(answered),
            "errors": len(failed),
            "skipped": 0,
            "ended_at_tools": 0,
        }
        costs = {"tokens": journal.tokens, "seconds": 0.5, "steps": 2, "emitted": 4, "tokens_per_step": 2.0}
        journal.finish(counts | costs | {"settings": {"shard": f"{index}/{count}", "seed": 5} | settings})
    return output


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    return [shard_file(tmp_path, index, 4) for index in range(4)]


def test_shards_in_any_order_are_one_run_byte_for_byte(tmp_path, shards):
    whole, merged = shard_file(tmp_path, 0, 1), tmp_path / "own.jsonl"
    summary = merge(merged, shards[::-1])
    assert merged.read_bytes() == whole.read_bytes()
    errors = [path.with_name(path.name + ".errors.jsonl") for path in (merged, whole)]
    assert errors[0].read_bytes() == errors[1].read_bytes()
    expected = json.loads(whole.with_name(whole.name + ".json").read_text())
    shared = ("input", "success", "errors", "skipped", "tokens", "settings", "tokens_per_step")
    assert {name: summary[name] for name in shared} == {name: expected[name] for name in shared}
    assert json.loads(merged.with_name("own.jsonl.json").read_text()) == summary


def test_the_command_says_what_was_merged(tmp_path, shards, capsys):
    output = tmp_path / "own.jsonl"
    assert redrafter.cli.main(["regenerate", "merge", str(output), *map(str, shards)]) == 0
    assert capsys.readouterr().out == f"{output}: 9 of 11 rows of 4 shards, 2 errors, 0 skipped; 45 tokens\n"


def test_a_merged_file_is_replaced_only_if_asked(tmp_path, shards):
    output = tmp_path / "own.jsonl"
    output.write_text("mine")
    with pytest.raises(ArgumentError, match="pass --overwrite"):
        merge(output, shards)
    assert output.read_text() == "mine"
    merge(output, shards, overwrite=True)
    assert output.read_text() != "mine"


def renamed(file: Path, suffix: str) -> Path:
    file.rename(file.with_name(file.name + suffix))
    return file


def cut(file: Path, lost: int) -> Path:
    """Cut bytes from a file's end, or its last line where `lost` is 0."""
    content = file.read_bytes()
    file.write_bytes(content[:-lost] if lost else b"".join(content.splitlines(keepends=True)[:-1]))
    return file


def summed_up(file: Path, summary: str) -> Path:
    file.with_name(file.name + ".json").write_text(summary)
    return file


NO_ROW, NO_SUMMARY = "holds a line that is no row", "is not a summary of redrafter regenerate"
LOST_ROW = "does not hold the . rows that it was finished with"
# What may be wrong with four shards: a function that makes it so and returns those to merge, and what is said of it.
WRONG = {
    "missing": (lambda s: s[::2], "2 of 4 shards missing: 1/4, 3/4; give all of them"),
    "twice": (lambda s: [*s, s[1]], "are both shard 1/4: give it once"),
    "seed": (lambda s: [*s[:3], shard_file(s[3].parent, 3, 4, seed=6)], "are not of one run: seed was 5 and 6"),
    "count": (lambda s: [*s[:3], shard_file(s[3].parent, 3, 4, shard="3/5")], "run: shard was '0/4' and '3/5'"),
    "unfinished": (lambda s: [*s[:3], renamed(s[3], ".partial")], r"own\.3-4\.jsonl: it has not finished: run its "),
    "gone": (lambda s: [*s[:3], renamed(s[3], ".old")], r"own\.3-4\.jsonl: no such file"),
    "lost row": (lambda s: [cut(s[0], 0), *s[1:]], LOST_ROW),
    "lost error": (lambda s: [*s[:3], cut(s[3].with_name(s[3].name + ".errors.jsonl"), 0) and s[3]], LOST_ROW),
    "lost line feed": (lambda s: [cut(s[0], 1), *s[1:]], NO_ROW),
    "cut short": (lambda s: [cut(s[0], 9), *s[1:]], NO_ROW),
    "empty summary": (lambda s: [summed_up(s[0], ""), *s[1:]], NO_SUMMARY),
    "list": (lambda s: [summed_up(s[0], "[]"), *s[1:]], NO_SUMMARY),
    "no shard": (lambda s: [summed_up(s[0], '{"settings": {}}'), *s[1:]], NO_SUMMARY),
    "no counts": (lambda s: [summed_up(s[0], '{"settings": {"shard": "0/4"}}'), *s[1:]], NO_SUMMARY),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_shards_that_are_not_one_whole_run_are_refused_by_name(tmp_path, shards, wrong):
    make, reason = WRONG[wrong]
    given, before = make(shards), sorted(tmp_path.iterdir())
    with pytest.raises((ArgumentError, CheckpointError), match=reason):
        merge(tmp_path / "own.jsonl", given)
    assert sorted(tmp_path.iterdir()) == before
