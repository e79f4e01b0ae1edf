"""Operators for code on tensors, in addition to Cosmic Ray's: calls, arguments, indices and statements left out."""

from collections.abc import Iterator, Sequence

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Name
from parso.tree import NodeOrLeaf

Position = tuple[tuple[int, int], tuple[int, int]]
OBJECTS = {"self", "cls", "torch", "kernels", "math", "super"}  # to call their functions is no change of a value


def parts_of(node: NodeOrLeaf) -> list[NodeOrLeaf]:
    """Return a name and all attributes, indices and calls that follow it; nothing for another node."""
    parts = node.children if node.type in ("atom_expr", "power") else []
    return parts if parts and all(part.type == "trailer" for part in parts[1:]) else []


class Replacement(Operator):
    """An operator that replaces the source of a node by other source, for each of some places in it."""

    def sources(self, node: NodeOrLeaf) -> Iterator[str]:
        """Yield what may stand in place of a node."""
        raise NotImplementedError

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        for _ in self.sources(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        # One leaf with the new source is enough, as nothing looks into a tree after its mutation.
        return Name(list(self.sources(node))[index], node.start_pos, prefix=node.get_first_leaf().prefix)


class RemoveCall(Replacement):
    """Leaves out the call of a method, such as a clamp."""

    def sources(self, node: NodeOrLeaf) -> Iterator[str]:
        parts = parts_of(node)
        for at in range(1, len(parts) - 1):
            attribute, call = (part.children[0].value for part in parts[at : at + 2])
            base = "".join(part.get_code(include_prefix=False) for part in parts[:at])
            if (attribute, call) == (".", "(") and base not in OBJECTS:
                yield base + "".join(part.get_code() for part in parts[at + 2 :])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("y = x.clamp(min=0).sum()", "y = x.sum()"), Example("x.a(1).b()", "x.a(1)", occurrence=1))


class SwapArguments(Replacement):
    """Swaps the last two of three arguments, as of `torch.where`."""

    def sources(self, node: NodeOrLeaf) -> Iterator[str]:
        parts = parts_of(node)
        codes = [part.get_code(include_prefix=at > 0) for at, part in enumerate(parts)]
        for at, part in enumerate(parts[1:], start=1):
            if part.children[0].value != "(" or part.children[1].type != "arglist":
                continue
            given = part.children[1].children[::2]
            if len(given) == 3 and all(each.type not in ("argument", "operator") for each in given):
                first, second, third = (each.get_code().strip() for each in given)
                yield "".join([*codes[:at], f"({first}, {third}, {second})", *codes[at + 1 :]])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("torch.where(a, b[0], c).sum()", "torch.where(a, c, b[0]).sum()"),)


class ReplaceByIndex(Replacement):
    """Replaces an element by its last index: a node by its depth, say."""

    def sources(self, node: NodeOrLeaf) -> Iterator[str]:
        parts = parts_of(node)
        if len(parts) < 2 or parts[-1].children[0].value != "[" or parts[0].get_code().strip() in OBJECTS:
            return
        index = parts[-1].children[1]
        if index.type in ("subscriptlist", "testlist_comp"):
            index = index.children[-1]
        if index.type not in ("subscript", "string", "operator") and not parts[0].get_code().strip()[:1].isupper():
            yield f"({index.get_code().strip()})"

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("x = nodes[row, at - 1]", "x = (at - 1)"),)


class RemoveStatement(Replacement):
    """Leaves out a call whose result is not used, or an assignment to an attribute, an element or a known name."""

    def sources(self, node: NodeOrLeaf) -> Iterator[str]:
        if node.type != "simple_stmt" or node.parent is None or node.parent.type == "file_input":
            return
        what = node.children[0]
        calls = bool(parts_of(what)) and what.children[-1].children[0].value == "("
        target = what.children[0] if what.type == "expr_stmt" else None
        augmented = target is not None and what.children[1].type == "operator" and what.children[1].value != "="
        if (
            calls
            or augmented
            or (target is not None and bool(parts_of(target)) and what.children[1].type == "operator")
        ):
            yield "pass\n"

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("def f(x):\n    x.add_(1)\n", "def f(x):\n    pass\n"),
            Example("def f(x):\n    x[0] = 1\n    y = 2\n", "def f(x):\n    pass\n    y = 2\n"),
            Example("def f(x):\n    x += 1\n", "def f(x):\n    pass\n"),
        )


OPERATORS: dict[str, type[Operator]] = {
    each.__name__: each for each in (RemoveCall, SwapArguments, ReplaceByIndex, RemoveStatement)
}
