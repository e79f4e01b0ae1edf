"""The trainer: how it steps, what it learns, what its command says and writes."""

import re
import shlex
from dataclasses import replace
from itertools import count, repeat
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from helpers.chats import BYTES
from helpers.command_line import fails
from helpers.training import (
    CONTEXT,
    VOCAB,
    base_dir,
    batches_of,
    command,
    learn_circle,
    random_drafter,
    record,
    refused,
    round_circle,
    tiny_model,
)
from redrafter import DrafterConfig, RecurrentDrafter, ReDrafter
from redrafter.convert.convert_checkpoint import main as convert_main
from redrafter.errors import ArgumentError
from redrafter.measure.replay import ValidationTexts
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.train import loop, progress
from redrafter.train.config import TrainConfig, parse
from redrafter.train.init_drafter import new_drafter
from redrafter.train.loop import learning_rate_factor, train
from redrafter.train.loss import BatchLoss, Unroll, total_weight
from redrafter.train.optimizer import make_optimizer
from redrafter.train.processes import new_accelerator
from redrafter.train.progress import Clock, LossMeter, Progress, TrainingState
from redrafter.train.train_drafter import main
from redrafter.tree.sizes import TreeShape


def loss_of(model: PreTrainedModel, drafter: RecurrentDrafter, config: TrainConfig, batches: list) -> Tensor:
    """Compute the mean loss over some batches."""
    unroll, total = Unroll(drafter, config), sum(total_weight(mask, config) for _, mask in batches)
    with Teacher(model) as teacher:
        return sum(unroll(tokens, mask, teacher.read_batch(tokens)).loss for tokens, mask in batches) / total


def gradients_of(model: PreTrainedModel, drafter: RecurrentDrafter, batches: list, config: TrainConfig) -> list[Tensor]:
    """Record the gradients that the optimizer is given at each step, flat."""
    steps = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        steps.append(torch.cat([gradient.flatten() for gradient in gradients]))

    hook = register_optimizer_step_pre_hook(keep)
    train(model, drafter, batches, config, log=lambda _: None)
    hook.remove()
    return steps


# How it steps


def test_a_step_follows_the_gradient_of_the_mean(monkeypatch):
    """The mean is over the step's batches only, whatever the number of targets; the gradient is clipped to a norm."""
    model = tiny_model()
    batches = batches_of(*(torch.rand(2, 30) < part for part in (0.9, 0.4, 0.2, 0.7)))
    for norm, accumulate in ((1e9, 1), (0.01, 1), (1e9, 2), (1e9, 3)):
        monkeypatch.setattr(loop, "MAX_GRAD_NORM", norm)
        drafter = random_drafter(model)
        config = TrainConfig(  # with a learning rate that leaves the weights where they are
            draft_len=3, cpu=True, lr=1e-12, distill=0.6, accumulate=accumulate
        )
        steps = gradients_of(model, drafter, batches, config)
        groups = [batches[first : first + accumulate] for first in range(0, 4, accumulate)]
        for found, group in zip(steps, groups, strict=True):
            drafter.zero_grad()
            loss_of(model, drafter, config, group).backward()
            expected = torch.cat([weight.grad.flatten() for weight in drafter.parameters()])
            expected *= min(1, norm / expected.norm())
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    model, config = tiny_model(), TrainConfig(optimizer="muon", lr=0.01)
    drafter = new_drafter(model, TrainConfig(head_rank=8))
    optimizer = make_optimizer(drafter, config, torch.device("cpu"))
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    for weight in drafter.parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    orthogonal = set()
    for name, weight in drafter.named_parameters():
        step = (weight.detach() - before[name]) / 0.01
        if "exp_avg" in optimizer.state[weight]:
            torch.testing.assert_close(step.abs(), torch.ones_like(step), rtol=0.01, atol=0.01)  # Adam's first step
        else:
            orthogonal.add(name)
            spread = torch.linalg.svdvals(step / (0.2 * max(step.shape) ** 0.5))
            assert (spread - 1).abs().max() < 0.5, name
    assert orthogonal == {name for name, weight in drafter.named_parameters() if weight.dim() == 2} - {"lm_head.weight"}


def test_muon_is_refused_before_the_base_is_loaded_where_torch_lacks_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.setattr("redrafter.train.train_drafter.load_model", None)
    assert "--optimizer muon needs torch 2.9 or newer" in refused(capsys, command(tmp_path, "--optimizer", "muon"))


