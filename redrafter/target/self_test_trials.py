"""The trials of the self-test: small token trees, and what plain forwards give along their paths.

A *near* trial has two rows of a few tokens, which the model reads itself. A *far* trial has one row whose committed
keys and values are random numbers, as many as it takes to cross the numbers of the config that change what a position
sees: windows, chunks, scales, the end of the context. Only a few tokens of it are computed, so it takes little time.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer

from redrafter.cache.dense import LayerShape
from redrafter.cache.paged import KVCache, fill_first_slots
from redrafter.errors import UnsupportedError, first_line
from redrafter.target.forward_batch import ForwardBatch, ForwardOutput, Prompts
from redrafter.target.mixer_probe import cache_argument
from redrafter.tree.accept import Path
from redrafter.tree.token_tree import chain, tree_of

__all__ = ["MODEL_ERRORS", "TargetUnderTest", "Trial", "far_lengths", "far_trial", "near_trial", "run_trial"]

TRIAL_SLOTS = 8  # slots that a trial needs behind a row's committed tokens
MAX_FAR_BYTES = 1 << 30  # of keys and values in one far trial; longer trials are left out
# Names of config entries whose numbers change what a position sees.
POSITION_LIMITS = re.compile("window|chunk|original_max|floor|local|keep|block|stride|span|topk")
# What a model's code may raise where it cannot run a trial.
MODEL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)


class TargetUnderTest(Protocol):
    """The attributes and methods of a target that the self-test uses."""

    name: str
    model: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    context: int | None

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a tree through the model; see `Target.verify`."""

    def prefill(self, prompts: Prompts, *, max_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Read prompts into a cache; see `Target.prefill`."""


@dataclass(frozen=True)
class Trial:
    """A small tree behind the committed tokens of B rows, and what plain forwards give along its paths.

    Attributes:
        nodes: Ids of the root; of a and b below it, c below a, d below b; of e, which follows the path root, b, d;
            `[6]` int64.
        length: Committed tokens of each row, `[B]` int64.
        prompts: Those tokens, `[B, P]` int64, right-padded; None where their keys and values are random numbers.
        shapes: What each layer stores in a trial with random keys and values; else empty.
        states: Those keys and values per layer, `[1, heads, P, dim]` each, and behind them the keys of an indexer, `[1,
            P, dim]`, of a layer that has one; else empty.
        expected: Plain logits at root, a, b, c, d and e, `[B, 6, V]`.
    """

    nodes: Tensor
    length: Tensor
    prompts: Tensor | None
    shapes: Sequence[LayerShape]
    states: Sequence[tuple[Tensor, ...]]
    expected: Tensor

    @property
    def slots(self) -> int:
        """Slots that a row needs."""
        return int(self.length.max()) + TRIAL_SLOTS


def near_trial(target: TargetUnderTest, longest: int, *, decoded: bool = False) -> tuple[Trial, Any]:
    """Make a test case of a small token tree behind two short prompts, with the logits that the tree must give.

    The logits come from plain forwards: for each prompt, the model reads the prompt with each of the tree's two paths
    behind it. They are what the self-test compares the target's tree forwards with.

    Args:
        target: The target under test.
        longest: Tokens of the first prompt; the second one has two fewer.
        decoded: Let the model read the paths token by token, as in plain decoding. Some mixers compute slightly other
            numbers so than at once.

    Returns:
        The test case, and the output of the plain forward of the second prompt, with the model's own cache.
    """
    ids = _ids(target, 2 * longest + 6)
    prompts, nodes = ids[: 2 * longest].view(2, longest), ids[2 * longest :]
    expected, lengths = [], [longest, longest - 2]
    for row, n in enumerate(lengths):
        paths = torch.stack(_paths(nodes))
        if decoded:
            logits, out = _decoded(target.model, prompts[row, :n].expand(2, n), paths)
        else:
            text = torch.cat([prompts[row, :n].expand(2, n), paths], dim=1)
            out = target.model(input_ids=text, use_cache=True, **_positions(target.model, text))
            logits = out.logits[:, n:]
        expected.append(_at_nodes(logits.to(target.device)))
    length = torch.tensor(lengths, device=target.device)
    return Trial(nodes, length, prompts, (), (), torch.stack(expected)), out


def _decoded(model: Any, prompts: Tensor, paths: Tensor) -> tuple[Tensor, Any]:
    """Return the logits along paths `[B, T]` that are read token by token after prompts, and the last output."""
    argument = cache_argument(model)
    assert argument is not None, "a model with states takes a cache"
    out, logits = model(input_ids=prompts, use_cache=True, **_positions(model, prompts)), []
    for offset, token in enumerate(paths.unbind(1)):
        given = {argument: out[argument]} | _positions(model, token[:, None], prompts.shape[1] + offset)
        out = model(input_ids=token[:, None], use_cache=True, **given)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), out


def _positions(model: Any, ids: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Return the argument in which `model.generate` gives a model the positions of tokens; nothing where it has none.

    A model that is not given them may count from elsewhere, as RoBERTa does.

    Args:
        model: The causal LM.
        ids: Tokens, `[B, T]` int64.
        first: Position of the first ones.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).expand(ids.shape)
    try:
        prepared = model.prepare_inputs_for_generation(ids, position_ids=positions, is_first_iteration=first == 0)
    except MODEL_ERRORS:  # code of the checkpoint's may ask for more; tokens that follow others need positions anyway
        prepared = {"position_ids": positions} if first else {}
    return {name: value for name, value in prepared.items() if name == "position_ids" and value is not None}


def far_trial(target: TargetUnderTest, length: int, shapes: Sequence[LayerShape]) -> Trial:
    """Make a trial of one row of `length` committed tokens, whose keys and values are random numbers.

    Args:
        target: What is being bound.
        length: Committed tokens.
        shapes: What each layer of the model stores.
    """
    nodes = _ids(target, 6)
    states = [_random_states(shape, length, layer) for layer, shape in enumerate(shapes)]
    past = DynamicCache()
    past.layers.extend(DynamicIndexedLayer() if shape.index_dim else DynamicLayer() for shape in shapes)
    _write(past, shapes, [[x.expand(2, *x.shape[1:]) for x in state] for state in states])
    positions = torch.arange(length, length + 4, device=target.device)[None].expand(2, 4)
    out = target.model(
        input_ids=torch.stack(_paths(nodes)), position_ids=positions, past_key_values=past, use_cache=True
    )
    lengths = torch.tensor([length], device=target.device)
    return Trial(nodes, lengths, None, shapes, states, _at_nodes(out.logits.to(target.device))[None])


def run_trial(target: TargetUnderTest, trial: Trial, cache: KVCache, *, whole: bool = False) -> Tensor:
    """Return the logits `[B, 6, V]` of a trial's tree on an empty cache: prefill, verify, commit, verify.

    Args:
        target: What is being bound.
        trial: The trial.
        cache: The cache.
        whole: Read prompts in one forward, and not in several as long ones are read.

    Raises:
        UnsupportedError: The model cannot run a tree.
    """
    root, a, b, c, d, e = trial.nodes
    rows, device = len(trial.length), target.device
    tokens = torch.stack([root, a, b, c, d]).expand(rows, 5)
    parents, depth = (torch.tensor(x, device=device).expand(rows, 5) for x in ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2]))
    try:
        if trial.prompts is None:
            fill_first_slots(cache, _stored(trial.shapes, trial.states))
        else:
            most = None if whole else trial.prompts.shape[1] - trial.prompts.shape[1] // 5
            target.prefill(Prompts(trial.prompts, trial.length, cache), max_tokens=most)
        tree = tree_of(tokens, parents, depth, max_depth=2)
        logits = target.verify(ForwardBatch(tree, trial.length, cache)).logits
        path = Path(torch.tensor([0, 2, 4], device=device).expand(rows, 3), torch.full_like(trial.length, 2))
        cache.commit(trial.length, path.nodes)
        cache.commit_states(trial.length, path, torch.ones_like(trial.length, dtype=torch.bool))
        after = target.verify(ForwardBatch(chain(e.expand(rows, 1)), trial.length + 3, cache)).logits
    except MODEL_ERRORS as error:
        raise UnsupportedError(f"{target.name} cannot run a token tree: {first_line(error)}") from error
    return torch.cat([logits, after], dim=1)


def far_lengths(config: Any, context: int | None, shapes: Sequence[LayerShape]) -> list[int]:
    """Return the lengths of committed tokens at which to run far trials, at most two, as far as memory allows.

    One is behind every number of the config that limits what a position sees; one is just before the end of the
    context.

    Args:
        config: Config of the model's decoder.
        context: Positions that the model can tell apart; None for no limit.
        shapes: What each layer stores.
    """
    # Of two plain rows, and of one of ours.
    slot_bytes = 3 * sum(shape.heads * (shape.key_dim + shape.value_dim) * 4 for shape in shapes)
    if not slot_bytes:
        return []  # no layer looks back
    longest = MAX_FAR_BYTES // slot_bytes
    if context is not None:
        longest = min(longest, context - 4)
    past_limits = [limit + 2 for limit in _position_limits(config.to_dict()) if limit + 2 <= longest]
    ends = [context - 4] if context is not None and context - 4 == longest else []
    return sorted({max(past_limits, default=0), *ends} - {0})


def _position_limits(entries: Mapping[str, Any], inside: bool = False) -> Iterator[int]:
    """Yield the positive integers of a config whose name, or that of an entry around them, is in `POSITION_LIMITS`."""
    for name, value in entries.items():
        matches = inside or bool(POSITION_LIMITS.search(str(name)))
        if isinstance(value, Mapping):
            yield from _position_limits(value, matches)
        elif isinstance(value, int) and not isinstance(value, bool) and matches and value > 0:
            yield value


def _ids(target: TargetUnderTest, count: int) -> Tensor:
    return (torch.arange(count, device=target.device) * 7919 + 11) % target.config.vocab_size


def _paths(nodes: Tensor) -> list[Tensor]:
    """Return the two texts that a trial's tree holds: root, a, c, e and root, b, d, e, `[4]` each."""
    root, a, b, c, d, e = nodes
    return [torch.stack([root, a, c, e]), torch.stack([root, b, d, e])]


def _at_nodes(logits: Tensor) -> Tensor:
    """Pick the logits at root, a, b, c, d and e, `[6, V]`, from those along the two paths, `[2, 4, V]`."""
    in_a, in_b = logits
    return torch.stack([in_b[0], in_a[1], in_b[1], in_a[2], in_b[2], in_b[3]])


def _random_states(shape: LayerShape, length: int, layer: int) -> tuple[Tensor, ...]:
    """Return random keys and values of a layer, as in `Trial.states`, the same in every call."""
    random = torch.Generator().manual_seed(layer)
    sizes = [(1, shape.heads, length, shape.key_dim), (1, shape.heads, length, shape.value_dim)]
    if shape.index_dim:
        sizes.append((1, length, shape.index_dim))  # type: ignore[arg-type]
    return tuple(torch.randn(size, generator=random).to(shape.device, shape.dtype) for size in sizes)


def _stored(shapes: Sequence[LayerShape], states: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield the layers that store something, with their keys and values."""
    return ((layer, state) for layer, state in enumerate(states) if shapes[layer].heads)


def _write(cache: Cache, shapes: Sequence[LayerShape], states: Sequence[Sequence[Tensor]]) -> None:
    """Hand the states of all layers to a cache of transformers' kind, as a model does."""
    for layer, (keys, values, *index_keys) in _stored(shapes, states):
        cache.update(keys, values, layer)
        if index_keys:
            cache.update_indexer(index_keys[0], layer)
