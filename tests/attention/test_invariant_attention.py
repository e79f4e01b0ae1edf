"""Attention in an order of positions gives the same bits however a token comes."""

import pytest
import torch

from helpers.token_forms import AS_CHAIN, AS_CHUNK, AS_TREE, FORMS, SETTINGS, TokenForms
from redrafter.attention import invariant_attention as order
from redrafter.attention.invariant_attention import invariant_attention_reference

REFERENCE = TokenForms(invariant_attention_reference, torch.device("cpu"))
# More than a tile, than a split, and a length at which splits of other sizes begin.
LENGTHS = [3, 63, 64, 65, 300, 4100]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_token_has_the_same_bits_in_any_form(n, setting, form):
    states = REFERENCE.random_text(n + 5, torch.float32)
    assert torch.equal(
        REFERENCE.come_as(form, states, n, **SETTINGS[setting]), REFERENCE.alone(n, torch.float32, setting)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [AS_TREE, AS_CHUNK])
def test_a_token_has_the_same_bits_in_any_form_in_half_precision(form, dtype):
    states = REFERENCE.random_text(305, dtype)
    assert torch.equal(REFERENCE.come_as(form, states, 300), REFERENCE.alone(300, dtype, "plain"))


def by_length(end):
    """Cut the positions into two halves, as a kernel may that has a device to fill."""
    half = end // 2 // 64 * 64
    return iter([range(half), range(half, end + 64)])


def with_tiles_reversed(end):
    """Yield one split a tile, the last one first."""
    return (range(first, first + 64) for first in reversed(range(0, end, 64)))


@pytest.mark.parametrize("broken", [by_length, with_tiles_reversed])
def test_an_order_that_follows_from_the_length_is_seen(monkeypatch, broken):
    """Guard the tests above, which compare tokens with the same number of positions before them."""
    states = REFERENCE.random_text(305, torch.float32)
    expected = REFERENCE.alone(300, torch.float32, "plain")
    monkeypatch.setattr(order, "splits", broken)
    assert not torch.equal(REFERENCE.come_as(AS_CHAIN, states, 300), expected)


@pytest.mark.parametrize(("end", "count"), [(1, 1), (128, 1), (129, 2), (4096, 32), (4097, 33), (4609, 34)])
def test_splits_are_at_fixed_places(end, count):
    found = list(order.splits(end))
    assert [split.start for split in found] == [*range(0, 4096, 128), *range(4096, 8192, 512)][:count]
    assert all(len(split) == (128 if split.start < 4096 else 512) for split in found)


def test_what_is_in_slots_that_no_token_sees_changes_nothing():
    states = REFERENCE.random_text(70, torch.float32)
    outputs = []
    for junk in (0.0, torch.nan):
        cache = REFERENCE.empty_cache(80, torch.float32)
        for pool in cache.pool.pools:
            pool.fill_(junk)
        outputs.append(REFERENCE.attend(cache, REFERENCE.chain_of(70), [0], states))
    assert torch.equal(*outputs)
