"""Losses, weights of steps and optimizers train drafters of every form."""

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from helpers.training import batches_of, command, record, tiny_model
from redrafter.errors import ArgumentError
from redrafter.train.config import LOSSES, TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.loss import Unroll
from redrafter.train.optimizer import hidden_matrices
from redrafter.train.teacher import Teacher
from redrafter.train.train_drafter import main

FORMS: dict[str, dict[str, Any]] = {
    "recurrent": {"head_shortlist": 128},
    "eagle3": {"form": "eagle3"},
    "dflash": {"form": "dflash", "num_layers": 1},
    "dspark": {"form": "dspark", "num_layers": 1, "markov_rank": 8},
    "dflash2": {"form": "dflash2", "num_layers": 1, "selector_rank": 8},
}
# Parts of names of matrices with a row for each id.
ROWS = ("lm_head", "embed_tokens", "shortlist.head", "markov_w1", "markov_w2", "codebook")


@pytest.mark.parametrize("form", FORMS)
def test_muon_takes_matrices_whose_rows_are_not_ids(form):
    drafter = new_drafter(tiny_model(), TrainConfig(draft_len=3, **FORMS[form]))
    names = {weight: name for name, weight in drafter.named_parameters()}
    matrices = {name for weight, name in names.items() if weight.dim() == 2}
    assert {names[weight] for weight in hidden_matrices(drafter)} == {
        name for name in matrices if not any(part in name for part in ROWS)
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_learns_a_text_with_muon_and_another_loss(form):
    model, losses = tiny_model(), []
    changes = {"loss": "lk-lambda", "optimizer": "muon", "rejected": 0.5, "lr": 0.02, "steps": 12, "log_every": 1}
    config = TrainConfig(draft_len=3, cpu=True, **changes, **FORMS[form])
    batches = batches_of(torch.ones(4, 20, dtype=torch.bool)) * 12
    train(model, new_drafter(model, config), batches, config, progress=lambda numbers: losses.append(numbers.loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("form", FORMS)
def test_every_loss_and_weight_changes_the_gradients_of_every_form(form):
    model, tokens = tiny_model(), batches_of(torch.ones(2, 16, dtype=torch.bool))[0][0]
    drafter = new_drafter(model, TrainConfig(draft_len=3, **FORMS[form]))
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(tokens)
    seen: list[torch.Tensor] = []
    for options in [*({"loss": loss} for loss in LOSSES), {"reach": 0.5}, {"reach": 0.5, "reach_by": "dpace"}]:
        drafter.zero_grad()
        Unroll(drafter, TrainConfig(draft_len=3, **options))(tokens, tokens > 0, output).loss.backward()
        gradients = [weight.grad.flatten() for weight in drafter.parameters() if weight.grad is not None]
        seen.append(torch.cat(gradients))
        assert seen[-1].isfinite().all()
        assert not any(torch.allclose(seen[-1], other, rtol=1e-3) for other in seen[:-1]), options


def test_muon_is_refused_for_a_drafter_without_hidden_matrices():
    drafter = new_drafter(tiny_model(), TrainConfig(rnn=False, num_layers=0, draft_len=3))
    with pytest.raises(ArgumentError, match="--optimizer muon is for hidden matrices, and this drafter has none"):
        hidden_matrices(drafter)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dflash", "dflash2"])
def test_the_command_trains_with_muon_compiled_and_in_bfloat16(form, tmp_path, capsys):
    more = ["--form", form, "--num-layers", "1", "--steps", "2", "--validate-prompts", "1"]
    objective = ["--loss", "lk-alpha", "--reach", "0.5", "--reach-by", "dpace", "--rejected", "0.5"]
    words = command(tmp_path, *more, *objective, "--optimizer", "muon", "--compile", "--mixed-precision", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)  # of another precision
    assert main(words) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    config, facts = record(tmp_path)["config"], record(tmp_path)
    assert (config["loss"], config["reach_by"], config["optimizer"]) == ("lk-alpha", "dpace", "muon")
    assert (config["compile"], facts["mixed_precision"]) == (True, "bf16")
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert "Muon's state" in capsys.readouterr().out
