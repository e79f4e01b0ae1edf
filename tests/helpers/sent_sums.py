"""A program whose processes send messages into each other's memory, which stand for GPUs; an error ends it.

The kernel runs in Triton's interpreter.
"""

import sys

import torch
from torch import Tensor, multiprocessing

from redrafter import kernels

LARGEST = 32 << 10
# Numbers of several programs, of one, and of a part of one; a program of a larger message counts fewer calls.
MESSAGES = [
    (8, torch.bfloat16),
    (4096, torch.bfloat16),
    (4096, torch.float32),
    (2, torch.bfloat16),
    (5000, torch.bfloat16),
    (1030, torch.float32),
    (4096, torch.bfloat16),
]


def message(call: int, rank: int) -> Tensor:
    """Return the message of a rank in a call; sums of bfloat16 are exact, as the interpreter rounds down."""
    (count, dtype), random = MESSAGES[call], torch.Generator().manual_seed(100 * call + rank)
    if dtype == torch.bfloat16:
        return torch.randint(-8, 9, (count,), generator=random).to(dtype)
    return torch.randn(count, generator=random)


def add(rank: int, inboxes: list[Tensor]) -> None:
    """Compare this rank's sums with those in the order of ranks."""
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    calls = torch.zeros(kernels.peer_sum_parts(LARGEST), dtype=torch.int32)
    for call in range(len(MESSAGES)):
        expected = message(call, 0)
        for other in range(1, len(inboxes)):
            expected = expected + message(call, other)
        total = kernels.peer_sum(message(call, rank), addresses, calls, rank, LARGEST)
        torch.testing.assert_close(total, expected, rtol=0, atol=0)


def check_a_peer_that_is_ahead() -> None:
    """Add the messages of a peer that has already sent its next one, which must not replace the one before."""
    words, count = kernels.inbox_words(LARGEST, 2), 4
    slots, x = words // 4, torch.arange(1.0, count + 1)  # two inboxes of two ranks
    own, other = torch.zeros(2, words).long()
    for call in (1, 2):
        first = ((call & 1) * 2 + 1) * slots
        own[first : first + count] = (call << 32) | (call * x).view(torch.int32).long()
    addresses = torch.tensor([own.data_ptr(), other.data_ptr()])
    calls = torch.zeros(kernels.peer_sum_parts(LARGEST), dtype=torch.int32)
    for call in (1, 2):
        torch.testing.assert_close(kernels.peer_sum(x, addresses, calls, 0, LARGEST), x + call * x, rtol=0, atol=0)


def main() -> None:
    """Add on as many ranks as the argument says."""
    ranks = int(sys.argv[1])
    check_a_peer_that_is_ahead()
    words = kernels.inbox_words(LARGEST, ranks)
    inboxes = [torch.zeros(words, dtype=torch.long).share_memory_() for _ in range(ranks)]
    multiprocessing.spawn(add, (inboxes,), ranks)


if __name__ == "__main__":
    main()
