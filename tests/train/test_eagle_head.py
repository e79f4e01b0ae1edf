"""Training of EAGLE-3 heads: what is learnt is what is drafted, and what is written goes out and comes back."""

import pytest
import torch

from helpers.dflash import BLOCK, random_block_drafter
from helpers.eagle import EAGLE_FORMS, plain_logits, random_head
from helpers.models import assert_close_by_scale, tiny_model
from helpers.mtp import random_mtp
from helpers.training import (
    command,
    known_text,
    trained_logits,
)
from helpers.training import tiny_model as trained_base
from redrafter.cli import main as redrafter
from redrafter.drafting.text_drafters import require
from redrafter.errors import UnsupportedError
from redrafter.model.target import Target

DEPTH, LENGTH = 3, 14


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.mark.parametrize("form", EAGLE_FORMS)
def test_what_is_trained_is_what_is_drafted(form, model):
    """Compare with a plain recomputation: from the second step on, the head reads hidden states of its own."""
    head = random_head(**EAGLE_FORMS[form])
    text = known_text(head)
    trained = trained_logits(head, model, text)
    for pending in (1, 5, LENGTH - DEPTH - 1):
        committed, drafts = text[0, : pending + 1], text[0, pending + 1 : pending + DEPTH]
        assert_close_by_scale(trained[pending - 1], plain_logits(head, model, committed, drafts), 1e-5)


def test_other_drafters_are_refused_by_name_and_blocks_are_measured(capsys, tmp_path):
    command(tmp_path)  # writes the base and the prompts
    sizes = {"vocab_size": trained_base().config.vocab_size, "target_layers": [0], "mask_token_id": 3}
    random_block_drafter(**sizes).save_pretrained(tmp_path / "blocks")
    evaluate = ["evaluate", "--model", str(tmp_path / "base"), "--drafter", str(tmp_path / "blocks"), "--device", "cpu"]
    evaluate += ["--prompts", str(tmp_path / "data.jsonl"), "--num-prompts", "2", "--new-tokens", "8"]
    assert redrafter([*evaluate, "--explain"]) == 0
    assert f"5x{BLOCK - 1}" in capsys.readouterr().out
    assert redrafter([*evaluate, "--shapes", f"5x{BLOCK}"]) == 2
    assert f"draft_len_per_beam={BLOCK} is more than the {BLOCK - 1} tokens that a block" in capsys.readouterr().err
    for name in ("evaluate", "train"):
        with pytest.raises(UnsupportedError, match=f"`redrafter {name}` cannot draft over .* of the kind MTP layer"):
            require(random_mtp(Target(trained_base())), name)
