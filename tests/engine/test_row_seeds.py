"""The seed of each row, from one int, one per row, or none."""

import numpy as np
import pytest
import torch
from transformers import set_seed

from helpers.models import tiny_drafter, uneven_batch, with_tree
from redrafter import ArgumentError
from redrafter.engine.request import row_seeds


def test_rows_count_on_from_one_seed():
    assert row_seeds(40, 3) == [40, 41, 42]


def test_rows_may_have_their_own_seeds():
    assert row_seeds([7, 7, 0], 3) == [7, 7, 0]


def test_numbers_of_numpy_and_torch_are_seeds():
    assert row_seeds(np.int64(40), 2) == row_seeds(torch.tensor(40), 2) == [40, 41]
    for seeds in (np.array([7, 0]), torch.tensor([7, 0]), [np.uint32(7), torch.tensor(0)]):
        assert row_seeds(seeds, 2) == [7, 0]


def test_a_seed_whose_followers_do_not_fit_is_refused_in_its_own_terms():
    assert row_seeds(2**63 - 1, 1) == [2**63 - 1]
    assert row_seeds([2**63 - 1] * 2, 2) == [2**63 - 1] * 2
    with pytest.raises(ArgumentError, match=f"seed={2**63 - 1} is too large for 2 output rows.* at most {2**63 - 2},"):
        row_seeds(2**63 - 1, 2)


def test_without_a_seed_calls_and_rows_have_others_and_torchs_generator_repeats_them(llama):
    assert len({*row_seeds(None, 8), *row_seeds(None, 8)}) == 16
    ids, mask = uneven_batch()
    engine = with_tree(llama, tiny_drafter(), 3, 3)
    written = []
    for seed in (5, 5, 6):
        set_seed(seed)
        written.append([engine.generate(ids, mask, do_sample=True, max_new_tokens=12) for _ in range(2)])
    assert all(map(torch.equal, written[0], written[1]))
    assert not torch.equal(*written[0])
    assert not torch.equal(written[0][0], written[2][0])


def test_greedy_decoding_and_seeds_draw_nothing_from_torchs_generator(llama):
    ids, mask = uneven_batch()
    engine = with_tree(llama, tiny_drafter(), 3, 3)
    before = torch.get_rng_state()
    engine.generate(ids, mask, do_sample=False, max_new_tokens=3)
    engine.generate(ids, mask, do_sample=True, seed=1, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("seed", "named"),
    [([1, 2], "2 entries for 4 output rows"), ("a", "a seed is an int"), (-1, "a seed is an int")],
)
def test_what_is_no_seed_is_refused(llama, seed, named):
    ids, mask = uneven_batch()
    with pytest.raises(ArgumentError, match=named):
        with_tree(llama, tiny_drafter(), 3, 3).generate(ids, mask, do_sample=True, seed=seed)
