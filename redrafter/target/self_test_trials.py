"""Small token trees and what plain forwards give along their paths, for the test of a model that is being bound.

A *near* trial has two rows of a few tokens, which the model reads itself. A *far* trial has one row whose committed
keys and values are random numbers, as many as it takes to cross the numbers of the config that change what a position
sees: windows, chunks, scales, the end of the context. Only a few tokens of it are computed, so it takes little time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from redrafter.cache.dense import DenseCache, LayerShape
from redrafter.cache.paged import PagedCache
from redrafter.errors import UnsupportedError, first_line
from redrafter.tree.token_tree import Tree, chain, tree_of

__all__ = ["WRONG", "KVCache", "TargetUnderTest", "Trial", "far_lengths", "far_trial", "near_trial", "run_trial"]

ROOM = 8  # slots that a trial needs behind a row's committed tokens
FAR_BYTES = 1 << 30  # of keys and values in one far trial; farther trials are left out
BORDER = re.compile("window|chunk|original_max|floor|local|keep|block|stride|span|topk")  # names of such numbers
WRONG = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)
KVCache = DenseCache | PagedCache


class TargetUnderTest(Protocol):
    """What a trial asks of a target."""

    name: str
    model: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    context: int | None

    def verify(self, tree: Tree, length: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]: ...

    def prefill(
        self, prompts: Tensor, length: Tensor, cache: KVCache, *, max_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Trial:
    """A small tree behind the committed tokens of B rows, and what plain forwards give along its paths.

    Attributes:
        nodes: `[6]` int64, ids: the root; a and b below it; c below a, d below b; e, which follows the path root, b, d.
        length: `[B]` int64, committed tokens of each row.
        prompts: `[B, P]` int64, right-padded; None where the committed keys and values are random numbers.
        shapes: what each layer of such a trial stores.
        states: per layer, such keys and values, `[1, heads, P, dim]` each.
        expected: `[B, 6, V]`, plain logits at root, a, b, c, d and e.
    """

    nodes: Tensor
    length: Tensor
    prompts: Tensor | None
    shapes: Sequence[LayerShape]
    states: Sequence[tuple[Tensor, Tensor]]
    expected: Tensor

    @property
    def slots(self) -> int:
        """Slots that a row needs."""
        return int(self.length.max()) + ROOM


def near_trial(target: TargetUnderTest, longest: int) -> tuple[Trial, Any]:
    """Return two rows, of `longest` and of two tokens fewer, and the model's own output for the second."""
    ids = _ids(target, 2 * longest + 6)
    prompts, nodes = ids[: 2 * longest].view(2, longest), ids[2 * longest :]
    expected, lengths = [], [longest, longest - 2]
    for row, n in enumerate(lengths):
        texts = torch.stack([torch.cat([prompts[row, :n], path]) for path in _paths(nodes)])
        out = target.model(input_ids=texts, use_cache=True)
        expected.append(_along(out.logits[:, n:].to(target.device)))
    length = torch.tensor(lengths, device=target.device)
    return Trial(nodes, length, prompts, (), (), torch.stack(expected)), out


def far_trial(target: TargetUnderTest, length: int, shapes: Sequence[LayerShape]) -> Trial:
    """Return one row of `length` committed tokens whose keys and values, of these layers, are random numbers."""
    nodes = _ids(target, 6)
    states = [_random_states(shape, length, layer) for layer, shape in enumerate(shapes)]
    past = DynamicCache()
    for layer, (keys, values) in _stored(shapes, states):
        past.update(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), layer)
    positions = torch.arange(length, length + 4, device=target.device)[None].expand(2, 4)
    out = target.model(
        input_ids=torch.stack(_paths(nodes)), position_ids=positions, past_key_values=past, use_cache=True
    )
    at = torch.tensor([length], device=target.device)
    return Trial(nodes, at, None, shapes, states, _along(out.logits.to(target.device))[None])


