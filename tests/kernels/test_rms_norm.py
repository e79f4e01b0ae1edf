"""RMS norms of models in 4 and 8 bits on a CPU."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from helpers.models import tiny_model
from redrafter.kernels.cpu import grouped_product
from redrafter.kernels.cpu.rms_norm import fast_forward
from redrafter.model import tree_forward
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.quantized_layers import quantize_linears
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain

pytestmark = pytest.mark.skipif(grouped_product.find_kernel() is None, reason="needs a C compiler")


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("width", [5, 64, 100])
def test_norms_of_either_weight_are_those_of_the_module(kind, width):
    torch.manual_seed(0)
    module = kind(width, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    fast = fast_forward(module)
    for shape in ((1, 3, width), (2, 2, 3, width)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), module(x))
        torch.testing.assert_close(fast(x.transpose(0, 1)), module(x.transpose(0, 1)))
    assert fast(torch.randn(2, width).bfloat16()).dtype == module(torch.randn(2, width).bfloat16()).dtype
    assert fast(torch.randn(2, width, requires_grad=True)).grad_fn is not None
    alone = torch.cat([fast(row[None]) for row in x[0, 0]])
    assert torch.equal(fast(x[0, 0]), alone)


def test_other_modules_stay_as_they_are():
    for module in (
        Qwen3NextRMSNormGated(16),
        torch.nn.LayerNorm(16),
        LlamaRMSNorm(16).bfloat16(),
        torch.nn.Linear(8, 8),
    ):
        assert fast_forward(module) is None


def test_a_forward_leaves_no_norm_on_the_model_that_it_has_replaced(monkeypatch):
    model, called = tiny_model("llama"), []

    def counted(module):
        fast = fast_forward(module)
        return None if fast is None else lambda x: called.append(module) or fast(x)

    monkeypatch.setattr(tree_forward, "fast_forward", counted)
    quantize_linears(model, "int4")
    target = Target(model)
    cache = target.new_cache(1)
    cache.reserve(16)
    called.clear()
    with torch.inference_mode():
        target.verify(ForwardBatch(chain(torch.arange(5, 9)[None]), torch.tensor([0]), cache))
    assert len(called) == 2 * target.config.num_hidden_layers + 1
    assert not any("forward" in vars(module) for module in model.modules())
