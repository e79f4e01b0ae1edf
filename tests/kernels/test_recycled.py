"""A table of recycled tokens in kernels: the same entries as the reference's."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE
from redrafter.drafting.recycled import TOKEN_BITS, UNKNOWN, keys_of, place_of, read_entries, write_entries
from redrafter.kernels import recycled


def random_table(entries: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return a table in which no token occurs twice in an entry."""
    ids = torch.rand(entries, 50, generator=generator).argsort(dim=1)[:, :count]
    logits = -5 * torch.rand(entries, count, generator=generator)
    return tuple(x.to(DEVICE).contiguous() for x in (torch.full((entries,), -1), ids, logits))


@pytest.mark.parametrize("count", [16, 5])
def test_entries_are_written_and_read_as_by_the_reference(count):
    generator = torch.Generator().manual_seed(count)
    table, nodes = random_table(256, count, generator), 40
    same = tuple(x.clone() for x in table)
    sharing, before, tokens = (torch.randint(0, most, (nodes,), generator=generator) for most in (2, 30, 30))
    key = torch.cat(keys_of(sharing * 12345678901, before, tokens)).to(DEVICE)
    _, ids, logits = random_table(nodes, count, generator)
    # Keys with one place: any of them may win, so each place is written once here.
    place = place_of(key, 256)
    once = (place[:, None] == place).tril(-1).any(dim=1).logical_not()
    written = once & (torch.arange(len(key), device=DEVICE) % 3 > 0)
    write_entries(table, key, ids, logits, written)
    recycled.write_entries(same, key, ids, logits, written)
    assert (table[0] >= 0).sum() == written.sum() > 20
    for ours, reference in zip(same, table, strict=True):
        assert torch.equal(ours, reference)
    rows = [x.view(8, 5).to(DEVICE) for x in (before, tokens)]
    sharing = (sharing.view(8, 5)[:, :1] * 12345678901).to(DEVICE)
    expected = read_entries(table, sharing, *rows)
    found = recycled.read_entries(same, sharing, *rows, unknown=UNKNOWN, token_bits=TOKEN_BITS)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert (expected[1] > UNKNOWN).any()


def test_one_of_the_keys_with_a_place_wins_it_whole():
    generator = torch.Generator().manual_seed(1)
    table = random_table(4, 8, generator)
    key = torch.arange(64, device=DEVICE)
    _, ids, logits = random_table(64, 8, generator)
    recycled.write_entries(table, key, ids, logits, torch.ones_like(key, dtype=torch.bool))
    for entry, number in enumerate(table[0].tolist()):
        assert place_of(key[number], 4) == entry
        assert torch.equal(table[1][entry], ids[number])
        assert torch.equal(table[2][entry], logits[number])
