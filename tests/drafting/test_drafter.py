"""The recurrent drafter: every form against its equations, and what its config refuses."""

import json
import subprocess
import sys
from dataclasses import fields
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModel, PretrainedConfig

from helpers.drafters import FORMS, random_drafter
from helpers.eagle import random_head
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model
from redrafter import ArgumentError, CheckpointError, DrafterConfig, RecurrentDrafter
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting import drafter as drafter_module
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.proposer import State
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler


def inputs(rows: int = 3, dtype: torch.dtype = torch.float64):
    """Two embeddings and a hidden state; by default in float64, in which every order of summation gives the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, HIDDEN, generator=generator, dtype=dtype) for _ in range(3)]


def reference_head(weights, x, layers):
    for i in range(layers):
        x = x + silu(linear(x, weights[f"layers.{i}.linear.weight"], weights[f"layers.{i}.linear.bias"]))
    return linear(x, weights["lm_head.weight"])


def two_steps(drafter: RecurrentDrafter) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits and the state of each of two steps."""
    first, second, hidden = inputs(dtype=drafter.dtype)
    one = drafter.step(first, None, drafter.begin(hidden))
    return [one, drafter.step(second, one[1], drafter.begin(hidden))]


def expected_state(drafter: RecurrentDrafter, embedding: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """Return the state after a step, by the equations of each recurrence."""
    w, hidden = drafter.state_dict(), inputs()[2]
    before = torch.zeros_like(embedding) if state is None else state
    if drafter.config.recurrence == "gated":
        read = linear(torch.cat([embedding, before, hidden], -1), w["rnn_gate.weight"], w["rnn_gate.bias"])
        gate = read[:, :HIDDEN].sigmoid()
        return (1 - gate) * before + gate * silu(read[:, HIDDEN:])
    into, onto, bias = w["rnn_w.weight"], w["rnn_u.weight"], w["rnn_u.bias"]
    if drafter.config.recurrence == "apple":
        return silu(embedding @ into.T + before @ onto.T + bias)
    return embedding @ into.T if state is None else embedding @ into.T + before @ onto.T + bias


@pytest.mark.parametrize("recurrence", ["apple", "trtllm", "gated"])
@pytest.mark.parametrize("layers", [0, 2])
def test_two_steps_are_the_equations_of_the_recurrence(recurrence, layers):
    drafter = random_drafter(recurrence=recurrence, num_draft_layers=layers).double()
    (first, second, hidden), state = inputs(), None
    for embedding, (logits, found) in zip((first, second), two_steps(drafter), strict=True):
        state = expected_state(drafter, embedding, state)
        torch.testing.assert_close(found, state)
        head = reference_head(drafter.state_dict(), torch.cat([hidden, state], -1), layers)
        torch.testing.assert_close(logits, head)
    own = [name.startswith(("rnn_u", "rnn_w")) for name in drafter.state_dict()]
    assert any(own) == (recurrence != "gated")


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
    (_, state), (logits, after) = two_steps(drafter)
    _, second, hidden = inputs()
    x, same = drafter.advance(second, state, drafter.begin(hidden))
    torch.testing.assert_close((same, x @ drafter.lm_head.weight.T), (after, logits))
    assert logits.shape == (3, drafter.config.draft_vocab_size or VOCAB)


@pytest.mark.parametrize("form", ["published", "gated", "all"])
def test_a_draft_with_a_table_of_products_is_that_without_until_training(form):
    drafter, target = random_drafter(**FORMS[form]).eval(), Target(tiny_model("llama"))
    proposer = drafter.proposer(target, 3, 3, 10, None, False)
    tokens, length, rows = torch.randint(3, VOCAB, (2, 8)), torch.full((2,), 7), torch.arange(2)
    state = State(tokens, length, torch.randn(2, drafter.feature_size), torch.ones(2, dtype=torch.bool))
    sampler = Sampler(None, (), torch.ones(2), length, length, torch.arange(VOCAB))
    context = drafter.read_texts(tokens, torch.randn(2, 8, drafter.feature_size), target.embedding(tokens))
    context = context and context(rows, length)
    trees, read = [], drafter.draft_bytes(4)
    for _ in range(2):
        trees.append(proposer.grow(state, sampler, proposer.scores(state, sampler, None, context)))
        drafter.tabulate(target.embedding)
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    gated = drafter.config.recurrence == "gated"
    assert drafter.embedded.shape == (VOCAB, (1 + gated) * HIDDEN)
    assert read - drafter.draft_bytes(4) == pytest.approx(4 * 4 * (1 + gated) * HIDDEN**2, rel=0.02)  # but for biases
    drafter.embedded *= 2
    other = proposer.grow(state, sampler, proposer.scores(state, sampler, None, context))
    assert not torch.equal(other.tokens, trees[0].tokens)  # the table is what is read
    assert "embedded" not in drafter.state_dict()
    assert drafter.train().embedded is None


def test_without_recurrence_the_state_is_the_sum_of_embeddings():
    drafter = tiny_drafter(rnn=False).double()
    first, second, _ = inputs()
    torch.testing.assert_close(two_steps(drafter)[1][1], first + second)
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
    own = {item.name for item in fields(DrafterConfig)} - {item.name for item in fields(PretrainedConfig)}
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
    assert torch.equal(two_steps(again)[0][0], two_steps(drafter)[0][0])
    config = again.config
    assert (config.recurrence, config.target_layers, config.head_rank) == ("apple", [], None)
    assert config.context_window is None


WEIGHTS = "model.safetensors"


def change_weights(change):
    def changed(folder):
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return changed


def change_config(**changes):
    def changed(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return changed


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (change_weights(lambda w: {k: x for k, x in w.items() if k != "rnn_u.bias"}), r"missing keys rnn_u\.bias"),
        (change_weights(lambda w: w | {"stray": torch.zeros(1)}), "unexpected keys stray"),
        (change_config(context_head_dim=4), r"context\.scale of shape \(8,\) instead of \(4,\)"),
        (change_config(hidden_size=16), r"missing keys input_proj\.bias"),
        (
            lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000]),
            "it is cut short or not a safetensors file",
        ),
        (lambda folder: (folder / WEIGHTS).unlink(), r"has no model\.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    ],
    ids=range(7),
)
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path, break_it, named):
    tiny_drafter(context_window=8, context_head_dim=8).save_pretrained(tmp_path)
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        RecurrentDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["emb_norm.weight", "shortlist.head.weight"])
def test_tensors_of_some_trainers_and_of_earlier_versions_are_left_unused(tmp_path, name):
    tiny_drafter().save_pretrained(tmp_path)
    change_weights(lambda w: w | {name: torch.zeros(HIDDEN)})(tmp_path)
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


