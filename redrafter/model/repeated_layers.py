"""Decoder layers that differ in their weights alone, of which a compiler traces three.

Tracing takes most of the time of a compilation, and grows with the layers; what is traced of the third layer is what
would be of each later one. So a forward is traced over the first three layers, and its graph is continued with copies
of the third one's part, which read the weights of later layers.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from transformers import PreTrainedModel

from redrafter.attention.tree_plan import RUNNING_PLAN
from redrafter.model.forward_batch import decoder_stack
from redrafter.model.layer_compiler import structure_of
from redrafter.model.patch import ModelPatch

TRACED = 3
# Compiled and uncompiled forwards round differently in bfloat16; a wrong weight changes the hidden states altogether.
TOLERANCE = 0.1


class RepeatedLayers:
    """The layers of a model.

    Attributes:
        checked: Whether all that was compiled has been compared with the uncompiled forward.
        refused: Whether a graph could not be continued, so that the compiled code has too few layers.
    """

    def __init__(self, parent: nn.Module, name: str, layers: nn.ModuleList):
        """Refer to the layers that are the child of that name of a module."""
        self._parent, self._name, self._layers = parent, name, layers
        self._first = nn.ModuleList(list(layers)[:TRACED])
        self.checked = self.refused = False

    @classmethod
    def find(cls, model: PreTrainedModel, config: Any) -> "RepeatedLayers | None":
        """Return the layers of a model, or None if they are few, or differ in more than weights."""
        count = getattr(config, "num_hidden_layers", 0)
        layers = decoder_stack(model, count)
        if layers is None or count <= TRACED:
            return None
        kinds = (kind for kind in vars(config).values() if isinstance(kind, list | tuple) and len(kind) == count)
        if any(each != kind[0] for kind in kinds for each in kind):
            return None
        if not all(alike(layers[0], layer, (0, index), set()) for index, layer in enumerate(layers)):
            return None
        places = ((x, name) for x in model.modules() for name, child in x.named_children() if child is layers)
        return next((cls(parent, name, layers) for parent, name in places), None)

    def add_to(self, patch: ModelPatch) -> None:
        """Leave only the layers that are traced in the model."""
        patch.put(self._parent._modules, self._name, self._first)

    def agrees(self, hidden: Tensor, expected: Tensor) -> bool:
        """Return whether compiled hidden states are those of the uncompiled forward, up to rounding."""
        self.checked = True
        error = (hidden.float() - expected.float()).norm()
        return not self.refused and bool(error <= TOLERANCE * expected.float().norm())

    def extend(self, whole: fx.GraphModule, cuts: Sequence[str]) -> None:
        """Continue a graph of calls of pieces with the layers that were left out of the model, if some were.

        Args:
            whole: The graph, whose calls of attention are modules of their own.
            cuts: The names of these modules.
        """
        if self._parent._modules[self._name] is not self._first:
            return
        self.checked = False
        try:
            _Extension(self, whole, cuts).extend()
        except (_UnlikeError, AttributeError, KeyError, IndexError):
            self.refused = True

    def place_of(self, node: fx.Node) -> tuple[int, str] | None:
        """Return the layer of a weight that a graph is called with, and its expression there; None for other inputs."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if node.op != "placeholder" or source is None:
            return None
        written = source.name() if callable(source.name) else source.name
        found = re.search(rf"\['{re.escape(self._name)}'\]\._modules\['(\d+)'\](.*)$", written)
        if found is None or self.weight(int(found[1]), found[2]) is not node.meta["grapharg"].example:
            return None
        return int(found[1]), found[2]

    def weight(self, layer: int, expression: str) -> Any:
        """Return the weight that an expression of a compiler refers to in a layer."""
        return eval(f"layer{expression}", {"layer": self._layers[layer]})

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self._layers)


class _UnlikeError(Exception):
    """Raised where a traced layer is not what its predecessor is."""


