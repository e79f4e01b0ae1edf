"""Recurrent states at ends of stored prefixes: which are kept, found, and given up with the blocks that they follow."""

import random
from itertools import product

import pytest

from redrafter.cache import block_manager
from redrafter.cache.block_manager import BlockManager, BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE


def text(*pieces: int) -> list[int]:
    """Return a full block of tokens for each number."""
    return [100 * piece + i for piece in pieces for i in range(BLOCK_SIZE)]


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep states also where they save a single block."""
    monkeypatch.setattr(block_manager, "MIN_SAVED", 1)


class States:
    """A manager, and the salt and text that each row of a store of states has read."""

    def __init__(self, blocks: int, rows: int = 4, prefix_states: int = 8, host_blocks: int = 0):
        self.manager = BlockManager(blocks, rows, host_blocks, prefix_states)
        self.rows, self.bound, self.store = rows, prefix_states, dict[int, tuple[object, ...]]()

    def admit(self, prompt: list[int], salt: str | None = None, **how: bool) -> BlockTable:
        """Admit a row, check that it gets the states of what it reuses, and read the rest of its prompt."""
        try:
            table = self.manager.admit(prompt, len(prompt) + 1, salt=salt, **how)
        finally:
            self.manager.take_copies()
        assert (table.restored > 0) == (table.reused > 0)
        if table.restored:
            assert self.store[table.restored] == (salt, *prompt[: table.reused])
            self.store[table.state_row] = self.store[table.restored]
        for count, row in table.snapshots.items():
            assert row > self.rows
            assert table.reused < count < len(prompt)
            self.store[row] = (salt, *prompt[:count])
        return table

    def serve(self, prompt: list[int], salt: str | None = None, **how: bool) -> int:
        """Read a prompt, publish it and give all back; return how many of its tokens were reused."""
        table = self.admit(prompt, salt, **how)
        reused = table.reused
        self.manager.publish(table, prompt)
        self.manager.release(table)
        return reused


def test_a_text_continues_from_the_last_block_of_an_earlier_prompt():
    states = States(40)
    assert states.serve([*text(1, 2, 3), 7]) == 0
    assert states.serve([*text(1, 2, 3), 7]) == 48
    assert states.serve([*text(1, 2, 3), 7, 8, 9, *text(4)]) == 48
    assert states.serve(text(1, 2, 3)) == 0  # of which the last token must be read, and the state before it is not kept


def test_where_a_second_prompt_leaves_a_first_one_a_third_continues():
    states = States(40)
    found = [states.serve([*text(1, 2, number), 9]) for number in (3, 4, 5, 6)]
    assert found == [0, 0, 32, 32]
    assert len(states.manager.states) == 5  # one for each prompt's end, and one for the beginning of all


def test_the_states_used_least_recently_are_given_up():
    states = States(40, prefix_states=2)
    for piece in (1, 2):
        states.serve([*text(piece), 9])
    assert states.serve([*text(1), 8]) == 16
    states.serve([*text(3), 9])
    assert len(states.manager.states) == 2
    assert [states.serve([*text(piece), 7], publishes=False) for piece in (1, 2, 3)] == [16, 0, 16]


def test_states_are_kept_where_they_save_enough(monkeypatch):
    monkeypatch.setattr(block_manager, "MIN_SAVED", 32)
    states = States(40)
    assert not states.admit([*text(1), 9]).snapshots
    states.serve([*text(2, 3), 9])
    assert not states.admit([*text(2, 3, 4), 9]).snapshots
    assert list(states.admit([*text(2, 3, 4, 5), 9]).snapshots) == [64]


def test_states_go_with_the_blocks_that_they_follow():
    states = States(5)
    states.serve([*text(1, 2), 9])
    assert len(states.manager.states) == 1
    states.serve([*text(3, 4), 9])  # evicts the last block of the first text
    assert len(states.manager.states) == 1
    assert states.serve([*text(1, 2), 9]) == 0


def test_states_stay_where_the_blocks_are_on_the_host():
    states = States(5, host_blocks=20)
    states.serve([*text(1, 2), 9])
    for piece in (3, 5, 7):
        states.serve([*text(piece, piece + 1), 9])
    assert states.serve([*text(1, 2), 9]) == 32
    assert states.manager.onboarded == 2


def test_nothing_is_found_where_a_row_is_withdrawn_or_all_is_forgotten():
    states = States(40)
    states.serve([*text(1, 2, 3), 9])
    table = states.admit([*text(1, 2, 4), 9])  # which snapshots the end of blocks that are the first row's
    states.manager.publish(table, [*text(1, 2, 4), 9])
    assert len(states.manager.states) == 3
    states.manager.withdraw(table)
    states.manager.release(table)
    assert len(states.manager.states) == 1
    assert states.serve([*text(1, 2, 5), 9], publishes=False) == 0
    states.manager.forget()
    assert len(states.manager.states) == 0
    assert states.serve([*text(1, 2, 3), 9]) == 0


def test_what_was_not_read_is_not_kept():
    states = States(40)
    table = states.admit([*text(1, 2, 3), 9])
    states.manager.publish(table, text(1, 2))  # the prompt was put back before its last block was read
    states.manager.release(table)
    assert len(states.manager.states) == 0
    for piece in range(8):  # and its place is free
        states.serve([*text(10 + piece), 9])
    assert len(states.manager.states) == 8


def test_thousands_of_random_operations_restore_the_states_of_the_very_text():
    for sizes in product((10, 40), (1, 3, 30), (0, 5)):
        check_random_operations(*sizes)


def check_random_operations(blocks: int, prefix_states: int, host_blocks: int) -> None:
    """Fail if a row gets states of another sequence than its own, with so many blocks, kept states and host blocks."""
    rng = random.Random(blocks * prefix_states + host_blocks)
    states, rows, found = States(blocks, 5, prefix_states, host_blocks), list[tuple[BlockTable, list[int]]](), 0

    for _ in range(3000):
        action = rng.random()
        if action < 0.5:
            prompt = text(*(rng.choice((1, 1, 1, 2, 3)) for _ in range(5)))[: rng.randint(1, 5 * BLOCK_SIZE)]
            try:
                table = states.admit(prompt, rng.choice((None, "a")), publishes=action > 0.1)
            except CacheFullError:
                continue
            found += table.reused
            rows.append((table, prompt))
        elif rows:
            table, prompt = rows.pop(rng.randrange(len(rows)))
            if action < 0.95:
                states.manager.publish(table, prompt[: rng.choice((len(prompt), len(prompt) // 2))])
            if rng.random() < 0.05:
                states.manager.withdraw(table)
            states.manager.release(table)
        if rng.random() < 0.002:
            states.manager.forget()
        assert len(states.manager.states) <= prefix_states
    assert found > 20 * BLOCK_SIZE
    for table, _ in rows:
        states.manager.release(table)
    states.manager.forget()
    reserved = [states.manager.admit([piece] * 17, 17) for piece in range(4)]
    assert sum(len(table.snapshots) for table in reserved) == min(prefix_states, 4)  # none is lost
