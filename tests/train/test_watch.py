"""Training in rounds on files as they come, from the drafter that the round before has saved."""

import json
from types import SimpleNamespace

import pytest
import torch

from helpers.training import command, record, refused
from redrafter import RecurrentDrafter
from redrafter.data import rows
from redrafter.train.train_drafter import main


def words_of(tmp_path, *more: str) -> list[str]:
    """The words of a command that trains on a directory, after a first training to its output."""
    words = command(tmp_path, "--steps", "2", "--validate-prompts", "0")
    assert main(words) == 0
    words[words.index("--data") + 1] = str(tmp_path / "texts")
    return [*words, *more]


def add_file(folder, name: str, rows: int) -> None:
    row = {"input_ids": [5 + n % 40 for n in range(30)], "loss_mask": [0] * 4 + [1] * 26}
    (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * rows)


@pytest.mark.parametrize(
    ("replayed", "more", "again"),
    [
        (2048, [], ["b.jsonl", "bb.jsonl"]),
        (2048, ["--lora-rank", "2"], ["b.jsonl", "bb.jsonl"]),
        (11, [], ["bb.jsonl"]),
        (5, [], []),
    ],
    ids=["whole", "low rank", "the newest again", "nothing again"],
)
def test_each_round_trains_the_last_ones_drafter_on_what_has_come_since(
    tmp_path, monkeypatch, capsys, replayed, more, again
):
    monkeypatch.setattr("redrafter.train.train_drafter.REPLAYED_ROWS", replayed)
    texts, out, trained = tmp_path / "texts", tmp_path / "out", []
    words = words_of(tmp_path, "--drafter", str(tmp_path / "first"), "--watch", "--watch-rows", "8", *more)
    out.rename(tmp_path / "first")
    texts.mkdir()

    def weights() -> torch.Tensor:
        drafter = RecurrentDrafter.from_pretrained(out if out.exists() else tmp_path / "first")
        return torch.cat([weight.detach().flatten() for weight in drafter.parameters()])

    before = weights()
    slept = iter(range(9))

    def sleep(_: float) -> None:
        """Let files come while the command waits, and end it in the end."""
        step = next(slept)
        if step == 0:
            add_file(texts, "a", 6)  # too few rows
        elif step == 1:
            add_file(texts, "b", 6)
            add_file(texts, "bb", 6)
        elif step == 2:
            trained.append((record(tmp_path)["data"], weights()))
            (texts / "a.jsonl").unlink()
            add_file(texts, "c", 8)
        else:
            trained.append((record(tmp_path)["data"], weights()))
            raise KeyboardInterrupt

    monkeypatch.setattr("redrafter.train.train_drafter.time", SimpleNamespace(sleep=sleep))
    opened = iter(range(4))  # each file once, or the command would train on them for ever

    def open_lines(file):
        assert next(opened, None) is not None, f"{file} is counted again"
        return rows.open_lines(file)

    monkeypatch.setattr("redrafter.train.train_drafter.open_lines", open_lines)
    assert main(words) == 130
    (first, after_first), (second, after_second) = trained
    assert first == ["a.jsonl", "b.jsonl", "bb.jsonl"]
    assert second == [*again, "c.jsonl"], "a.jsonl is gone"
    assert not torch.equal(before, after_first)
    assert not torch.equal(after_first, after_second)
    assert record(tmp_path)["config"]["drafter"] == "out"
    told = capsys.readouterr().out
    assert "round 1: 18 rows of 3 new files\n" in told
    earlier = f", and {6 * len(again)} of {len(again)} earlier ones" if again else ""
    assert f"round 2: 8 rows of 1 new files{earlier}\n" in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--watch"], "--drafter current"),
        (["--watch", "--drafter", "current", "--resume"], "leave out --watch"),
        (["--watch", "--watch-rows", "0", "--drafter", "current"], "--watch-rows must be positive"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, capsys, more, told):
    (tmp_path / "texts").mkdir()
    assert told in refused(capsys, words_of(tmp_path, *more))


def test_a_file_is_not_watched_and_no_drafter_is_current(tmp_path, capsys):
    words = command(tmp_path, "--watch", "--drafter", "current")
    assert "and there is none: name its directory" in refused(capsys, words)
    words[-1] = str(tmp_path)
    assert "is none: make it" in refused(capsys, words)