def run_trial(target: TargetUnderTest, trial: Trial, cache: KVCache) -> Tensor:
    """Return the logits `[B, 6, V]` of the trial's tree on a cache: prefill, verify, commit, verify.

    Raises:
        UnsupportedError: the model cannot run a tree.
    """
    root, a, b, c, d, e = trial.nodes
    rows, device = len(trial.length), target.device
    tokens = torch.stack([root, a, b, c, d]).expand(rows, 5)
    parents, depth = (torch.tensor(x, device=device).expand(rows, 5) for x in ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2]))
    try:
        if trial.prompts is None:
            _fill(cache, trial)
        else:
            # In several forwards, as a long prompt is read.
            target.prefill(trial.prompts, trial.length, cache, max_tokens=trial.prompts.shape[1])
        logits, _ = target.verify(tree_of(tokens, parents, depth, max_depth=2), trial.length, cache)
        cache.commit(trial.length, torch.tensor([0, 2, 4], device=device).expand(rows, 3))
        after, _ = target.verify(chain(e.expand(rows, 1)), trial.length + 3, cache)
    except WRONG as error:
        raise UnsupportedError(f"{target.name} cannot run a token tree: {first_line(error)}") from error
    return torch.cat([logits, after], dim=1)


def far_lengths(config: Any, context: int | None, shapes: Sequence[LayerShape]) -> list[int]:
    """Return the committed lengths at which far trials are worth running, at most two: behind every such number of the
    config, and just before the end of the context, where memory allows."""
    slot = 3 * sum(shape.heads * (shape.key_dim + shape.value_dim) * 4 for shape in shapes)  # two plain rows, one ours
    longest = FAR_BYTES // slot
    if context is not None:
        longest = min(longest, context - 4)
    borders = [border + 2 for border in _integers(config.to_dict()) if border + 2 <= longest]
    ends = [context - 4] if context is not None and context - 4 == longest else []
    return sorted({max(borders, default=0), *ends} - {0})


def _integers(entries: Mapping[str, Any], inside: bool = False) -> Iterator[int]:
    """Yield the integers of a config whose names, or those of what holds them, are ones of `BORDER`."""
    for name, value in entries.items():
        meant = inside or bool(BORDER.search(str(name)))
        if isinstance(value, Mapping):
            yield from _integers(value, meant)
        elif isinstance(value, int) and not isinstance(value, bool) and meant and value > 0:
            yield value


def _ids(target: TargetUnderTest, count: int) -> Tensor:
    return (torch.arange(count, device=target.device) * 7919 + 11) % target.config.vocab_size


def _paths(nodes: Tensor) -> list[Tensor]:
    """Return the texts that a trial's tree holds: root, a, c, e and root, b, d, e, `[4]` each."""
    root, a, b, c, d, e = nodes
    return [torch.stack([root, a, c, e]), torch.stack([root, b, d, e])]


def _along(logits: Tensor) -> Tensor:
    """Pick `[6, V]` for root, a, b, c, d and e from the two paths' logits `[2, 4, V]`."""
    in_a, in_b = logits
    return torch.stack([in_b[0], in_a[1], in_b[1], in_a[2], in_b[2], in_b[3]])


def _random_states(shape: LayerShape, length: int, layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer, `[1, heads, length, dim]`, the same ones whenever they are asked for."""
    random = torch.Generator().manual_seed(layer)
    keys, values = (
        torch.randn(1, shape.heads, length, dim, generator=random).to(shape.device, shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    return keys, values


def _stored(
    shapes: Sequence[LayerShape], states: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the layers that store something, with their keys and values."""
    return ((layer, state) for layer, state in enumerate(states) if shapes[layer].heads)


def _fill(cache: KVCache, trial: Trial) -> None:
    """Put a far trial's keys and values into the first slots of its only row."""
    count = int(trial.length[0])
    if isinstance(cache, DenseCache):
        cache.write_after(torch.zeros_like(trial.length), count)
        for layer, (keys, values) in _stored(trial.shapes, trial.states):
            cache.update(keys, values, layer)
        return
    slots = cache.slots(torch.arange(count, device=trial.length.device)[None])
    for layer, (keys, values) in _stored(trial.shapes, trial.states):
        home = cache.pool.layer_pools[layer]
        assert home is not None, "a layer that stores something has a home"
        keys_pool, k, values_pool, v = home
        keys_pool[k].index_copy_(0, slots, keys[0].transpose(0, 1))
        values_pool[v].index_copy_(0, slots, values[0].transpose(0, 1))
