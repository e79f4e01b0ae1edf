"""Random trees with the draws that a target made at their nodes: the arguments of `accept_drafts`."""

from dataclasses import replace
from typing import Any

import torch

from redrafter.tree.token_tree import Tree, tree_of


def random_outcome(rows: int, nodes: int, *, shared: bool, limited: bool) -> dict[str, Any]:
    """Return trees of which many drafts were drawn, on the CPU.

    With `shared`, rows share nodes; else the last two nodes are copies.
    With `limited`, rows keep a number of levels at most.
    """
    generator = torch.Generator().manual_seed(nodes)
    some = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    parents, depth = torch.zeros(2, rows, nodes, dtype=torch.long)
    tokens = torch.arange(rows * nodes).view(rows, nodes) + 7
    drawn = some(0, 7, rows, nodes)
    for node in range(1, nodes):
        parents[:, node] = some((node - 1) // 2, node, rows)
        above = parents[:, node, None]
        depth[:, node] = depth.gather(1, above)[:, 0] + 1
        drawn.scatter_(1, above, tokens[:, node, None].where(some(0, 4, rows, 1) > 0, drawn.gather(1, above)))
    tree = tree_of(tokens, parents, depth, int(depth.max()))
    if shared:
        counts = some(max(nodes // 2, 1), nodes + 1, rows)
        tree = replace(tree, counts=counts, total=int(counts.sum()))
    else:
        tree = replace(tree, grafted=min(2, nodes - 1))
    length = some(0, 9, rows)
    return {
        "tree": tree,
        "drawn": drawn,
        "finite": (some(0, 9, rows, nodes) > 0).long(),
        "texts": some(0, 7, rows, 20 + nodes),
        "length": length,
        "active": some(0, 3, rows) > 0,
        "max_depth": tree.levels + (nodes > 1),
        "limits": some(0, tree.levels + 1, rows) if limited else None,
    }


def on_device(tree: Tree, device: str) -> Tree:
    """Return a tree on another device."""
    return replace(tree, **{name: x.to(device) for name, x in vars(tree).items() if isinstance(x, torch.Tensor)})


def random_scores(tree: Tree) -> torch.Tensor:
    """Return scores of a tree's nodes, lower the deeper they are."""
    return (
        -0.2 * tree.depth * torch.rand(tree.depth.shape, generator=torch.Generator().manual_seed(tree.depth.shape[1]))
    )
