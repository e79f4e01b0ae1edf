"""A drafter that attends to committed tokens, and a check of what it reads of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from einops import rearrange
from torch import Tensor

from helpers.models import tiny_drafter
from helpers.searches import EVERY
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import RecurrentDrafter, RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree

WINDOW = 12  # shorter than the texts of these tests


def context_drafter(**changes: object) -> RecurrentDrafter:
    """Make a random drafter that attends to committed tokens and reads two layers of the target."""
    form = {"recurrence": "gated", "target_layers": (0, 1), "context_window": WINDOW, "context_head_dim": 8}
    drafter = tiny_drafter(**(form | changes))
    with torch.no_grad():
        drafter.context.out.weight.mul_(20)  # or nothing that is read would show
    return drafter


@contextmanager
def checked_windows() -> Iterator[None]:
    """Compare what every search reads with what the whole text gives, of texts that are longer than the window."""
    propose, checked = RecurrentProposer.propose, []

    def propose_checked(
        self: RecurrentProposer, state: State, sampler: Sampler, noise: Tensor | None, *caches: object
    ) -> Tree:
        size = min(WINDOW, caches[0].window)
        window = ContextWindow.read_last(state.length, size, caches[0].read_drafter_layer)
        for row in state.active.nonzero().flatten().tolist():
            text = state.tokens[row : row + 1, : state.length[row]]
            if text.shape[1] % EVERY:
                continue
            keys, values = remembered(self.drafter, self.target.model, text)
            keys, values = keys[:-1][-WINDOW:], values[1:][-WINDOW:]
            seen = window.bias[row, 0, 0] == 0
            assert seen[0], "nothing is a choice"
            assert int(seen.sum()) == 1 + len(keys)
            found = rearrange(window.keys[row], "h d s -> s h d")[seen], window.values[row].transpose(0, 1)[seen]
            for part, expected in zip(found, (keys, values), strict=True):
                torch.testing.assert_close(part[1:], expected, atol=1e-4, rtol=1e-3)
                assert not part[0].any()
            checked.append(text.shape[1])
        return propose(self, state, sampler, noise, *caches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentProposer, "propose", propose_checked)
        yield
    assert max(checked, default=0) > 2 * WINDOW, "no long text was checked"


def remembered(drafter: RecurrentDrafter, model: torch.nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a text `[1, T]`, `[T, H, d]` each, from one forward over all of it."""
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(text)
    fused = drafter.fuse_hidden(output.hidden[0])
    return drafter.context.remember(fused, output.embedding[0], torch.arange(text.shape[1]))