def test_bf16_computes_in_half_precision_and_keeps_masters():
    model = tiny_model()
    batches, trained = batches_of(*[torch.ones(4, 20, dtype=torch.bool)] * 4), []
    for precision in ("no", "bf16"):
        drafter = random_drafter(model)
        config = TrainConfig(draft_len=3, cpu=True, mixed_precision=precision)
        AcceleratorState._reset_state(reset_partial_state=True)
        trained.append((train(model, drafter, batches, config, log=lambda _: None).loss, drafter.state_dict()))
    AcceleratorState._reset_state(reset_partial_state=True)
    (loss, exact), (half_loss, half) = trained
    assert loss != half_loss
    assert loss == pytest.approx(half_loss, rel=0.02)
    assert all(weight.dtype == torch.float32 for weight in half.values())
    assert not torch.equal(half["lm_head.weight"], half["lm_head.weight"].bfloat16().float())
    torch.testing.assert_close(half["lm_head.weight"], exact["lm_head.weight"], rtol=0.01, atol=5e-3)


# What it learns, and what it reports


def test_a_few_steps_of_training_are_worth_many_tokens():
    base = tiny_model(vocab=48, initializer_range=0.05)
    circle = learn_circle(base, 40)
    config = TrainConfig(steps=80, draft_len=4, cpu=True, lr=1e-2, log_every=40, validate_every=40)
    drafter = new_drafter(base, config)
    validation_texts = ValidationTexts(Target(base), [circle[n : n + 3].tolist() for n in range(0, 36, 4)], 20)
    batches = ((round_circle(circle, 8, step), torch.ones(8, 24, dtype=torch.bool)) for step in count())
    seen = []

    def validate() -> float:
        seen.append(validation_texts.measure(drafter, TreeShape(3, 4, 13)).tokens_per_step)
        return seen[-1]

    validate()
    frozen = {name: weight.clone() for name, weight in base.state_dict().items()}
    result = train(base, drafter, batches, config, validate=validate, log=lambda _: None)
    assert len(seen) == 3
    assert seen[0] < 1.5 < 3.5 < seen[-1]
    assert result.tokens_per_step == {40: seen[1], 80: seen[2]}
    assert result.best_step == (80 if seen[2] >= seen[1] else 40)
    assert result.accuracy[0] > 0.9
    assert result.accuracy[3] > 0.8
    assert not drafter.training
    assert all(torch.equal(weight, frozen[name]) for name, weight in base.state_dict().items())


def test_training_stops_at_its_minutes_its_steps_or_its_batches(monkeypatch):
    model = tiny_model()
    batch = torch.randint(3, VOCAB, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    config, quiet = TrainConfig(draft_len=2, cpu=True), {"log": lambda _: None}
    assert train(model, random_drafter(model), [batch] * 3, config, **quiet).step == 3
    assert train(model, random_drafter(model), [batch] * 9, replace(config, steps=4), **quiet).step == 4
    ticks = count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 100))
    result = train(model, random_drafter(model), repeat(batch), replace(config, minutes=0.005), **quiet)
    assert 0.3 <= result.seconds < 0.5
    assert 2 < result.step < 40


def test_progress_is_of_the_steps_since_the_last_line():
    meter, counts = LossMeter(2, new_accelerator(TrainConfig(cpu=True))), torch.tensor([[4, 2], [2, 1]])
    for loss in (6.0, 2.0):
        meter.add(0, BatchLoss(torch.tensor(loss), *counts))
    meter.add_weight(torch.tensor(4.0), 7)
    state = TrainingState()
    meter.update_state(state)
    assert (state.loss, state.accuracy, meter.tokens) == (2.0, [0.5, 0.5], 7)
    meter.add(1, BatchLoss(torch.tensor(3.0), *torch.tensor([[4, 0], [0, 0]])))
    meter.add_weight(torch.tensor(1.0), 5)
    meter.update_state(state)
    meter.update_state(state)  # nothing new: what was read stands
    assert (state.loss, state.accuracy, meter.tokens) == (3.0, [0.0, 0.0], 12)


def test_time_counts_on_without_what_is_beside_the_training(monkeypatch):
    now = [7.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    accelerator = new_accelerator(TrainConfig(cpu=True))
    clock = Clock(TrainConfig(minutes=1.0), accelerator, TrainingState(step=5, tokens=7, seconds=30.0))
    with clock.paused():
        now[0] += 0.2
    assert clock.seconds == pytest.approx(30)
    assert clock.agree(False) == (pytest.approx(0.5), False)
    assert clock.agree(True)[1]
    now[0] += 6
    assert clock.seconds == pytest.approx(36)
    shown = str(Progress(6, 24, 0.25, 600.0, 1234.5, 2.0, [0.5, 0.25], 1e-3))
    assert shown == "step 6/24  10:00, 30:00 left  1,234 tokens/s  loss 2.0000  right 0.500 0.250  lr 1.0e-03"
    first = str(Progress(1, 24, 0.04, 0.0, 170.0, 2.0, [0.5], 1e-3, 12.0))
    assert first.startswith("step 1/24  0:12 for the first step  170 tokens/s  loss 2.0000")


def test_a_training_of_one_step_changes_the_weights():
    model = tiny_model()
    drafter = random_drafter(model)
    before = drafter.lm_head.weight.clone()
    [batch] = batches_of(torch.ones(2, 12, dtype=torch.bool))
    train(model, drafter, [batch], TrainConfig(steps=1, draft_len=2, cpu=True), log=lambda _: None)
    assert not torch.equal(drafter.lm_head.weight, before)


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate_factor(step / 100, 0.1) for step in range(100)]
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.5, rel=0.01)
    assert max(rates) == rates[10]
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[-1] < 0.001
    assert learning_rate_factor(0.5, 0) == pytest.approx(0.5)


