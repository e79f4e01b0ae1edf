"""What training does with drafters of every form: what is learnt, what the command writes, and where it continues."""

import shutil
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from helpers.dflash import DFLASH_FORMS, random_block_drafter
from helpers.eagle import EAGLE_FORMS, random_head
from helpers.models import DRAFTER_ALONE, assert_close_by_scale
from helpers.models import tiny_model as tiny_base
from helpers.training import (
    batches_of,
    command,
    known_text,
    learn_circle,
    loss_of,
    record,
    refused,
    round_circle,
    tiny_model,
    trained_logits,
    written,
)
from redrafter import DrafterConfig, RecurrentDrafter, ReDrafter
from redrafter.convert.convert_checkpoint import main as convert_main
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.errors import ArgumentError
from redrafter.measure.replay import ValidationTexts
from redrafter.model.target import Target
from redrafter.train.config import TrainConfig
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import train
from redrafter.train.optimizer import hidden_matrices
from redrafter.train.output import candidates
from redrafter.train.train_drafter import main
from redrafter.tree.sizes import TreeShape

FORMS: dict[str, dict[str, Any]] = {
    "recurrent": {},
    "eagle3": {"form": "eagle3"},
    "dflash": {"form": "dflash", "num_layers": 1},
    "dspark": {"form": "dspark", "num_layers": 1},
    "dflash2": {"form": "dflash2", "num_layers": 1},
}
OF_TEXTS = [form for form in FORMS if form != "recurrent"]
BLOCKS = [form for form in OF_TEXTS if form != "eagle3"]
# Parts of names of matrices with a row for each id.
ROWS = ("lm_head", "embed_tokens", "markov_w1", "markov_w2", "codebook")
# The loss has no bound of logits.
RANDOM = {
    name: partial(random_block_drafter, **changes | {"logit_softcap": None}) for name, changes in DFLASH_FORMS.items()
}
RANDOM |= {f"EAGLE {name}": partial(random_head, **changes) for name, changes in EAGLE_FORMS.items()}


# What is learnt


def test_texts_packed_into_a_row_are_apart():
    for form in ("EAGLE published", "EAGLE speculators", "speculators'", "DSpark", "DFlash2"):
        drafter, model = RANDOM[form](), tiny_base("llama")
        first, second = known_text(drafter, 8), known_text(drafter, 9, seed=1)
        packed = trained_logits(drafter, model, torch.cat([first, second], dim=1), torch.tensor([[0] * 8 + [1] * 9]))
        assert_close_by_scale(packed[8:14], trained_logits(drafter, model, second)[:6], 1e-5)


def test_every_weight_is_learnt_and_the_base_is_not():
    for form, make in RANDOM.items():
        drafter, model = make(), tiny_base("llama")
        tokens = known_text(drafter)
        loss_of(drafter, model, tokens, torch.ones_like(tokens, dtype=torch.bool)).backward()
        unlearnt = [name for name, x in drafter.named_parameters() if x.grad is None or not x.grad.any()]
        assert not unlearnt, form
        assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.variant
