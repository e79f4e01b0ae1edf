"""Windows of documents and the batches that a training step takes of them."""

from itertools import islice

import pytest
import torch

from redrafter.data.windows import Batch, Document, Windows
from redrafter.train.loss import target_mask


def random_documents(count: int, longest: int, seed: int = 0) -> list[Document]:
    """Return documents that begin with their own number and have random loss masks."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        size = int(torch.randint(4, longest + 1, (1,), generator=generator))
        mask = (torch.rand(size, generator=generator) < 0.8).tolist()
        documents.append(Document([number, *range(1000, 999 + size)], [*mask[:-2], True, True]))
    return documents


def windows_in(batch: Batch) -> list[list[int]]:
    """Return the windows of a batch, split by their segments."""
    rows = zip(batch.tokens.tolist(), batch.segment.tolist(), strict=True)
    windows = [
        [t for t, s in zip(tokens, segments, strict=True) if s == k] for tokens, segments in rows for k in range(99)
    ]
    return [window for window in windows if window and any(window)]


def test_long_documents_are_cut_and_open_as_every_prompt_does():
    text = Document([1, *range(10, 33)], [True] * 24)
    windows = Windows([text, Document([40, 41, 42], [True] * 3)], length=10, bos=1, pack=False)
    in_order = [windows_in(batch)[0] for batch in islice(windows.batches(1, 0), 4)]
    assert sorted(in_order) == [[1, *range(10, 19)], [1, *range(19, 28)], [1, *range(28, 33)], [40, 41, 42]]
    assert windows.count_ids(50)[10:33].tolist() == [1] * 23
    assert windows.count_ids(50)[[1, 40, 41]].tolist() == [0, 0, 1]  # nothing draws a first token
    silent = Document(list(range(30)), [False] * 10 + [True] * 5 + [False] * 15)
    assert len(Windows([silent], length=10)) == 1  # two windows teach nothing
    cut = Document(list(range(12)), [False] * 9 + [True] * 2 + [False])
    short = Windows([cut, silent], length=10)
    assert (len(short), short.missed, short.longest_cut) == (1, 2, 12)  # each window holds one token of that answer
    assert (Windows([cut], length=12).missed, Windows([silent], length=10).missed) == (0, 0)
    assert len(Windows([], length=10)) == len(Windows([], length=10, pack=False)) == 0


@pytest.mark.parametrize("pack", [True, False])
def test_batches_hold_documents_side_by_side_and_nothing_else(pack):
    originals = random_documents(60, longest=40)
    windows = Windows(originals, length=40, pack=pack)
    seen = []
    for batch in islice(windows.batches(4, 0), windows.steps_per_epoch(4)):
        assert batch.tokens.dtype == batch.segment.dtype == torch.int64
        assert batch.mask.dtype == torch.bool
        assert batch.tokens.shape == batch.mask.shape == batch.segment.shape
        assert not pack or batch.tokens.shape == (4, 40)
        for tokens, mask, segment in zip(*batch, strict=True):
            assert segment[0] == 0
            assert set(segment.diff().tolist()) <= {0, 1}
            for k in range(int(segment[-1]) + 1):
                ids, learnt = tokens[segment == k].tolist(), mask[segment == k].tolist()
                if ids[1:2] == [1000]:
                    assert ids == originals[ids[0]].ids
                    assert learnt == [False, *originals[ids[0]].mask[1:]]
                    seen.append(ids[0])
                else:  # padding, which only ends a row
                    assert k == segment[-1]
                    assert not any(ids)
                    assert not any(learnt)
            assert pack or segment.max() <= 1
    assert set(seen) == set(range(60))
    assert len(seen) < 60 + 4 * 8


def test_no_rollout_crosses_from_a_document_into_another():
    batch = next(Windows(random_documents(80, longest=20), length=64).batches(8, 0))
    counted = target_mask(batch.mask, 4)
    assert batch.segment.max() > 3
    assert counted.any(dim=(0, 1)).all()
    for row, anchor, k in counted.nonzero().tolist():
        assert len(set(batch.segment[row, anchor : anchor + k + 3].tolist())) == 1
    everywhere = target_mask(batch.segment < batch.segment.max(), 4)  # as a mask without those 0s would have it
    assert any(batch.segment[r, a] != batch.segment[r, a + k + 2] for r, a, k in everywhere.nonzero().tolist())


@pytest.mark.parametrize(("count", "pack", "least"), [(2000, True, 0.98), (400, False, 0.9)])
def test_short_documents_leave_little_padding(count, pack, least):
    windows = Windows(random_documents(count, longest=100), length=256, pack=pack)
    batches = list(islice(windows.batches(4, 0), windows.steps_per_epoch(4)))
    tokens = sum(batch.tokens.numel() for batch in batches)
    assert sum(int((batch.tokens > 0).sum()) for batch in batches) / tokens > least
    widths = [batch.tokens.shape[1] for batch in batches[:32]]
    assert pack or widths != sorted(widths)  # rows of a batch are alike in length, but short and long batches in turn


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_sees_every_window_once_in_a_seeded_order(pack):
    windows = Windows([Document([n + 3] * (5 + n % 9), [True] * (5 + n % 9)) for n in range(24)], 19, pack=pack)

    def epoch(seed: int, process: int = 0, processes: int = 1, size: int = 2, number: int = 0) -> list[int]:
        steps = windows.steps_per_epoch(size, processes)
        batches = windows.batches(size, seed, process, processes, start=steps * number)
        return [ids[0] - 3 for batch in islice(batches, steps) for ids in windows_in(batch)]

    assert windows.row_widths.numel() % 4 == 0  # or a few would come twice
    assert sorted(epoch(0)) == list(range(24))
    assert epoch(0) == epoch(0)
    assert len({tuple(epoch(seed, number=number)) for seed in (0, 1) for number in (0, 1)}) == 4
    assert sorted(epoch(0, 0, 2) + epoch(0, 1, 2)) == list(range(24))
    assert windows.steps_per_epoch(2, 2) > 1
    if pack:  # who shares a row changes from epoch to epoch, and which rows share a batch
        first, second = (list(islice(windows.batches(2, seed), 6)) for seed in (0, 1))
        assert {str(row) for batch in first for row in batch.tokens} != {str(row) for b in second for row in b.tokens}
        first, second = ({str(batch.segment.sort(0).values) for batch in sequence} for sequence in (first, second))
        assert first != second
    batch = next(Windows([Document([5] * 4, [True] * 4)], 9, pack=pack).batches(3, 0))
    assert batch.tokens.shape == (3, 9 if pack else 4)  # fewer windows than a batch: they repeat


@pytest.mark.parametrize(("processes", "pack"), [(1, False), (2, True), (4, True), (8, False)])
def test_any_number_of_processes_shares_the_batches_of_four_from_any_of_them_on(processes, pack):
    windows = Windows(random_documents(70, longest=40), length=64, pack=pack)
    if pack:
        assert windows.steps_per_epoch(3, 1) == 9, "else four processes share an epoch without filling it up"
        assert windows.steps_per_epoch(3, 4) == 3, "else eight processes begin each epoch alike"
    whole = [next(islice(windows.batches(3, 7, number % 4, 4), number // 4, None)) for number in range(96)]
    for process in range(processes):
        of_process = whole[process::processes]
        for start in (0, 1, 2, 5, 10):
            drawn = windows.batches(3, 7, process, processes, start, multiple=4)
            for mine, expected in zip(drawn, of_process[start:], strict=False):
                assert all(map(torch.equal, mine, expected))
