"""Muon (Jordan et al., 2024): momentum whose every update of a matrix is replaced by the nearest orthogonal one.

Nothing in it is new. What is ours is that matrices of one shape are updated together, as one stack: a deep narrow net
has hundreds of small ones, and a step that took them singly would be thousands of kernel launches.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Bring every matrix of `stack` `[M, rows, cols]` close to `U V^T` of its SVD, by Newton-Schulz iteration.

    The coefficients are Jordan's: singular values end between about 0.7 and 1.2, which is near enough, in few steps.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # [M, short, short]
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for parameters that are matrices; `weight_decay` is decoupled."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for param in params:
            assert param.ndim == 2, "Muon updates matrices"
            by_shape.setdefault(param.shape, []).append(param)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every group, each group one shape."""
        for group in self.param_groups:
            params, lr = group["params"], group["lr"]
            grads = torch.stack([param.grad for param in params])  # [M, rows, cols]
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grads)
            state["momentum"].lerp_(grads, 1 - group["momentum"])
            ahead = grads.lerp(state["momentum"], group["momentum"])
            update = orthogonalize(ahead.bfloat16() if ahead.is_cuda else ahead).type_as(grads)
            _, rows, cols = update.shape
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr * max(1, rows / cols) ** 0.5)