@pytest.mark.parametrize(("what", "step"), [("loss", 7), ("gradient", 2)])
def test_what_is_not_finite_stops_a_training_and_is_named_by_its_step(what, step):
    model = tiny_model()
    drafter, lines = random_drafter(model), []
    config = TrainConfig(draft_len=2, cpu=True, log_every=10 if what == "loss" else 2)

    def batches():
        for number, batch in enumerate(batches_of(*[torch.ones(2, 12, dtype=torch.bool)] * 30)):
            if number == 6 and what == "loss":
                drafter.lm_head.weight.data.fill_(float("nan"))
            yield batch

    if what == "gradient":  # from the first line of progress on
        drafter.lm_head.weight.register_hook(lambda gradient: gradient * (float("inf") if lines else 1))
    with pytest.raises(ArgumentError, match=f"not finite at step {step};"):
        train(model, drafter, batches(), config, log=lines.append)


# The command


def test_the_command_makes_a_directory_that_loads(tmp_path, capsys):
    base_dir(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: LICENSE\n---\n# A base\n")
    assert main(command(tmp_path, "--epochs", "2", "--draft-vocab-size", "40")) == 0
    out, said = tmp_path / "out", capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl", "out"]
    drafter = RecurrentDrafter.from_pretrained(out)
    config = drafter.config
    assert (config.trained_draft_len, config.exit_dim, config.base_model) == (3, 64, "base")
    chosen = re.search(r"nodes: (\d+)x(\d+) writes most, tokens per step ([\d.]+) greedily", said)
    assert [str(config.draft_beams), str(config.draft_len_per_beam)] == [chosen[1], chosen[2]]
    assert config.draft_len_per_beam <= 2 * 3
    assert len(config.base_embedding_norms) == 8
    assert drafter.dtype == torch.float32
    learnt = {token for token in range(VOCAB) if token in drafter.draft_ids}
    assert {6 + BYTES.index(letter) for letter in "tobe"} < learnt
    assert 6 + BYTES.index("q") not in learnt
    engine = ReDrafter.from_pretrained(tmp_path / "base", out)
    ids = torch.tensor([[1, 30, 40]])
    expected = engine.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert all(
        word in said for word in ("frozen", "12 windows", "walked", "right 0.5 0.4 ...: the drafter's best guess")
    )
    assert re.search(r"walked \d\.\d+ tokens per step greedily and \d\.\d+ at T=1 over 1 held-out prompts", said)
    card = (out / "README.md").read_text()
    assert ModelCard(card).data.to_dict() == {
        "library_name": "redrafter",
        "pipeline_tag": "text-generation",
        "base_model": "base",
        "license": "apache-2.0",
        "tags": ["redrafter", "speculative-decoding"],
    }
    assert f"to share it on the Hub: hf upload base-redrafter {out}\n" in said
    header, _, greedy, sampled = card.split("## Acceptance")[1].split("drafts were accepted")[1].splitlines()[2:6]
    assert header == "| texts | tokens per step |" + "".join(f" >= {n} |" for n in range(1, int(chosen[2]) + 1))
    assert greedy.startswith(f"| greedy | {chosen[3]} |")
    assert sampled.startswith("| temperature 1 |")
    assert str(tmp_path) not in card
    tree = f"1 held-out prompts ({chosen[1]} beams x {chosen[2]} tokens,"
    for words in ("data.jsonl", "--draft-vocab-size 40", f"{chosen[3]} tokens per step, greedy", tree):
        assert words in card

    more = ["--steps", "2", "--drafter", str(out), "--save-dtype", "bfloat16", "--validate-prompts", "0"]
    again = command(tmp_path, *more)
    assert "--overwrite" in refused(capsys, again)
    assert main([*again, "--overwrite"]) == 0
    assert RecurrentDrafter.from_pretrained(out).dtype == torch.bfloat16
    assert "not measured" in (out / "README.md").read_text()
    mute = base_dir(tmp_path / "mute", eos_token_id=list(range(VOCAB)))
    assert main(command(tmp_path, "--steps", "1", "--overwrite", "--model", mute)) == 0
    assert "not measured" in (out / "README.md").read_text()
    assert "walked 0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size 0", "--batch-size must be positive, got 0"),
        ("--lr inf", "--lr must be positive, got inf"),
        ("--distill 1.5", "--distill must be from 0 to 1, got 1.5"),
        ("--warmup nan", "--warmup must be from 0 to 1, got nan"),
        ("--head-rank -1", "--head-rank must not be negative, got -1"),
        ("--length 99999999999", f"--length must be at most {1 << 24}, got 99999999999"),
        (f"--seed {1 << 64}", f"--seed must be less than {1 << 62}"),
        ("--drafter d --head-rank 8", "--head-rank is the drafter's own"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(capsys, words, said):
    assert said in fails(capsys, "train", *["--model", "m", "--data", "x", "--output", "o"], *words.split())


def test_what_a_user_can_mend_exits_with_2_and_one_line(tmp_path, capsys):
    def fails(said: str, *more: str, rows: list[object] | None = None) -> None:
        assert said in refused(capsys, command(tmp_path, *more, rows=rows))
        assert not (tmp_path / "out").exists()

    fails("data.jsonl:2: not JSON", rows=[{"text": "fine enough"}, "{"])
    held_out = [{"text": "fine enough", "split": "val"}]
    fails("no row to train on", rows=held_out)
    fails("no row to train on", "--show-sample", rows=held_out)
    cut = {"input_ids": [*range(6, 40)], "loss_mask": [0] * 31 + [1] * 2 + [0]}
    fails("none of the 2 tokens to learn is in a window", rows=[cut])
    fails("cut at --length 32: give --length 34", "--dry-run", rows=[cut])
    fails("no prompt of 1 to 32 tokens to validate on", "--validate-every", "1", rows=[{"text": "fine enough"}])
    fails("--draft-vocab-size 9999 is more", "--draft-vocab-size", "9999")
    fails("it does not exist", "--model", str(tmp_path / "gone"))
    RecurrentDrafter(DrafterConfig(vocab_size=VOCAB, hidden_size=8)).save_pretrained(tmp_path / "other")
    fails("hidden size of 8", "--drafter", str(tmp_path / "other"))
    wild = ["--lr", "1e30", "--steps", "4", "--warmup", "0"]
    fails("not finite at step 2; lower --lr", *wild)
    fails(f"context of {CONTEXT}; make --length {CONTEXT} or less", "--length", str(CONTEXT + 1))
    (tmp_path / "file").write_text("mine")
    fails("file is not a writable directory", "--output", str(tmp_path / "file" / "out"))
    fails("--output needs a directory's name", "--output", "/")
    fails("--output needs a directory's name", "--output", "n" * 250)
    rows = [{"input_ids": [1, 8, 9], "loss_mask": [0, 1, 1]}, {"input_ids": [1, 8, 9999], "loss_mask": [0, 1, 1]}]
    fails("data.jsonl:2: token id 9999, but the base knows", rows=rows)
    fails("the base knows 50 ids", "--model", base_dir(tmp_path / "small", vocab_size=50))


def test_a_drafter_of_another_form_is_trained_measured_and_trained_on(tmp_path, capsys):
    form = ["--recurrence", "gated", "--head-rank", "8", "--target-layers", "0"]
    form += ["--context-window", "6"]
    assert main(command(tmp_path, "--steps", "2", *form, "--no-pack")) == 0
    config = RecurrentDrafter.from_pretrained(tmp_path / "out").config
    assert (config.recurrence, config.head_rank, list(config.target_layers)) == ("gated", 8, [0])
    assert config.context_window == 6
    assert record(tmp_path)["config"]["context_window"] == 6
    assert "--context-window 6" in (tmp_path / "out" / "README.md").read_text()
    more = command(tmp_path, "--steps", "2", "--drafter", str(tmp_path / "out"), "--output", str(tmp_path / "more"))
    assert main(more) == 0
    for words in (form, ["--context-window", "6"], ["--num-layers", "1", "--dry-run"]):
        assert f"{words[0]} is the drafter's own" in refused(capsys, [*more, *words, "--overwrite"])
    assert main(command(tmp_path, "--target-layers", "9", "--output", str(tmp_path / "no"))) == 2


def test_the_published_form_is_one_flag_and_fits_the_other_formats(tmp_path, capsys):
    words = command(tmp_path, "--steps", "1", "--validate-prompts", "0")
    convert = ["--to", "apple", "--drafter-model-dir", str(tmp_path / "out"), "--output-dir", str(tmp_path / "apple")]
    assert main(words) == 0
    assert convert_main(convert) == 2
    assert "--recurrence apple" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--recurrence", "apple"]) == 0
    assert convert_main(convert) == 0
    again = parse(shlex.split(record(tmp_path)["command"])[2:])
    assert again.recurrence == "apple"
