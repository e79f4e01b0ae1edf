"""Compilation of a model layer by layer: layers that differ only in their weights are compiled once.

torch.compile inlines all layers into one graph, and compiles each separately. But attention and mixers are opaque
operators, which the compiler fuses with nothing, so a graph that is cut at each of them loses no fusion: each piece
between two of them is the end of one layer and the beginning of the next, which is the same computation for nearly all
layers, with other weights. Dynamo passes the weights as inputs of the graph.
"""

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

Compiled: TypeAlias = Callable[..., Any]


class LayerCompiler:
    """A backend for torch.compile that cuts graphs into pieces, and compiles equal pieces once."""

    def __init__(
        self,
        cuts: Collection[str],
        compile: Callable[[fx.GraphModule, list[object]], Compiled],
        extend: Callable[[fx.GraphModule, Sequence[str]], object] | None = None,
    ):
        """Make a backend.

        Args:
            cuts: Names of the operators at which graphs are cut, such as "redrafter::tree_attention".
            compile: The backend for pieces, whose outputs are tuples.
            extend: Is called with the graph of calls of pieces and the names of those that are operators alone, before
                the others are compiled, and may add calls of them.
        """
        self._cuts, self._compile, self._extend = frozenset(cuts), compile, extend

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> Compiled:
        """Return the compiled function of a graph that Dynamo has traced."""
        number = 0
        numbers = dict[fx.Node, int]()  # odd for operators that are cut out
        for node in graph.graph.nodes:
            is_cut = self._is_cut(node)
            number += is_cut
            numbers[node] = number
            number += is_cut
        whole = split_module(graph, graph, numbers.__getitem__, keep_original_order=True)
        known = dict[object, Compiled]()
        pieces = dict[str, Any](whole.named_children())
        alone = [name for name, piece in pieces.items() if any(map(self._is_cut, piece.graph.nodes))]
        if self._extend is not None:
            self._extend(whole, alone)
        for name, piece in pieces.items():
            if name in alone:
                continue  # has nothing to compile, and is called as it is
            structure = structure_of(piece)
            if structure not in known:
                known[structure] = self._compile_piece(piece)
            delattr(whole, name)
            setattr(whole, name, known[structure])
        forward: Compiled = whole.forward
        return forward

    def _is_cut(self, node: fx.Node) -> bool:
        return isinstance(node.target, OpOverload) and node.target.name() in self._cuts

    def _compile_piece(self, piece: fx.GraphModule) -> Compiled:
        (output,) = piece.graph.find_nodes(op="output")
        several = isinstance(output.args[0], tuple)
        if not several:  # compilers require a tuple
            output.args = (output.args,)
            piece.recompile()
        compiled = self._compile(piece, [x.meta["example_value"] for x in piece.graph.find_nodes(op="placeholder")])
        return compiled if several else lambda *inputs: compiled(*inputs)[0]


def structure_of(piece: fx.GraphModule) -> tuple[object, ...]:
    """Return a key that two pieces share if and only if they compute the same of inputs of the same kinds."""
    names = {node: f"%{index}" for index, node in enumerate(piece.graph.nodes)}

    def described(node: fx.Node) -> tuple[object, ...]:
        target: object = node.target
        if node.op == "placeholder":
            target = _kind(node.meta["example_value"])
        elif node.op == "get_attr":  # a constant tensor, or the body of a branch
            target = id(attrgetter(str(target))(piece))
        return node.op, target, repr(map_arg((node.args, node.kwargs), names.__getitem__))

    return tuple(map(described, piece.graph.nodes))


def _kind(x: object) -> object:
    """Return the properties of an input that a compiled piece is specialised for."""
    if not isinstance(x, Tensor):
        return str(x)  # a symbolic number
    # Dynamic sizes are symbols; as objects, they would hash like the numbers that they were traced with.
    sizes = str((x.shape, x.stride(), x.storage_offset()))
    return type(x), x.dtype, x.device, x.requires_grad, sizes
