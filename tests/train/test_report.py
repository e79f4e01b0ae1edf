"""What a training says: before it begins, on its way, and beside the weights."""

import json
import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from helpers.training import batches_of, command, random_drafter, tiny_model
from redrafter import RecurrentDrafter
from redrafter.data.windows import Document, Windows
from redrafter.train.config import DEFAULT_LENGTH, TrainConfig, parse
from redrafter.train.loop import train
from redrafter.train.output import hash_windows
from redrafter.train.plan import (
    build_without_weights,
    last_step,
    resolve_options,
)
from redrafter.train.train_drafter import main


def windows_of(*lengths: int, length: int = 20) -> Windows:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 200, (size,), generator=generator).tolist() for size in lengths]
    return Windows([Document(each, [True] * len(each), f"a:{n}") for n, each in enumerate(ids)], length)


# Before


def test_rows_are_as_long_as_the_base_reads_unless_asked(tmp_path):
    for context, rows in ((256, 256), (4096, DEFAULT_LENGTH)):
        tiny_model(max_position_embeddings=context).save_pretrained(tmp_path / str(context))
        config = TrainConfig(model=str(tmp_path / str(context)))
        assert resolve_options(config).length == rows
        assert resolve_options(replace(config, length=9)).length == 9


def test_a_dry_run_says_what_would_be_and_does_nothing(tmp_path, capsys):
    arguments = command(tmp_path, "--epochs", "3", "--accumulate", "2")
    (tmp_path / "base" / "model.safetensors").unlink()
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl"]
    config = parse(arguments)
    base, drafter = build_without_weights(config)
    real = random_drafter(tiny_model(), recurrence=None)
    assert {name: weight.shape for name, weight in drafter.state_dict().items()} == {
        name: weight.shape for name, weight in real.state_dict().items()
    }
    own, whole = real.num_parameters(), tiny_model().num_parameters()
    assert base.num_parameters() == whole
    for words in (
        f"{whole:,} parameters, float32, frozen",
        f"{own:,} trainable parameters, {100 * own / whole:.1f} % of the base's",
        "data: 12 windows, ",
        "2 x 4 rows on each of 1 process, at most 256 tokens",
        "an epoch: 2 steps",
        "in all: 5 steps, at most 1,280 tokens",
        f"drafter's weights {4 * own / 1e6:.2f} MB",
        "AdamW's state",
        "its attention to the texts",
    ):
        assert words in said
    assert main([*arguments, "--dry-run", "--recurrence", "apple"]) == 0
    said = capsys.readouterr().out
    assert f"{random_drafter(tiny_model()).num_parameters():,} trainable parameters" in said
    assert "its attention to the texts" not in said
    assert main([*arguments, "--dry-run", "--draft-vocab-size", "9999"]) == 2
    assert main([*arguments, "--dry-run", "--drafter", str(tmp_path / "gone")]) == 2


def test_what_ends_a_training():
    windows = windows_of(*[20] * 10)
    for changes, expected in (
        ({}, 5),
        ({"epochs": 1.5}, 8),
        ({"epochs": 2.0, "steps": 7}, 7),
        ({"epochs": 2.0, "steps": 70}, 10),
        ({"steps": 70}, 70),
        ({"minutes": 1.0}, None),
        ({"accumulate": 3}, 2),
        ({"minutes": 1.0, "epochs": 1.0}, 5),
    ):
        assert last_step(TrainConfig(batch_size=2, **changes), windows, 1) == expected, changes
    assert last_step(TrainConfig(batch_size=2), windows, 2) == 3


def test_the_first_sample_is_shown_with_what_is_learnt_of_it(tmp_path, capsys):
    assert main(command(tmp_path, "--show-sample")) == 0
    assert capsys.readouterr().out == "⟦to be or not to be, that is it⟧\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl"]


# On the way


def test_trackers_get_loss_rate_accuracy_and_tokens_per_step():
    logged = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "mine", False, None

        def store_init_configuration(self, values: dict) -> None: ...

        def log(self, values: dict, step: int | None, **_: object) -> None:
            logged.append((step, values))

    model, lines = tiny_model(), []
    config = TrainConfig(draft_len=2, cpu=True, log_every=2, validate_every=3)
    accelerator = Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("redrafter")
    batches = batches_of(*[torch.ones(2, 12, dtype=torch.bool)] * 4)
    how = {"accelerator": accelerator, "validate": iter([1.5, 1.25]).__next__, "log": lines.append}
    result = train(model, random_drafter(model), batches, config, **how)
    assert [step for step, _ in logged] == [2, 3, 4, 4]
    assert len(lines) == 3  # the first step, and every other one
    assert logged[1][1] == {"tokens per step": 1.5}
    assert logged[3][1] == {"tokens per step": 1.25}
    assert set(logged[2][1]) == {"loss", "lr", "tokens/s", "accuracy/draft_1", "accuracy/draft_2"}
    assert logged[2][1]["loss"] == result.loss
    assert result.tokens_per_step == {3: 1.5, 4: 1.25}
    assert result.best_step == 3


# Beside the weights


def test_training_json_says_where_a_drafter_comes_from(tmp_path):
    assert main(command(tmp_path, "--steps", "5", "--validate-every", "2", "--lr", "0.002")) == 0
    text = (tmp_path / "out" / "training.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert str(tmp_path) not in text
    assert found["command"].startswith("redrafter train --model base --data data.jsonl --output out ")
    assert (found["config"]["lr"], found["config"]["data"]) == (0.002, ["data.jsonl"])
    assert found["data"] == ["data.jsonl"]
    assert (len(found["data_hash"]), found["windows"]) == (64, 12)
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) >= {"redrafter", "accelerate"}
    assert (found["base"], found["base_dtype"], found["processes"], found["steps"]) == ("base", "float32", 1, 5)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"], rel=0.05)
    assert list(found["tokens_per_step"]) == ["2", "4", "5"]
    assert math.isfinite(found["loss"])
    assert found["tokens_per_step"][str(found["saved_step"])] == max(found["tokens_per_step"].values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"data.jsonl; 12 windows (sha256 {found['data_hash'][:12]})" in card
    assert "tokens/s on 1 x " in card
    assert f"weights of step {found['saved_step']}, the best of 3 validations" in card
    RecurrentDrafter.from_pretrained(tmp_path / "out")


def test_data_are_told_by_their_contents(tmp_path):
    one = windows_of(9, 20, 9)
    assert hash_windows(one) == hash_windows(windows_of(9, 20, 9)) != hash_windows(windows_of(9, 20, 10))
    masked = windows_of(9, 20, 9)
    masked.mask = ~masked.mask
    assert hash_windows(masked) != hash_windows(one)