@pytest.mark.variant
def test_importing_the_package_alone_lets_a_drafters_config_be_known(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    code = (
        "import sys, redrafter; assert not {'torch', 'transformers'} & {*sys.modules}; del sys.modules['redrafter']; "
        "from transformers import AutoConfig; import redrafter; "
        f"print(AutoConfig.from_pretrained({str(tmp_path)!r}).model_type)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "redrafter\n", done.stderr


OTHER_FORMS = {"rnn": False}, {"context_window": 8, "context_kv_heads": 2, "context_head_dim": 8}


@pytest.mark.parametrize(
    "changes", [{"recurrence": "gated"}, *(pytest.param(form, marks=pytest.mark.variant) for form in OTHER_FORMS)]
)
def test_a_drafter_is_compiled_a_few_times_for_all_rows_beams_and_steps(changes, monkeypatch):
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda run: compile(run, fullgraph=True, backend=counter))
    monkeypatch.setattr(drafter_module, "compile_once", cache(lambda function: torch.compile(function)))
    torch._dynamo.reset()
    target, drafter = Target(tiny_model("llama")), tiny_drafter(**changes)
    if layer := drafter.stored_layer(target, compiled=False):
        pool = KVCachePool([layer.shape], 1024)
        for stored in pool.pools:
            stored.normal_()

    def drafts(rows, beams, depth, compiled):
        torch.manual_seed(rows)
        hidden = torch.randn(rows, target.feature_size)
        tokens, zeros = torch.full((rows, 12), 7), torch.zeros(rows, dtype=torch.long)
        state = State(tokens, torch.full((rows,), 9), hidden, torch.ones(rows, dtype=torch.bool))
        sampler = Sampler(None, (), torch.ones(rows), zeros, zeros, torch.arange(target.vocab_size))
        proposer = drafter.proposer(target, beams, depth, beams * depth + 1, None, compiled)
        context = None
        if size := drafter.config.context_window:
            table = torch.arange(16 * rows, dtype=torch.int32).view(rows, 16)[:, : 2 * depth]
            cache = PagedCache(pool, table)
            context = proposer.read_context(state, cache)
            expected = ContextWindow.read_last(state.length, size, cache.read_drafter_layer)
            assert all(map(torch.equal, context, expected))
        return proposer.grow(state, sampler, proposer.scores(state, sampler, None, context)).tokens

    with torch.inference_mode():
        for rows, beams, depth in ((1, 5, 5), (8, 3, 5), (4, 5, 4), (32, 1, 5), (64, 1, 3), (2, 2, 2), (1, 2, 4)):
            assert torch.equal(drafts(rows, beams, depth, True), drafts(rows, beams, depth, False))
    # The first step of one row and of many, and later ones of one row, of chains and of several beams; and what comes
    # before the first step, of one row and of many.
    assert counter.frame_count == (9 if drafter.config.context_window else 7)
