"""Batch-invariant targets: which models can be, the patches of their forwards, and the check that they are.

A forward computes each row independently, but not bit for bit: a matrix product sums in an order that depends on the
number of rows, and on a CPU a pointwise function uses other instructions at the end of a tensor than before it. In a
forward with `RowByRow`, both depend on the row only.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.errors import UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.grouped_linear import in_one_order
from redrafter.kernels.invariant_linear import in_full_vectors, invariant_expert_linear, invariant_linear
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.patch import ModelPatch
from redrafter.model.supported import Support
from redrafter.model.tree_forward import BoundModel
from redrafter.model.varlen_forward import VarlenForward
from redrafter.tree.token_tree import chain

TOKENS = 26  # length of the sequence that is read in several ways
WAYS = ([26], [1] * 26, [7, 7, 7, 5], [19, 7])  # token counts of the forwards of each way

EXPERTS_NAME = "redrafter_invariant"

# Names of torch's own operators that multiply matrices. Ours have another namespace.
PRODUCT = re.compile(
    r"aten::(_?(add|bad)?d?b?mm|_?addmm\w*|addmv|mv|dot|vdot|addr|linear|matmul|einsum|bilinear|_\w+_mm\w*|\w*convolution\w*|"
    r"conv\w+|\w*scaled_dot_product\w*|\w*(gru|lstm|rnn)\w*)$"
)


def support_of(bound: BoundModel) -> Support:
    """Return whether the weights of a model allow it to be batch-invariant."""
    for name, module in bound.model.named_modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            return Support(f"the weight of {name} is a {type(module.weight).__name__}; load it unquantised")
    return Support()


def check_products(forward: VarlenForward, shapes: Sequence[LayerShape]) -> None:
    """Raise `UnsupportedError` if a forward multiplies matrices with other operators than ours, naming the module.

    Products over one number are left out, as such a sum has no order. So are operators outside of the model, as in a
    drafter's layer, which changes no output.
    """
    calls: list[str] = []  # names of the modules that are running
    found: list[tuple[str, str]] = []
    with torch.inference_mode(), ModelPatch() as patch:
        for name, module in forward.bound.model.named_modules():
            patch.hook(module, lambda *_, name=name: calls.append(name), before=True)
            patch.hook(module, lambda *_: calls.__delitem__(-1))
        patch.enter(_Recorder(calls, found))
        _read(forward, [7], small_pool(shapes))
    if found:
        module, operator = found[0]
        raise UnsupportedError(
            f"{forward.bound.name} cannot be batch-invariant: {module or 'its forward'} calls {operator}, which sums "
            "in an order that suits the number of tokens"
        )


@torch.inference_mode()
def check_rows(forward: VarlenForward, pool: KVCachePool) -> None:
    """Raise `UnsupportedError` if a sequence's logits depend on how many of its tokens share a forward.

    Keys and values are written to unused blocks of the pool.
    """
    expected = _read(forward, WAYS[0], pool)
    if not all(torch.equal(_read(forward, way, pool), expected) for way in WAYS[1:]):
        raise UnsupportedError(
            f"{forward.bound.name} cannot be batch-invariant: its logits depend on how many tokens share a forward"
        )


def small_pool(shapes: Sequence[LayerShape]) -> KVCachePool:
    """Return memory for the sequence that the checks read, for a model with these layers."""
    return KVCachePool(shapes, 2 + -(-TOKENS // BLOCK_SIZE))


def _read(forward: VarlenForward, sizes: Sequence[int], pool: KVCachePool) -> Tensor:
    """Return the logits of a text, `[T, V]`, that is read in forwards of these numbers of tokens."""
    bound = forward.bound
    blocks = min(pool.num_blocks - 1, 1 + -(-TOKENS // BLOCK_SIZE))
    bounds = [x for x in (bound.context, bound.fixed_rope_context, blocks * BLOCK_SIZE) if x is not None]
    count = min([sum(sizes), *bounds])
    ids = (torch.arange(count, device=bound.device) * 7919 + 11) % bound.vocab_size
    cache = PagedCache(pool, torch.arange(1, 1 + blocks, dtype=torch.int32, device=bound.device)[None])
    logits, first = [], 0
    for size in sizes:
        piece = ids[None, first : first + size]
        if piece.numel():
            length = torch.full((1,), first, device=bound.device)
            logits.append(forward(ForwardBatch(chain(piece), length, cache))[0][0])
        first += size
    return torch.cat(logits)


class RowByRow:
    """Patches a forward so that a model computes each row as it would alone, except attention.

    Linear layers, and all calls of `torch.nn.functional.linear`, use `invariant_linear`, and experts use
    `experts_row_by_row`. Layers with groups of 4 or 8 bits have an operator of their own, which does so `in_one_order`.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        """Find the configs from which the model's experts read their implementation. device: device of the model."""
        traits = "has_gate", "has_bias", "is_transposed"  # attributes that transformers sets on modules of experts
        experts: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in traits)]
        self._configs = list({id(module.config): module.config for module in experts}.values())
        self._on_cpu = device.type == "cpu"

    def add_to(self, patch: ModelPatch) -> None:
        """Have one forward compute row by row."""
        for config in self._configs:
            patch.set(config, "_experts_implementation", EXPERTS_NAME)
        patch.enter(_InvariantLinears())
        patch.enter(in_one_order())
        # On a GPU two sizes that are equal by chance when the forward is compiled stay distinct, and all share one
        # variant.
        patch.enter(_FullVectors() if self._on_cpu else fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]


