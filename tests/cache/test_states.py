"""Recurrent states of rows: which node's is kept, and which go along when rows do."""

import pytest
import torch

from redrafter.attention.prompt_attention import Piece
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.states import RowStates, StateShape, StatesOfRows
from redrafter.drafting.prompt_lookup import graft
from redrafter.tree.accept import Path
from redrafter.tree.token_tree import Tree, chain, tree_of

CPU = torch.device("cpu")
SHAPE = StateShape(1, ("conv_states", 0), (2,), torch.float32, CPU)
KEY = SHAPE.key
BOTH = torch.tensor([True, True])


def states_after(*numbers: int, count: int = 5) -> StatesOfRows:
    """Return the states of rows that have read `count` tokens, whose every number is the row's."""
    states = StatesOfRows(RowStates([SHAPE], len(numbers)))
    for row, number in enumerate(numbers):
        states.write_row([SHAPE], row, [torch.full((1, 2), float(number))])
    states.take_note([Piece(row, 0, count) for row in range(len(numbers))])
    return states


def walk(states: StatesOfRows, tree: Tree, length: torch.Tensor) -> None:
    """Let the state after a node be ten times that after its parent, and the node's token."""
    levels = states.begin(tree, length)
    tokens = torch.nn.functional.pad(tree.tokens[:, -tree.new :], (0, 1))
    [before] = states.read_entries([KEY], levels.roots)
    after: list[torch.Tensor] = []
    for nodes, parents in zip(levels.nodes, levels.parents, strict=True):
        before = after[-1][parents] if after else before
        after.append(before * 10 + tokens.gather(1, nodes).flatten()[:, None])
    states.write_entries([KEY], levels.entries, [torch.cat(after)])


def kept(states: StatesOfRows) -> list[int]:
    return [int(x) for x in states.store.tensors[KEY][:, 0]]


def a_tree() -> Tree:
    tokens = torch.tensor([[1, 2, 3, 4, 5]] * 2)
    return tree_of(tokens, torch.tensor([[0, 0, 0, 1, 2]] * 2), torch.tensor([[0, 1, 1, 2, 2]] * 2), 2)


@pytest.mark.parametrize(
    ("path", "accepted", "expected"),
    [([0, 2, 4], 2, 7135), ([0, 1, 3], 2, 7124), ([0, 2, 0], 1, 713), ([0, 0, 0], 0, 71)],
)
def test_a_commit_keeps_the_state_after_the_last_accepted_node(path, accepted, expected):
    states, length = states_after(7, 8), torch.tensor([5, 5])
    walk(states, a_tree(), length)
    states.commit(length, Path(torch.tensor([path, [0, 1, 3]]), torch.tensor([accepted, 2])), BOTH)
    assert kept(states) == [expected, 8124]
    assert states.store.position.tolist() == [6 + accepted, 8]


def test_a_row_that_stands_still_keeps_its_state():
    states, length = states_after(7, 8), torch.tensor([5, 5])
    walk(states, a_tree(), length)
    states.commit(length, Path(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long)), ~BOTH)
    assert kept(states) == [7, 8]
    assert states.store.position.tolist() == [5, 5]


def test_a_tree_may_be_grown_level_by_level():
    grown, length, whole = states_after(7, 8), torch.tensor([5, 5]), a_tree()
    for level, end in enumerate((1, 3, 5)):
        cut = (x[:, :end] for x in (whole.tokens, whole.parents, whole.depth))
        walk(grown, tree_of(*cut, level).last_level(end - max(2 * level - 1, 0)), length)
    grown.commit(length, Path(torch.tensor([[0, 2, 4]] * 2), torch.tensor([2, 2])), BOTH)
    assert kept(grown) == [7135, 8135]


@pytest.mark.parametrize(
    ("copied", "path", "expected"),
    [([9, 6, 7, 8], [0, 5, 6], 7196), ([2, 6, 7, 8], [0, 1, 5, 6], 71267), ([2, 4, 7, 8], [0, 1, 3, 5, 6], 712478)],
)
def test_states_after_grafted_nodes_continue_those_after_their_own_parents(copied, path, expected):
    states, length = states_after(7, 8), torch.tensor([5, 5])
    walk(states, graft(a_tree(), torch.tensor([copied] * 2)), length)
    states.commit(length, Path(torch.tensor([path] * 2), torch.tensor([len(path) - 1] * 2)), BOTH)
    assert kept(states)[0] == expected


def test_a_draft_models_states_stay_a_token_behind():
    states = states_after(7, 8)
    length = torch.tensor([6, 6])  # the last of these tokens, 9, is read again
    walk(states, chain(torch.tensor([[9, 1]] * 2)), length - 1)
    walk(states, chain(torch.tensor([[1, 2]] * 2)).last_level(1), length)
    path = Path(torch.tensor([[0, 1], [0, 0]]), torch.tensor([1, 0]))
    states.commit(length - 1, path.below_reread_token(), BOTH)
    assert kept(states) == [791, 89]  # before the accepted 2, and before the pending 1
    assert states.store.position.tolist() == [7, 6]


def test_a_shape_has_the_bytes_of_a_rows_tensor():
    tensor = torch.zeros(3, 5, dtype=torch.float64)
    assert StateShape(0, ("states", None), (3, 5), tensor.dtype, CPU).num_bytes == tensor.nbytes


def test_rows_that_are_forgotten_have_read_nothing():
    states = states_after(7, 8)
    states.forget([0])
    assert kept(states) == [0, 8]
    assert states.store.position.tolist() == [0, 5]


# In a dense cache


def cache_of(*numbers: int) -> DenseCache:
    shapes = [LayerShape(1, 2, 2, torch.float32, CPU), LayerShape(0, 0, 0, torch.float32, CPU, states=(SHAPE,))]
    cache = DenseCache(shapes, len(numbers))
    cache.reserve(8)
    cache.states.store.copy_rows(torch.arange(len(numbers)), states_after(*numbers).store, torch.arange(len(numbers)))
    return cache


@pytest.mark.parametrize(
    ("to", "rows", "expected"),
    [([0], [2], [3, 2, 3]), ([1, 2], [2, 0], [1, 9, 7])],
    ids=["within a cache", "from another"],
)
def test_states_are_copied_with_their_rows(to, rows, expected):
    cache = cache_of(1, 2, 3)
    cache.write_rows(to, cache if len(to) == 1 else cache_of(7, 8, 9), rows)
    assert kept(cache.states) == expected


def test_rows_that_are_read_again_get_their_new_states():
    cache = cache_of(1, 2, 3)
    with cache.subset(torch.tensor([0, 2]), 5) as part:
        part.states.store.tensors[KEY][:] = torch.tensor([[7.0], [8.0]])
    assert kept(cache.states) == [7, 2, 8]


def test_rows_that_take_no_part_keep_their_states():
    cache = cache_of(1, 2)
    cache.use_rows(1)
    length = torch.tensor([5])
    walk(cache.states, chain(torch.tensor([[4]])), length)
    cache.states.commit(length, Path(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)), BOTH[:1])
    assert kept(cache.states) == [14, 2]