class _Extension:
    """The work of `RepeatedLayers.extend`."""

    def __init__(self, layers: RepeatedLayers, whole: fx.GraphModule, cuts: Sequence[str]):
        self._layers, self._whole, self._cuts = layers, whole, cuts
        nodes = list(whole.graph.nodes)
        ends = [index for index, node in enumerate(nodes) if node.op == "call_module" and node.target in cuts]
        _require(len(ends) == TRACED)
        self._before, self._last = (nodes[first + 1 : end + 1] for first, end in pairwise(ends))
        self._rest = nodes[ends[-1] + 1 :]
        self._weights = list[Any]()

    def extend(self) -> None:
        self._check()
        whole: Any = self._whole
        graph = self._whole.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            weights = graph.create_node("call_module", "later_weights")
        made, last = list[fx.Node](), self._last
        with graph.inserting_before(self._rest[0]):
            for layer in range(TRACED, self._layers.count):
                new = dict[fx.Node, fx.Node](zip(self._before, made or self._last, strict=True))
                made = []
                for node in last:
                    made.append(self._copy(node, layer, new, weights))
                    new[node] = made[-1]
            ends = dict[fx.Node, fx.Node](zip(last, made, strict=True))
            for node in self._rest:
                node.args = map_arg(
                    node.args, lambda x: self._other(x, self._layers.count - 1, TRACED - 1, ends, weights)
                )
        later = self._weights
        whole.later_weights = lambda: [weight() for weight in later]
        whole.recompile()

    def _check(self) -> None:
        """Check that the last traced layer is what the one before is."""
        _require(len(self._before) == len(self._last))
        same = dict(zip(self._last, self._before, strict=True))
        for old, new in zip(self._before, self._last, strict=True):
            _require((old.op, len(old.args), old.kwargs, new.kwargs) == (new.op, len(new.args), {}, {}))
            _require(new.op == "call_module" or (new.op == "call_function" and old.target is new.target))
            for a, b in zip(old.args, new.args, strict=True):
                if not isinstance(b, fx.Node):
                    _require(a == b)
                elif b in same:
                    _require(a is same[b])
                elif b in self._before:
                    _require(isinstance(a, fx.Node) and a.op != "placeholder" and a not in self._before)
                elif (place := self._layers.place_of(b)) is not None:
                    _require(isinstance(a, fx.Node) and self._layers.place_of(a) == (place[0] - 1, place[1]))
                else:
                    _require(a is b)
            if new.op == "call_module" and new.target not in self._cuts:
                _require(len({structure_of(getattr(self._whole, str(node.target))) for node in (old, new)}) == 1)
        for layer, name in enumerate(self._cuts):
            _require(_numbers(_operator_in(getattr(self._whole, name))) == _numbers_of(layer))
        for node in self._rest:
            for x in node.all_input_nodes:
                place = self._layers.place_of(x)
                _require(x not in self._before and (place is None or place[0] == TRACED - 1))

    def _copy(self, node: fx.Node, layer: int, new: Mapping[fx.Node, fx.Node], weights: fx.Node) -> fx.Node:
        """Return what a node of the last traced layer is in a later one."""
        target = node.target
        if target in self._cuts:
            part = copy.deepcopy(getattr(self._whole, str(target)))
            target = f"{target}_of_{layer}"
            operator, numbers = _operator_in(part), _numbers_of(layer)
            names = [argument.name for argument in operator.target._schema.arguments]  # type: ignore[union-attr]
            operator.args = tuple(numbers.get(name, x) for name, x in zip(names, operator.args, strict=False))
            part.recompile()
            self._whole.add_module(target, part)
        args = map_arg(node.args, lambda x: self._other(x, layer, TRACED - 1, new, weights))
        return self._whole.graph.create_node(node.op, target, args, dict(node.kwargs))

    def _other(self, x: fx.Node, layer: int, traced: int, new: Mapping[fx.Node, fx.Node], weights: fx.Node) -> fx.Node:
        """Return what an input of the traced layer is in another one."""
        if x in new:
            return new[x]
        place = self._layers.place_of(x)
        if place is None:
            return x
        self._weights.append(ref(self._layers.weight(layer + place[0] - traced, place[1])))
        return self._whole.graph.call_function(_item, (weights, len(self._weights) - 1))


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _require(fact: bool) -> None:
    if not fact:
        raise _UnlikeError


def _operator_in(part: Any) -> fx.Node:
    """Return the call of attention in its module."""
    return next(node for node in part.graph.nodes if node.op == "call_function" and hasattr(node.target, "_schema"))


def _numbers(operator: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in operator.target._schema.arguments]  # type: ignore[union-attr]
    arguments = dict(zip(names, operator.args, strict=False))
    return {name: arguments[name] for name in _numbers_of(0)}


def _numbers_of(layer: int) -> dict[str, int]:
    """Return the arguments of attention that are numbers and differ from layer to layer."""
    plan = RUNNING_PLAN.get()
    pool, keys, other, values = plan.pools[layer]
    first = plan.pools[0]
    _require(pool is first[0] and other is first[2])
    chunk_size = plan.chunk_sizes[layer] if plan.chunk_sizes else 0
    return {"key_layer": keys, "value_layer": values, "window": plan.windows[layer], "chunk_size": chunk_size}


def alike(a: object, b: object, numbers: tuple[int, int], seen: set[tuple[int, int]]) -> bool:
    """Return whether two parts of layers with these numbers differ only in the values of tensors of the same kind."""
    if a is b or (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        kinds = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.storage_offset()) for x in (a, b)]
        return kinds[0] == kinds[1]
    if isinstance(a, bool | float | str | bytes | set | torch.dtype | torch.device):
        return a == b
    if isinstance(a, int):
        return a == b or (a, b) == numbers
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__ and alike(a.__self__, b.__self__, numbers, seen)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(alike(x, b[key], numbers, seen) for key, x in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(alike(x, y, numbers, seen) for x, y in zip(a, b, strict=True))
    return isinstance(a, nn.Module) and alike(vars(a), vars(b), numbers, seen)
