"""Decoder layers that a kernel in C computes whole on a CPU."""

import copy

import pytest
import torch

from helpers.models import tiny_model, with_spread_weights
from redrafter.kernels.cpu import decoder_layer
from redrafter.kernels.cpu.decoder_layer import find_kernel
from redrafter.model.decoder_layers import FastLayers
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.quantized_layers import quantize_linears
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain

pytestmark = pytest.mark.skipif(find_kernel() is None, reason="needs a C compiler")

SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
KINDS = "llama", "mistral", "qwen2", "qwen3", "smollm3"


def grouped_model(kind: str, scheme: str = "int4", **changes: object):
    model = with_spread_weights(tiny_model(kind, **SHAPE | changes))
    quantize_linears(model, scheme)
    return model


def logits_of(target: Target, rows: int = 2, nodes: int = 3, length: int = 9, output: str = "logits") -> torch.Tensor:
    """Return the logits of two forwards over drafts, the second of which reads what the first stored."""
    generator = torch.Generator().manual_seed(3)
    cache, found = target.new_cache(rows), []
    cache.reserve(2 * length + nodes)
    lengths = torch.zeros(rows, dtype=torch.long)
    for count in (length, nodes):
        tokens = torch.randint(3, 90, (rows, count), generator=generator)
        with torch.inference_mode():
            found.append(getattr(target.verify(ForwardBatch(chain(tokens), lengths, cache)), output))
        lengths = lengths + torch.arange(length - rows + 1, length + 1)  # each row has its own
    return torch.cat(found, dim=1)


def slow_logits_of(target: Target, monkeypatch: pytest.MonkeyPatch, **how: object) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(FastLayers, "add_to", lambda *_, **__: None)
        return logits_of(target, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_computes_what_the_layers_of_a_model_do(kind, monkeypatch):
    model = grouped_model(kind, "int8" if kind == "mistral" else "int4")
    assert len(FastLayers(model).modules) == model.config.num_hidden_layers
    target = Target(model)
    expected = slow_logits_of(target, monkeypatch)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda *_, **__: pytest.fail("not by the kernel"))
    torch.testing.assert_close(logits_of(target), expected, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_that_compute_something_else_are_left_to_the_model():
    for kind, changes in (("gemma", SHAPE), ("granite", SHAPE | {"residual_multiplier": 0.5}), ("gpt_neox", {})):
        model = with_spread_weights(tiny_model(kind, **changes))
        quantize_linears(model, "int8")
        assert FastLayers(model).modules == []
    assert FastLayers(tiny_model("llama", **SHAPE)).modules == []  # not quantised


def test_a_token_has_the_same_bits_alone_and_on_more_threads():
    target = Target(grouped_model("llama"))
    together = logits_of(target)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(logits_of(target), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(logits_of(target, rows=1, nodes=1)[:, -1], logits_of(target, rows=1)[:, -3])


@pytest.mark.parametrize("layers", [(0, 1), (0, 3), (1, 2)])
def test_hidden_states_between_layers_are_recorded_from_one_call(layers, monkeypatch):
    kernel, calls = find_kernel(), []
    monkeypatch.setattr(decoder_layer, "find_kernel", lambda: lambda at: calls.append(at) or kernel(at))
    target = Target(grouped_model("llama", num_hidden_layers=4))
    target.read_aux_hidden(layers)
    expected = slow_logits_of(target, monkeypatch, output="hidden")
    for _ in range(2):  # the layers are found in the first
        calls.clear()
        torch.testing.assert_close(logits_of(target, output="hidden"), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2, "one for each forward"
    hook = target.model.model.layers[2].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(logits_of(target, output="hidden"), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2 + 2 * 4, "the owner's hook takes the module's inputs"
    hook.remove()


def test_new_weights_and_hooks_of_the_owner_are_followed(monkeypatch):
    target, other = Target(grouped_model("llama")), grouped_model("llama")
    before = logits_of(target)
    layer, calls = target.model.model.layers[1], []
    hook = layer.mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    target.follow_changes()
    torch.testing.assert_close(logits_of(target), before, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2
    hook.remove()
    hook = layer.register_forward_hook(lambda *_: calls.append(1))  # between two layers
    target.follow_changes()
    torch.testing.assert_close(logits_of(target), before, rtol=1e-4, atol=1e-4)
    assert len(calls) == 4
    hook.remove()
    new = copy.deepcopy(other.model.layers[0].mlp.down_proj)
    layer.mlp.down_proj = new
    target.follow_changes()
    expected = slow_logits_of(target, monkeypatch)
    assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logits_of(target), expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == 4