class _InvariantLinears(TorchFunctionMode):
    """Replaces the product of every linear layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        return (_linear if func is linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return invariant_linear(input, weight, bias)  # whose parameters have other names


def experts_row_by_row(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts `[T, K]` of each token, `[T, D]`, as an experts function of transformers.

    Each product of a token and an expert is computed for that row alone, and the results of a token's experts are added
    in float32, in the order of its choice.
    """
    tokens, chosen = experts.shape
    expert = experts.reshape(-1)
    x = hidden[:, None].expand(-1, chosen, -1).reshape(tokens * chosen, -1)
    x = _product(module, "gate_up_proj" if module.has_gate else "up_proj", x, expert)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _product(module, "down_proj", x, expert)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    weighted = (x * weights.reshape(-1, 1)).view(tokens, chosen, -1).float()
    # A loop, as the order of a library's sum depends on the number of rows.
    total = weighted[:, 0]
    for index in range(1, chosen):
        total = total + weighted[:, index]
    return total.to(hidden.dtype)


def _product(module: nn.Module, name: str, x: Tensor, expert: Tensor) -> Tensor:
    """Return the product of each row with its expert's weight of that name, and that expert's bias if it has one."""
    weight = getattr(module, name)
    x = invariant_expert_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, expert)
    return x + getattr(module, f"{name}_bias")[expert] if module.has_bias else x


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_row_by_row)


class _FullVectors(TorchDispatchMode):
    """Computes pointwise functions with the same instructions for every number of a tensor."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        x = args[0] if args else None
        numbers = isinstance(x, Tensor) and x.is_floating_point() and x.numel()
        alone = not any(isinstance(other, Tensor) for other in (*args[1:], *kwargs.values()))
        # Only functions of one tensor: with two, broadcasting may change which numbers meet.
        if torch.Tag.pointwise not in func.tags or not numbers or not alone:
            return func(*args, **kwargs)
        x, *rest = args
        result = in_full_vectors(lambda chunk: func(chunk, *rest, **kwargs), x)
        return x.copy_(result) if func._schema.is_mutable else result


class _Recorder(TorchDispatchMode):
    """Records which module is running whenever torch multiplies matrices."""

    def __init__(self, calls: Sequence[str], found: list[tuple[str, str]]):
        super().__init__()
        self._calls, self._found = calls, found

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func._schema.name
        if self._calls and PRODUCT.fullmatch(name):
            # Products of positions and frequencies multiply single numbers, without a sum.
            of_one = name in ("aten::mm", "aten::bmm", "aten::matmul") and args[0].dim() > 1 and args[0].shape[-1] == 1
            if not of_one:
                self._found.append((self._calls[-1], name.removeprefix("aten::")))
        return func(*args, **(kwargs or {}))
