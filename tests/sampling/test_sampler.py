"""In which precision draws are made."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redrafter.sampling.sampler import Sampler

IDS = torch.arange(50)


class _Argmaxes(TorchDispatchMode):
    """The precisions of which an argmax was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.argmax.default:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_greedy_draws_of_16_bit_logits_are_made_in_float32_where_an_argmax_is_ten_times_as_fast():
    zero = torch.zeros(1, dtype=torch.long)
    sampler, depth = Sampler(None, (), torch.ones(1), zero, zero, IDS), torch.zeros(1, 12, dtype=torch.long)
    logits = torch.randn(1, 12, len(IDS)).bfloat16()
    with _Argmaxes() as seen:
        drawn = sampler.draw(logits, None, depth, logits)
    assert torch.equal(drawn[..., 0], logits.argmax(-1))
    assert seen.dtypes == {torch.float32}
