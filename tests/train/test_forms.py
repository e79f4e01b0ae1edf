"""Both optimizers train drafters of every form."""

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from helpers.training import batches_of, command, record, tiny_model
from redrafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.optimizer import hidden_matrices
from redrafter.train.train_drafter import main

FORMS: dict[str, dict[str, Any]] = {
    "recurrent": {},
    "eagle3": {"form": "eagle3"},
    "dflash": {"form": "dflash", "num_layers": 1},
    "dspark": {"form": "dspark", "num_layers": 1},
    "dflash2": {"form": "dflash2", "num_layers": 1},
}
# Parts of names of matrices with a row for each id.
ROWS = ("lm_head", "embed_tokens", "markov_w1", "markov_w2", "codebook")


@pytest.mark.parametrize("form", FORMS)
def test_muon_takes_matrices_whose_rows_are_not_ids(form):
    drafter = new_drafter(tiny_model(), TrainConfig(draft_len=3, **FORMS[form]))
    names = {weight: name for name, weight in drafter.named_parameters()}
    matrices = {name for weight, name in names.items() if weight.dim() == 2}
    assert {names[weight] for weight in hidden_matrices(drafter)} == {
        name for name in matrices if not any(part in name for part in ROWS)
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_learns_a_text_with_muon(form):
    model, losses = tiny_model(), []
    changes = {"optimizer": "muon", "lr": 0.02, "steps": 12, "log_every": 1}
    config = TrainConfig(draft_len=3, cpu=True, **changes, **FORMS[form])
    batches = batches_of(torch.ones(4, 20, dtype=torch.bool)) * 12
    train(model, new_drafter(model, config), batches, config, progress=lambda numbers: losses.append(numbers.loss))
    assert losses[-1] < 0.9 * losses[0]


def test_muon_is_refused_for_a_drafter_without_hidden_matrices():
    drafter = RecurrentDrafter(DrafterConfig(vocab_size=9, hidden_size=4, rnn=False, num_draft_layers=0))
    with pytest.raises(ArgumentError, match="--optimizer muon is for hidden matrices, and this drafter has none"):
        hidden_matrices(drafter)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dflash", "dflash2"])
def test_the_command_trains_with_muon_compiled_and_in_bfloat16(form, tmp_path, capsys):
    more = ["--form", form, "--num-layers", "1", "--steps", "2", "--validate-prompts", "1"]
    words = command(tmp_path, *more, "--optimizer", "muon", "--compile", "--mixed-precision", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)  # of another precision
    assert main(words) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    config, facts = record(tmp_path)["config"], record(tmp_path)
    assert (config["optimizer"], config["compile"], facts["mixed_precision"]) == ("muon", True, "bf16")
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert "Muon's state" in capsys.readouterr().out
