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
        counts = {"input": len(rows), "success": len(answered), "errors": len(failed), "skipped": 0}
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


def refused(folder: Path, shards: list[Path], error: type[Exception], reason: str) -> None:
    """Check that a merge is refused and writes nothing."""
    before = sorted(folder.iterdir())
    with pytest.raises(error, match=reason):
        merge(folder / "own.jsonl", shards)
    assert sorted(folder.iterdir()) == before


def test_a_missing_shard_is_named(tmp_path, shards):
    refused(tmp_path, [shards[0], shards[2]], ArgumentError, "2 of 4 shards missing: 1/4, 3/4; give all of them")


def test_a_shard_that_is_given_twice_is_named(tmp_path, shards):
    refused(tmp_path, [*shards, shards[1]], ArgumentError, "are both shard 1/4: give it once")


@pytest.mark.parametrize(
    ("other", "reason"), [({"seed": 6}, "seed was 5 and 6"), ({"shard": "3/5"}, "shard was '0/4' and '3/5'")]
)
def test_a_shard_of_another_run_is_refused_by_the_setting(tmp_path, shards, other, reason):
    shard_file(tmp_path, 3, 4, **other)
    refused(tmp_path, shards, ArgumentError, f"are not of one run: {reason}")


def test_a_shard_that_has_not_finished_is_named(tmp_path, shards):
    shards[2].rename(tmp_path / (shards[2].name + ".partial"))
    refused(tmp_path, shards, CheckpointError, r"own\.2-4\.jsonl: it has not finished: run its command again")


def test_a_shard_that_is_not_there_is_named(tmp_path, shards):
    shards[2].unlink()
    refused(tmp_path, shards, CheckpointError, r"own\.2-4\.jsonl: no such file")


@pytest.mark.parametrize(("shard", "suffix"), [(2, ""), (3, ".errors.jsonl")])
def test_a_shard_that_lost_a_row_is_named(tmp_path, shards, shard, suffix):
    file = shards[shard].with_name(shards[shard].name + suffix)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    refused(tmp_path, shards, CheckpointError, "does not hold the . rows that it was finished with")


@pytest.mark.parametrize("lost", [1, 9])
def test_a_shard_that_was_cut_short_is_named(tmp_path, shards, lost):
    shards[2].write_bytes(shards[2].read_bytes()[:-lost])
    refused(tmp_path, shards, CheckpointError, "holds a line that is no row")


@pytest.mark.parametrize("summary", ["", "[]", '{"settings": {}}', '{"settings": {"shard": "0/4"}}'])
def test_a_file_without_its_summary_is_no_shard(tmp_path, shards, summary):
    shards[0].with_name(shards[0].name + ".json").write_text(summary)
    refused(tmp_path, shards, CheckpointError, "is no summary of redrafter regenerate")
