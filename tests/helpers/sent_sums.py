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


def add(rank: int, inboxes: list[Tensor], share_inboxes: list[Tensor]) -> None:
    """Compare this rank's sums with those in the order of ranks."""
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    shares = torch.tensor([inbox.data_ptr() for inbox in share_inboxes])
    calls = torch.zeros(kernels.peer_sum.peer_sum_parts(LARGEST), dtype=torch.int32)
    share_calls = torch.zeros(kernels.peer_sum.share_parts(LARGEST, len(inboxes)), dtype=torch.int32)
    for call in range(len(MESSAGES)):
        expected = message(call, 0)
        for other in range(1, len(inboxes)):
            expected = expected + message(call, other)
        x = message(call, rank)
        torch.testing.assert_close(
            kernels.peer_sum.peer_sum(x, addresses, calls, rank, LARGEST), expected, rtol=0, atol=0
        )
        total = kernels.peer_sum.peer_sum_by_shares(x, shares, share_calls, rank, LARGEST)
        torch.testing.assert_close(total, expected, rtol=0, atol=0)


def check_a_peer_that_is_ahead() -> None:
    """Add the messages of a peer that has already sent its next one, which must not replace the one before."""
    words, count = kernels.peer_sum.inbox_bytes(LARGEST, 2) // 8, 4
    slots, x = words // 4, torch.arange(1.0, count + 1)  # two inboxes of two ranks
    own, other = torch.zeros(2, words).long()
    for call in (1, 2):
        first = ((call & 1) * 2 + 1) * slots
        own[first : first + count] = (call << 32) | (call * x).view(torch.int32).long()
    addresses = torch.tensor([own.data_ptr(), other.data_ptr()])
    calls = torch.zeros(kernels.peer_sum.peer_sum_parts(LARGEST), dtype=torch.int32)
    for call in (1, 2):
        torch.testing.assert_close(
            kernels.peer_sum.peer_sum(x, addresses, calls, 0, LARGEST), x + call * x, rtol=0, atol=0
        )


def check_a_peer_that_is_ahead_by_shares() -> None:
    """Add a message of a peer that has already sent the parts and the sums of its next one."""
    count, parts = 4, kernels.peer_sum.share_parts(LARGEST, 2)
    own, other = (torch.zeros(kernels.peer_sum.share_inbox_bytes(LARGEST, 2) // 4, dtype=torch.int32) for _ in range(2))
    places, flags = own[: -8 * parts].view(2, 2, 2, parts, -1), own[-8 * parts :].view(2, 2, 2, parts)
    width = places.shape[-1]  # words of a program: of a share, as the message has one program
    x = torch.arange(1.0, width + count + 1)  # the second share has four words
    for call in (1, 2):
        for number, words in enumerate((call * x[:width], (1 + call) * x[width:])):  # to add, and added
            places[call & 1, number, 1, 0, : len(words)] = words.view(torch.int32)
            flags[call & 1, number, 1, 0] = call
    addresses = torch.tensor([own.data_ptr(), other.data_ptr()])
    calls = torch.zeros(parts, dtype=torch.int32)
    for call in (1, 2):
        total = kernels.peer_sum.peer_sum_by_shares(x, addresses, calls, 0, LARGEST)
        torch.testing.assert_close(total, x + call * x, rtol=0, atol=0)


def main() -> None:
    """Add on as many ranks as the argument says."""
    ranks = int(sys.argv[1])
    check_a_peer_that_is_ahead()
    check_a_peer_that_is_ahead_by_shares()
    sizes = kernels.peer_sum.inbox_bytes(LARGEST, ranks), kernels.peer_sum.share_inbox_bytes(LARGEST, ranks)
    inboxes = [[torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(ranks)] for size in sizes]
    multiprocessing.spawn(add, inboxes, ranks)


if __name__ == "__main__":
    main()