@pytest.mark.parametrize("form", OF_TEXTS)
def test_a_few_steps_of_training_are_worth_many_tokens(form):
    base = tiny_model(vocab=48, initializer_range=0.05, num_hidden_layers=3)
    circle = learn_circle(base, 40)
    config = TrainConfig(steps=60, draft_len=4, cpu=True, lr=1e-2, log_every=20, **FORMS[form])
    drafter = new_drafter(base, config, None if form == "dflash2" else circle.sort().values)
    texts, shape = (
        ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20),
        TreeShape(3, 4, 13),
    )
    before = texts.measure(drafter, shape).tokens_per_step
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    losses: list[float] = []
    result = train(base, drafter, batches, config, progress=lambda numbers: losses.append(numbers.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert result.accuracy[3] > 0.8
    measured = texts.measure(drafter, shape)
    assert measured.tokens_per_step > max(3.5, before)
    assert form == "eagle3" or max(each.depth for each in candidates(drafter, 4)) == 4  # a block holds no more
    engine = ReDrafter(Target(base), drafter.eval(), shape, options=DRAFTER_ALONE)
    how = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    out = engine.generate(torch.tensor(texts.prompts), **how)
    assert torch.equal(out.sequences, torch.tensor(texts.texts.tokens))
    assert (measured.steps, measured.emitted) == (out.stats.steps, out.stats.emitted)


# Muon


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


# The command


def words_of(form: str) -> list[str]:
    return ["--form", form] if form == "eagle3" else ["--form", form, "--num-layers", "1"]


@pytest.mark.parametrize("form", OF_TEXTS)
def test_the_command_makes_a_drafter_that_loads_goes_out_and_comes_back(form, tmp_path, capsys):
    ids = [] if form == "dflash2" else ["--draft-vocab-size", "40"]
    words = command(tmp_path, *words_of(form), *ids, "--steps", "4", "--lr", "1e-2")
    assert main(words) == 0
    base, out = tmp_path / "base", tmp_path / "out"
    config = open_drafter_model(out).config
    assert config.trained_draft_len == 3
    if form in BLOCKS:
        assert (config.algorithm, config.drafts) == (form, 3)
        assert (config.own_head, config.draft_vocab_size) == ((True, 40) if ids else (False, None))
        assert config.draft_len_per_beam <= 3
    assert f"# {'DFlash drafter' if form in BLOCKS else 'EAGLE-3 head'} for base" in (out / "README.md").read_text()
    assert record(tmp_path)["config"]["form"] == form
    there = ["--drafter-model-dir", str(out), "--to", "speculators", "--output-dir", str(tmp_path / "theirs")]
    back = ["--drafter-model-dir", str(tmp_path / "theirs"), "--to", "drafter", "--output-dir", str(tmp_path / "back")]
    assert convert_main(there) == convert_main(back) == 0
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        texts, stats = written(base, out, **how)
        again, same = written(base, tmp_path / "back", **how)
        assert torch.equal(texts, again)
        assert stats == same
    more = command(tmp_path, "--drafter", str(out), "--output", str(tmp_path / "more"), "--steps", "2")
    assert main([*more, "--lora-rank", "2"]) == 0
    assert "--form is the drafter's own" in refused(capsys, [*more, "--form", form, "--overwrite"])
    for dry in ([], ["--dry-run"]) if form in BLOCKS else ():
        error = refused(capsys, [*more, "--draft-len", "4", "--overwrite", *dry])
        assert "--draft-len 4 is more than the 3 tokens that a block of this drafter holds" in error
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert "the drafter's states" in capsys.readouterr().out


@pytest.mark.parametrize("form", OF_TEXTS)
def test_a_training_that_continues_ends_bit_for_bit_where_it_would_have(form, tmp_path, capsys):
    saving = ["--steps", "4", "--save-every", "2", "--validate-prompts", "0"]
    words = command(tmp_path, *words_of(form), *saving)
    assert main(words) == 0
    whole = open_drafter_model(tmp_path / "out").state_dict()
    shutil.rmtree(tmp_path / "out.checkpoints" / "step-0000004")
    capsys.readouterr()
    assert main([*words, "--resume", "--overwrite"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    found = open_drafter_model(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    other = "dspark" if form == "dflash" else "dflash"
    again = command(tmp_path, "--form", other, *saving, "--resume", "--overwrite")
    assert f"was made with --form {form}" in refused(capsys, again)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--form eagle3 --recurrence apple", "--recurrence is for --form recurrent: leave it out with --form eagle3"),
        ("--form dflash2 --draft-vocab-size 40", "dspark: leave it out with --form dflash2"),
        (
            "--form dspark --recipe small",
            "--recipe small is for a new drafter with a gated cell: leave it out with --form",
        ),
        ("--form dflash --num-layers 0", "--num-layers: a drafter of --form dflash has at least one layer"),
        ("--form dflash --target-layers none", "--target-layers: a drafter of --form dflash has at least one layer"),
    ],
)
def test_options_of_other_forms_are_refused_by_name(words, message, capsys, tmp_path):
    assert message in refused(capsys, command(tmp_path, *words.split()))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dflash", "dflash2"])
def test_the_command_trains_with_muon_compiled_and_in_bfloat16(form, tmp_path, capsys):
    more = [*words_of(form), "--steps", "2", "--validate-prompts", "1"]
    words = command(tmp_path, *more, "--optimizer", "muon", "--compile", "--mixed-precision", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)  # of another precision
    assert main(words) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    config, facts = record(tmp_path)["config"], record(tmp_path)
    assert (config["optimizer"], config["compile"], facts["mixed_precision"]) == ("muon", True, "bf16")
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert "Muon's state" in capsys.readouterr().out
