"""A step has fixed shapes and never reads a value on the host: all its operators are recorded and compared."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.recurrent import recurrent_model
from helpers.steps import prefill
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.sampling.sampler import Sampler
from redrafter.step import step

RECURRENT = ("lfm2", "mamba2", "olmo_hybrid")  # of a convolution, a state space, a gated delta rule
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique", "aten::item"}


class Trace(TorchDispatchMode):
    """Records the name and result shape of every operator that is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]  # without its overload
        self.seen.append((name, tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        return out


def run(engine, proposer, seeds, count):
    """Make `count` steps; return the operators and the accepted lengths of each."""
    ids, mask = uneven_batch(rows=3)
    length = mask.sum(1)
    tokens = torch.zeros(3, 60, dtype=torch.long)
    for row in range(3):
        tokens[row, : length[row]] = ids[row, mask[row].bool()]
    sampler = Sampler(seeds, (), torch.ones(3), length, length + 40, torch.arange(engine.target.vocab_size))
    cache = engine.target.new_cache(3)
    cache.reserve(60)
    traces = []
    with torch.no_grad():
        state = prefill(tokens, length, engine.target, cache, sampler)
        for _ in range(count):
            with Trace() as trace:
                state, drawn = step(state, proposer, engine.target, cache, sampler)
            traces.append((trace.seen, drawn.path.accepted.tolist()))
    return traces


@pytest.mark.parametrize("make_model", [lambda: tiny_model("llama"), *(partial(recurrent_model, x) for x in RECURRENT)])
def test_steps_have_the_same_operators_and_shapes_whatever_is_accepted(make_model):
    engine = with_tree(make_model(), tiny_drafter(), 4, 3)
    for proposer in (engine.proposer, UndraftedProposer()):
        for seeds in (None, torch.tensor([1, 2, 3])):
            traces = run(engine, proposer, seeds, count=7)[1:]  # the first one makes constants that are kept
            first = traces[0][0]
            assert len(first) > 100
            assert all(seen == first for seen, _ in traces)
            assert not READS & {name for name, _ in first}
            if seeds is not None and proposer.depth:
                assert len({tuple(accepted) for _, accepted in traces}) > 1  # or nothing was shown
