"""The part of a drafter's head that one of several ranks computes.

Every level of a search reads the whole head: 263 MB of an 8B's default drafter. Where ranks share a target, each scores
its part of the ids, and they exchange the best ones of each chunk in one message.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.kernels.block_size import CHUNK
from redrafter.model.linear_layers import is_unmodified_linear, tensors_of, with_tensors
from redrafter.parallel.ranks import Ranks

# Bytes of a head that a rank must not have to read for the message to pay, by type of device: it takes about 11 us on a
# GPU, which reads 3 to 5 TB/s. On a CPU a message costs little next to the products.
MIN_SAVED_BYTES = {"cuda": 48 << 20, "cpu": 0}


@dataclass(frozen=True, eq=False)
class HeadPart:
    """The rows of a head that this rank computes, whole chunks of the ids on a GPU.

    Attributes:
        layer: A linear layer with views of these rows.
        first: The drafter's id of the first of them.
        names: The target's id of each, `[V'_r]` int64.
        ranks: The ranks.
    """

    layer: nn.Module
    first: int
    names: Tensor
    ranks: Ranks

    @classmethod
    def of_rank(cls, head: Any, draft_ids: Tensor | None, ranks: Ranks) -> "HeadPart | None":
        """Return this rank's part of a head; None where dividing it does not pay.

        Args:
            head: The head; anything but a linear layer without bias is not divided.
            draft_ids: The target's id of each of its rows, `[V']` int64; None if they are the same.
            ranks: The ranks.
        """
        plain = isinstance(head, nn.Linear) and is_unmodified_linear(head) and head.bias is None
        if ranks.size == 1 or not plain:
            return None
        count, device = head.out_features, head.weight.device
        unit = CHUNK if device.type == "cuda" else 1
        share = -(-count // (ranks.size * unit)) * unit
        saved = head.weight[share:].nbytes
        if saved < MIN_SAVED_BYTES.get(device.type, saved + 1) or (ranks.size - 1) * share >= count:
            return None
        rows = slice(ranks.rank * share, min((ranks.rank + 1) * share, count))
        # Views: whoever changes the head's weight in place changes the part.
        layer = with_tensors(head, {name: x.detach()[rows] for name, x in tensors_of(head).items()})
        names = torch.arange(rows.start, rows.stop, device=device) if draft_ids is None else draft_ids[rows]
        return cls(layer, rows.start, names, ranks)
