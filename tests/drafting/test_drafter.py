"""The recurrent drafter: every form against its equations, and what its config refuses."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModel

from helpers.drafters import FORMS, random_drafter
from helpers.eagle import random_head
from helpers.models import HIDDEN, VOCAB, tiny_drafter
from redrafter import ArgumentError, CheckpointError, DrafterConfig, RecurrentDrafter


def inputs(rows: int = 3, dtype: torch.dtype = torch.float64):
    """Two embeddings and a hidden state; by default in float64, in which every order of summation gives the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, HIDDEN, generator=generator, dtype=dtype) for _ in range(3)]


def reference_head(weights, x, layers):
    for i in range(layers):
        x = x + silu(linear(x, weights[f"layers.{i}.linear.weight"], weights[f"layers.{i}.linear.bias"]))
    return linear(x, weights["lm_head.weight"])


@pytest.mark.parametrize("recurrence", ["apple", "trtllm"])
@pytest.mark.parametrize("layers", [0, 2])
def test_two_steps_are_the_published_recurrence(recurrence, layers):
    drafter = tiny_drafter(recurrence=recurrence, num_draft_layers=layers).double()
    torch.nn.init.normal_(drafter.rnn_u.bias)
    w = drafter.state_dict()
    first, second, hidden = inputs()
    logits_1, state_1 = drafter.step(first, None, drafter.begin(hidden))
    logits_2, state_2 = drafter.step(second, state_1, drafter.begin(hidden))
    into, onto, bias = w["rnn_w.weight"], w["rnn_u.weight"], w["rnn_u.bias"]
    if recurrence == "apple":
        expected_1 = silu(first @ into.T + torch.zeros_like(first) @ onto.T + bias)
        expected_2 = silu(second @ into.T + expected_1 @ onto.T + bias)
    else:
        expected_1 = first @ into.T
        expected_2 = second @ into.T + expected_1 @ onto.T + bias
    for state, expected, logits in ((state_1, expected_1, logits_1), (state_2, expected_2, logits_2)):
        torch.testing.assert_close(state, expected)
        head = reference_head(w, torch.cat([hidden, expected], -1), layers)
        torch.testing.assert_close(logits, head)


def test_two_steps_of_the_gated_recurrence_mix_the_state_with_what_is_read():
    drafter = random_drafter(recurrence="gated").double()
    w = drafter.state_dict()
    first, second, hidden = inputs()

    def mixed(embedding, state):
        read = linear(torch.cat([embedding, state, hidden], -1), w["rnn_gate.weight"], w["rnn_gate.bias"])
        gate = read[:, :HIDDEN].sigmoid()
        return (1 - gate) * state + gate * silu(read[:, HIDDEN:])

    logits_1, state_1 = drafter.step(first, None, drafter.begin(hidden))
    logits_2, state_2 = drafter.step(second, state_1, drafter.begin(hidden))
    expected_1 = mixed(first, torch.zeros_like(first))
    expected_2 = mixed(second, expected_1)
    for state, expected, logits in ((state_1, expected_1, logits_1), (state_2, expected_2, logits_2)):
        torch.testing.assert_close(state, expected)
        torch.testing.assert_close(logits, reference_head(w, torch.cat([hidden, expected], -1), 2))
    assert not any(name.startswith(("rnn_u", "rnn_w")) for name in w)


def test_earlier_layers_are_added_to_the_last_hidden_state():
    drafter = random_drafter(target_layers=(0, 2)).double()
    assert drafter.feature_size == 3 * HIDDEN
    assert tiny_drafter().feature_size == HIDDEN
    last, first, second = inputs()
    outputs = (first * 300, second)
    features = torch.cat([last, *outputs], dim=-1)  # [3, F]
    w = drafter.state_dict()
    read = torch.cat([last, *(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in outputs)], dim=-1)
    expected = last + read @ w["fuse.weight"].T + w["fuse.bias"]
    torch.testing.assert_close(drafter.fuse_hidden(features), expected)
    assert drafter.bfloat16().fuse_hidden(features.bfloat16()).dtype == torch.bfloat16
    assert tiny_drafter().fuse_hidden(features) is features
    assert tiny_drafter().fuse is None


