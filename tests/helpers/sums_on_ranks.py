"""A program on several ranks that compares sums by peer memory with the process group's; an error ends it.

On CPUs, which have no such memory, gloo's sums stand in for the kernels.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from redrafter.drafting.head_part import HeadPart
from redrafter.parallel import all_reduce
from redrafter.parallel.all_reduce import MAX_BYTES, PEER_MEMORIES, PeerMemory, collective_sum, peer_sum
from redrafter.parallel.local_shards import SummedLinear
from redrafter.parallel.ranks import Ranks, join_ranks
from redrafter.scheduler.captured_step import capture
from redrafter.tree.beam_search import PartOfScores, top_continuations

WIDTH = 4096


def connect_cpus(rank: int, size: int) -> list[str]:
    """Let gloo stand in for the kernels of `peer_sum`; return a list of those that are called from now on."""
    called, group = list[str](), dist.group.WORLD.group_name

    def stand_in(name: str) -> Callable[..., Tensor]:
        def add(x: Tensor, *how: object) -> Tensor:
            called.append(name)
            return collective_sum(x, group)

        return add

    for name in ("peer_sum", "peer_sum_by_shares"):
        setattr(all_reduce.kernels.peer_sum, name, stand_in(name))
    memory = PEER_MEMORIES[group] = PeerMemory(group, rank, size)
    memory.check_sums()
    assert called.count("peer_sum") == 3 * len(all_reduce.DTYPES)
    assert called.count("peer_sum_by_shares") == 2 * len(all_reduce.DTYPES)
    return called


def check_rows(name: str, size: int, device: torch.device) -> None:
    """Check sums of any number of rows against the group's, and each row's against those of other numbers."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = torch.randn(700, WIDTH, device=device).to(dtype)
        first = peer_sum(x[:1], name)
        for rows in (1, 3, 64, 300, 700):  # the last ones are sent in shares, and by the process group
            summed, expected = peer_sum(x[:rows], name), collective_sum(x[:rows], name)
            if size == 2:  # a sum of two has one order
                torch.testing.assert_close(summed, expected, rtol=0, atol=0)
            else:
                torch.testing.assert_close(summed, expected, rtol=0.05, atol=0.05)
            if size == 2 or (dtype != torch.float16 and summed.nbytes <= MAX_BYTES):
                assert torch.equal(summed[:1], first), f"a row's sum changes with {rows} rows"
        odd = torch.ones(3, device=device, dtype=dtype)  # half a word too many, in bfloat16
        assert torch.equal(peer_sum(odd, name), odd * size)


def check_captured(ranks: Ranks) -> None:
    """Check sums in a CUDA graph, compiled and not, which read new inputs at each replay."""
    device = torch.device("cuda", torch.cuda.current_device())
    layer = nn.Linear(WIDTH * ranks.size, WIDTH, bias=False, device="meta")
    torch.manual_seed(ranks.rank)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / 64, requires_grad=False)
    summed = SummedLinear(layer, weight, None, ranks, splits=False)
    x = torch.empty(8, WIDTH, device=device, dtype=torch.bfloat16)

    def run() -> Tensor:
        y = x
        for _ in range(20):
            y = summed(y).sigmoid() + y
        return y

    alone = Ranks(ranks.rank, ranks.size, ranks.group)
    for function in (run, torch.compile(run, fullgraph=True)):
        out = list[Tensor]()
        with torch.inference_mode():
            graph = capture(lambda function=function, out=out: out.append(function()), watched=True)
            for seed in range(5):
                torch.manual_seed(seed)  # the same inputs on all ranks
                x.normal_()
                graph.replay()
                torch.testing.assert_close(out[-1], function(), rtol=0, atol=0)
                if function is run and ranks.size == 2:
                    replayed, summed.ranks = out[-1].clone(), alone
                    torch.testing.assert_close(run(), replayed, rtol=0, atol=0)  # NCCL's
                    summed.ranks = ranks
    print(f"rank {ranks.rank}: captured sums are equal")


def check_divided_ids(ranks: Ranks) -> None:
    """Check, in a CUDA graph, that ranks that divide the ids choose the continuations of all ids."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)  # the same scores on all ranks
    head = nn.Linear(1024, 128_256, bias=False, device=device, dtype=torch.bfloat16)
    part = HeadPart.of_rank(head, None, ranks)
    assert part is not None
    for rows, beams in ((1, 1), (1, 5), (8, 5)):
        scores, total = torch.randn(rows, beams, 128_256, device=device), torch.randn(rows, beams, device=device)
        own = scores[..., part.first : part.first + len(part.names)]
        out = list[tuple[Tensor, ...]]()

        def choose(own: Tensor = own, total: Tensor = total, out: list[tuple[Tensor, ...]] = out) -> None:
            out.append(PartOfScores(own, part.first, 128_256, ranks).best(total, 5, None))

        graph = capture(choose, watched=True)
        for _ in range(3):
            scores.normal_()
            graph.replay()
            for found, expected in zip(out[-1], top_continuations(scores, total, 5, None), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
    print(f"rank {ranks.rank}: continuations are equal")


def main() -> None:
    """Compare on this rank."""
    size = int(os.environ["WORLD_SIZE"])
    join_ranks(size)
    ranks = Ranks.of_world()
    on_gpu = torch.cuda.is_available()
    assert ranks.reads_peers is on_gpu
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:
        connect_cpus(ranks.rank, size)
    torch.manual_seed(ranks.rank)
    check_rows(dist.group.WORLD.group_name, size, device)
    if on_gpu:
        check_captured(ranks)
        check_divided_ids(ranks)


if __name__ == "__main__":
    main()
