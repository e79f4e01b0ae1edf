"""Experts of which each token's product is its own, in the place of the implementation that a model was loaded with."""

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from redrafter.kernels.invariant_linear import invariant_expert_linear

__all__ = ["EXPERTS_NAME", "expert_configs", "experts_row_by_row"]

EXPERTS_NAME = "redrafter_invariant"


def expert_configs(model: nn.Module) -> list[Any]:
    """Return the configs in which the experts of a model look up their implementation, each once."""
    traits = "has_gate", "has_bias", "is_transposed"  # that transformers gives to modules of experts
    experts: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in traits)]
    return list({id(module.config): module.config for module in experts}.values())


def experts_row_by_row(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of each token as an experts function of transformers.

    Each product of a token and an expert is one of that row alone, and the results of a token's experts are added in
    float32, in the order of its choice.

    Args:
        module: The module of all experts, with their weights.
        hidden: Hidden states, `[T, D]`.
        experts: The experts of each token, `[T, K]` int64.
        weights: Their weights, `[T, K]`.

    Returns:
        `[T, D]`.
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
    total = weighted[:, 0]
    for index in range(1, chosen):
        total = total + weighted[:, index]
    return total.to(hidden.dtype)


def _product(module: Any, name: str, x: Tensor, expert: Tensor) -> Tensor:
    """Return the product of each row with its expert's weight of that name, and that expert's bias if it has one."""
    weight = getattr(module, name)
    x = invariant_expert_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, expert)
    return x + getattr(module, f"{name}_bias")[expert] if module.has_bias else x


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_row_by_row)
