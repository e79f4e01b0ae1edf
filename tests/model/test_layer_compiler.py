"""A model is compiled layer by layer, and layers that compute the same are compiled once."""

import pytest
import torch
from torch._inductor import compile_fx

from helpers.generation import same_undrafted
from helpers.models import paged, tiny_model, uneven_batch
from redrafter import PromptLookup
from redrafter.attention.tree_attention import tree_attention
from redrafter.cache.paged import PagedCache
from redrafter.model.batch_invariance import small_pool
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.layer_compiler import LayerCompiler
from redrafter.model.repeated_layers import RepeatedLayers
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain

WIDTH = 8


@torch.library.custom_op("redrafter_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """Return twice the input, unseen by a compiler."""
    return 2 * x


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


def compiled_as(run, *inputs):
    """Return what a function returns compiled with a cut at `opaque`, and how many pieces there are and were compiled.

    Pieces are run as they are.
    """
    compiled, ran = [], []

    def compile_piece(piece, _):
        compiled.append(piece)
        return lambda *inputs: ran.append(piece) or piece.forward(*inputs)

    torch._dynamo.reset()
    backend = LayerCompiler(["redrafter_tests::opaque"], compile_piece)
    return torch.compile(run, fullgraph=True, backend=backend)(*inputs), len(ran), len(compiled)


def square(seed, dtype=torch.float32):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layers(weights, scales):
    def run(x):
        for weight, scale in zip(weights, scales, strict=True):
            x = x + scale * opaque((x.to(weight.dtype) @ weight).float())
        return x

    return run


@pytest.mark.parametrize(
    ("other", "scale", "compiled"),
    [
        (square(9), 1.5, 3),
        (square(9), 1.25, 4),  # between the second layer and the third, which begins as the others do
        (square(9, torch.float64), 1.5, 4),
        (square(9).T, 1.5, 4),
        (torch.cat([square(9), square(8)])[::2], 1.5, 4),
    ],
    ids=["alike", "number", "dtype", "strides", "rows apart"],
)
def test_pieces_are_compiled_apart_where_they_compute_something_else(other, scale, compiled):
    weights = [square(1), square(2), square(3), other]
    run, x = layers(weights, [1.5, scale, 1.5, 1.5]), torch.randn(3, WIDTH)
    out, pieces, count = compiled_as(run, x)
    assert torch.equal(out, run(x))
    assert (pieces, count) == (5, compiled)


def test_a_piece_may_return_several_tensors_and_one_that_it_was_given():
    def run(x):
        first, second = x.sin(), x.cos()
        return x, opaque(first) + second, opaque(second) - first

    x = torch.randn(3, WIDTH)
    out, *_ = compiled_as(run, x)
    assert all(torch.equal(a, b) for a, b in zip(out, run(x), strict=True))


@pytest.mark.variant
@pytest.mark.parametrize(
    ("architecture", "changes", "compiled"),
    [
        ("llama", {"num_hidden_layers": 5}, 3),
        ("gemma2", {"num_hidden_layers": 6}, 3),  # layers with a window differ in what attention is told alone
        ("olmo2", {"num_hidden_layers": 4}, 3),
    ],
)
def test_a_model_of_many_layers_is_compiled_in_three_pieces(architecture, changes, compiled, monkeypatch):
    # What stands for the kernels on a CPU cannot be traced, but the reference can.
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    pieces = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda piece, _, config_patches: pieces.append(piece) or piece.forward
    )
    torch._dynamo.reset()
    engine = paged(PromptLookup.from_pretrained(model := tiny_model(architecture, **changes)))
    engine.target.varlen_forward.compile()
    ids, mask = uneven_batch(rows=3)
    same_undrafted(engine, ids, mask, max_new_tokens=12, do_sample=True, seed=3)
    out = engine.generate(ids, mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = PromptLookup.from_pretrained(model).generate(
        ids, mask, max_new_tokens=12, do_sample=False, eos_token_id=None, speculate=False
    )
    assert torch.equal(out, expected)
    assert len(pieces) == compiled


@torch.no_grad()
def agrees(model, monkeypatch, change=lambda: None):
    """Compare the logits of a compiled forward with those of the model, before and after a change of the weights.

    Returns whether all are equal, and how many layers each graph has that was traced.
    """
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    monkeypatch.setattr(compile_fx, "compile_fx", lambda piece, _, config_patches: piece.forward)
    traced, compile_graph = [], LayerCompiler.__call__

    def counting(self, graph, inputs):
        traced.append(sum("tree_attention" in str(node.target) for node in graph.graph.nodes))
        return compile_graph(self, graph, inputs)

    monkeypatch.setattr(LayerCompiler, "__call__", counting)
    torch._dynamo.reset()
    target = Target(model)
    target.varlen_forward.compile()
    ids, blocks = torch.arange(7)[None] % target.vocab_size, torch.ones(1, 1, dtype=torch.int32)
    cache, equal = PagedCache(small_pool(target.paged_shapes), blocks, torch.zeros(1).long()), True
    for _ in range(2):
        logits = target.verify(ForwardBatch(chain(ids), torch.zeros(1).long(), cache)).logits
        equal &= torch.allclose(logits, model(ids).logits, atol=1e-5)
        change()
    return equal, traced


def test_three_layers_are_traced_for_all_that_are_alike(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=5)
    assert agrees(model, monkeypatch, lambda: model.model.layers[4].mlp.down_proj.weight.mul_(-3)) == (True, [3])


@pytest.mark.variant
def test_all_layers_are_traced_where_a_copy_of_a_layer_computes_something_else(monkeypatch):
    weight = RepeatedLayers.weight
    monkeypatch.setattr(RepeatedLayers, "weight", lambda self, layer, text: weight(self, min(layer, 2), text))
    assert agrees(tiny_model("llama", num_hidden_layers=5), monkeypatch) == (True, [3, 5])


@pytest.mark.variant
def test_all_layers_are_traced_where_the_third_is_not_as_the_second(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=5)
    forward = type(model.model.layers[0]).forward

    def numbered(self, hidden, **kwargs):
        return forward(self, hidden * (1 + 0.01 * self.self_attn.layer_idx), **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", numbered)
    assert agrees(model, monkeypatch) == (True, [3, 5])


def test_layers_that_differ_in_more_than_weights_and_numbers_are_not_repeated():
    model = tiny_model("llama", num_hidden_layers=5)
    assert RepeatedLayers.find(model, model.config) is not None
    model.config.sizes_of_layers = [1, 1, 1, 2, 1]
    assert RepeatedLayers.find(model, model.config) is None
    del model.config.sizes_of_layers
    model.model.layers[4].input_layernorm.variance_epsilon = 0.5
    assert RepeatedLayers.find(model, model.config) is None
    few = tiny_model("llama", num_hidden_layers=3)
    assert RepeatedLayers.find(few, few.config) is None
