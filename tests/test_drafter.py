import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from conftest import HIDDEN, VOCAB, tiny_drafter
from redrafter import ArgumentError, CheckpointError, DrafterConfig, RecurrentDrafter


def inputs(rows: int = 3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, HIDDEN, generator=generator) for _ in range(3)]


def reference_head(weights, x, layers):
    for i in range(layers):
        x = x + silu(linear(x, weights[f"layers.{i}.linear.weight"], weights[f"layers.{i}.linear.bias"]))
    return linear(x, weights["lm_head.weight"])


@pytest.mark.parametrize("recurrence", ["apple", "trtllm"])
@pytest.mark.parametrize("layers", [0, 2])
def test_two_steps_are_the_published_recurrence(recurrence, layers):
    drafter = tiny_drafter(recurrence=recurrence, num_draft_layers=layers)
    torch.nn.init.normal_(drafter.rnn_u.bias)
    w = drafter.state_dict()
    first, second, hidden = inputs()
    logits_1, state_1 = drafter.step(first, None, hidden)
    logits_2, state_2 = drafter.step(second, state_1, hidden)
    into, onto, bias = w["rnn_w.weight"], w["rnn_u.weight"], w["rnn_u.bias"]
    if recurrence == "apple":
        expected_1 = silu(first @ into.T + torch.zeros(HIDDEN) @ onto.T + bias)
        expected_2 = silu(second @ into.T + expected_1 @ onto.T + bias)
    else:
        expected_1 = first @ into.T
        expected_2 = second @ into.T + expected_1 @ onto.T + bias
    for state, expected, logits in ((state_1, expected_1, logits_1), (state_2, expected_2, logits_2)):
        torch.testing.assert_close(state, expected)
        head = reference_head(w, torch.cat([hidden, expected], -1), layers)
        torch.testing.assert_close(logits, head)


def test_without_recurrence_the_state_is_the_sum_of_embeddings():
    drafter = tiny_drafter(rnn=False)
    first, second, hidden = inputs()
    _, state = drafter.step(first, None, hidden)
    _, state = drafter.step(second, state, hidden)
    torch.testing.assert_close(state, first + second)
    assert not any("rnn" in name for name in drafter.state_dict())


def test_another_exit_dim_gets_a_projection():
    drafter = tiny_drafter(exit_dim=48)
    assert drafter.input_proj.weight.shape == (48, 2 * HIDDEN)
    assert tiny_drafter().input_proj is None
    logits, _ = drafter.step(*inputs()[:1], None, inputs()[2])
    assert logits.shape == (3, VOCAB)


@pytest.mark.parametrize("changes", [{}, {"exit_dim": 40}, {"draft_vocab_size": 20}, {"rnn": False}])
def test_a_saved_drafter_comes_back_the_same(tmp_path, changes):
    drafter = tiny_drafter(**changes)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.arange(20) * 4)
    drafter.save_pretrained(tmp_path)
    again = RecurrentDrafter.from_pretrained(tmp_path)
    own = inspect.signature(DrafterConfig.__init__).parameters.keys() - {"self", "kwargs"}
    assert all(getattr(again.config, name) == getattr(drafter.config, name) for name in own)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_base_path_is_not_needed_for_the_repository_of_a_drafter():
    assert callable(RecurrentDrafter.push_to_hub)


def test_missing_and_extra_tensors_are_named(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if k != "rnn_u.bias"}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys rnn_u\.bias"):
        RecurrentDrafter.from_pretrained(tmp_path)
    save_file(weights | {"stray": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="unexpected keys stray"):
        RecurrentDrafter.from_pretrained(tmp_path)
    save_file(weights | {"emb_norm.weight": torch.zeros(HIDDEN)}, file, metadata={"format": "pt"})
    RecurrentDrafter.from_pretrained(tmp_path)  # some trainers leave it there, unused


def test_truncated_missing_and_misshapen_files_are_named(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot load a drafter"):
        RecurrentDrafter.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot load a drafter"):
        RecurrentDrafter.from_pretrained(tmp_path)
    file.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    with pytest.raises(CheckpointError):
        RecurrentDrafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        RecurrentDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"vocab_size": -1},
        {"recurrence": "gru"},
        {"num_draft_layers": -1},
        {"draft_vocab_size": VOCAB + 1},
        {"draft_beams": 0},
    ],
)
def test_a_config_that_makes_no_drafter_is_refused(changes):
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        tiny_drafter(**changes)


def test_the_same_step_serves_any_leading_shape():
    drafter = tiny_drafter()
    first, _, hidden = inputs(6)
    flat, _ = drafter.step(first, None, hidden)
    shaped, _ = drafter.step(first.view(2, 3, -1), None, hidden.view(2, 3, -1))
    torch.testing.assert_close(shaped.view(6, -1), flat)
    assert DrafterConfig(vocab_size=5, hidden_size=3).exit_dim == 6