def test_a_head_of_low_rank_is_a_product_of_two():
    drafter, whole = random_drafter(head_rank=8).double(), random_drafter().double()
    w = drafter.state_dict()
    assert w["head_proj.weight"].shape == (8, 2 * HIDDEN)
    assert w["lm_head.weight"].shape == (VOCAB, 8)
    shared = {name: weight for name, weight in w.items() if not name.startswith(("lm_head", "head_proj"))}
    whole.load_state_dict(shared | {"lm_head.weight": w["lm_head.weight"] @ w["head_proj.weight"]})
    first, _, hidden = inputs()
    torch.testing.assert_close(
        drafter.step(first, None, drafter.begin(hidden))[0], whole.step(first, None, whole.begin(hidden))[0]
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_what_advance_makes_and_then_the_head(form):
    drafter = random_drafter(**FORMS[form]).double()
    first, second, hidden = inputs()
    _, state = drafter.step(first, None, drafter.begin(hidden))
    logits, after = drafter.step(second, state, drafter.begin(hidden))
    x, same = drafter.advance(second, state, drafter.begin(hidden))
    torch.testing.assert_close((same, x @ drafter.lm_head.weight.T), (after, logits))
    assert logits.shape == (3, drafter.config.draft_vocab_size or VOCAB)


@pytest.mark.parametrize("form", ["published", "gated", "sum"])
def test_joined_weights_compute_the_same_until_training(form):
    drafter = random_drafter(**FORMS[form]).double()
    first, second, hidden = inputs()
    expected = [
        state := drafter.step(first, None, drafter.begin(hidden))[1],
        drafter.step(second, state, drafter.begin(hidden))[1],
    ]
    drafter.join_recurrence()
    joined = [
        state := drafter.step(first, None, drafter.begin(hidden))[1],
        drafter.step(second, state, drafter.begin(hidden))[1],
    ]
    torch.testing.assert_close(joined, expected)
    assert (drafter.rnn_joined is not None) == (form == "published")
    assert drafter.train().rnn_joined is None


def test_without_recurrence_the_state_is_the_sum_of_embeddings():
    drafter = tiny_drafter(rnn=False).double()
    first, second, hidden = inputs()
    _, state = drafter.step(first, None, drafter.begin(hidden))
    _, state = drafter.step(second, state, drafter.begin(hidden))
    torch.testing.assert_close(state, first + second)
    assert not any("rnn" in name for name in drafter.state_dict())


def test_another_exit_dim_gets_a_projection():
    drafter = tiny_drafter(exit_dim=48)
    assert drafter.input_proj.weight.shape == (48, 2 * HIDDEN)
    assert tiny_drafter().input_proj is None
    first, _, hidden = inputs(dtype=drafter.dtype)
    logits, _ = drafter.step(first, None, drafter.begin(hidden))
    assert logits.shape == (3, VOCAB)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_drafter_comes_back_the_same(tmp_path, form):
    drafter = random_drafter(**FORMS[form])
    drafter.save_pretrained(tmp_path)
    again = RecurrentDrafter.from_pretrained(tmp_path)
    own = inspect.signature(DrafterConfig.__init__).parameters.keys() - {"self", "kwargs"}
    assert all(getattr(again.config, name) == getattr(drafter.config, name) for name in own)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_drafter_of_before_there_were_other_forms_is_the_published_one(tmp_path):
    drafter = random_drafter()
    drafter.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    newer = {"target_layers", "rms_norm_eps", "head_rank"} | {name for name in written if name.startswith("context_")}
    assert len(newer & written.keys()) == 7
    older = {name: value for name, value in written.items() if name not in newer}
    (tmp_path / "config.json").write_text(json.dumps(older))
    again = RecurrentDrafter.from_pretrained(tmp_path)
    first, _, hidden = inputs(dtype=drafter.dtype)
    assert torch.equal(
        again.step(first, None, again.begin(again.fuse_hidden(hidden)))[0],
        drafter.step(first, None, drafter.begin(hidden))[0],
    )
    config = again.config
    assert (config.recurrence, config.target_layers, config.head_rank) == ("apple", [], None)
    assert config.context_window is None


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


def test_tensors_of_another_shape_are_named(tmp_path):
    drafter = tiny_drafter(context_window=8, context_head_dim=8)
    drafter.save_pretrained(tmp_path)
    drafter.config.context_head_dim = 4
    drafter.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"context\.scale of shape \(8,\) instead of \(4,\)"):
        RecurrentDrafter.from_pretrained(tmp_path)


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
        {"head_rank": 0},
        {"head_rank": 2.5},
        {"target_layers": (2, 0)},
        {"target_layers": (1, 1)},
        {"target_layers": (-1, 0)},
        {"target_layers": ("0",)},
        {"rms_norm_eps": 0.0},
        {"rms_norm_eps": "1e-6"},
    ],
)
def test_a_config_that_makes_no_drafter_is_refused(changes):
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        tiny_drafter(**changes)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_step_serves_any_leading_shape(form):
    drafter = random_drafter(**FORMS[form]).double()
    first, _, hidden = inputs(6)
    hidden = hidden[[0, 0, 0, 3, 3, 3]]  # which the beams of a row share
    flat, before = drafter.step(first, None, drafter.begin(hidden))
    shaped, state = drafter.step(first.view(2, 3, -1), None, drafter.begin(hidden.view(2, 3, -1)[:, :1]))
    torch.testing.assert_close(shaped.view(6, -1), flat)
    flat, _ = drafter.step(first, before, drafter.begin(hidden))
    shaped, _ = drafter.step(first.view(2, 3, -1), state, drafter.begin(hidden.view(2, 3, -1)[:, :1]))
    torch.testing.assert_close(shaped.view(6, -1), flat)
    assert DrafterConfig(vocab_size=5, hidden_size=3).exit_dim == 6


@pytest.mark.parametrize("make", [tiny_drafter, random_head])
def test_auto_classes_of_transformers_know_a_drafter(make, tmp_path):
    drafter = make()
    drafter.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(drafter.config)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(drafter)
    assert all(torch.equal(weight, drafter.get_parameter(name)) for name, weight in loaded.named_parameters())


def test_importing_the_package_alone_lets_a_drafters_config_be_known(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    code = (
        "import sys, redrafter; assert not {'torch', 'transformers'} & {*sys.modules}; del sys.modules['redrafter']; "
        "from transformers import AutoConfig; import redrafter; "
        f"print(AutoConfig.from_pretrained({str(tmp_path)!r}).model_type)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "redrafter\n", done.stderr
