"""Arguments for the operators of attention over a paged cache."""

import torch
from torch.nn.functional import pad

from redrafter.attention.tree_attention import tree_attention
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes, round_trip, to_format
from redrafter.kernels.token_counts import TOKENS_PER_CHUNK
from redrafter.tree.token_tree import chain, tree_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(
    lengths,
    nodes,
    *,
    new=None,
    heads=2,
    group=2,
    dk=16,
    dv=16,
    dtype=torch.float32,
    causal=False,
    padding=0,
    layers=2,
    held=None,
    chunks=(),
    room=0,
    kv_dtype=None,
):
    """Make arguments of the operator, on shuffled blocks, with random trees.

    Args:
        lengths: Committed tokens of each row.
        nodes: Nodes of each tree.
        new: Nodes to be computed; the others are in the cache already. None for all.
        heads: Key heads.
        group: Query heads that share a key head.
        dk: Width of a key.
        dv: Width of a value.
        dtype: Dtype of queries, keys and values.
        causal: Whether the trees are chains.
        padding: Queries past those of the batch.
        layers: Layers of a pool.
        held: Nodes that each row of a ragged tree has; None for all.
        chunks: Of each chunk of a prompt, the tokens that the cache holds already and those of the chunk.
        room: Chunks that there is room for; those past `chunks` are empty.
        kv_dtype: Dtype of the pools; None for that of the keys.
    """
    new = nodes if new is None else new
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + nodes)
    rows, longest = len(lengths), max(max(lengths) + nodes, *(0, *map(sum, chunks)))
    blocks = longest // BLOCK_SIZE + 2
    order = torch.randperm((rows + room) * blocks, generator=generator) + 1
    tables = order.view(rows + room, blocks).int()
    starts = torch.tensor([0, *(held or [new] * rows)]).cumsum(0)
    chunk_starts = (
        torch.tensor([0, *(count for _, count in chunks), *[0] * (room - len(chunks))]).cumsum(0) + starts[-1]
    )
    count = int(starts[-1]) + max(room * TOKENS_PER_CHUNK, sum(count for _, count in chunks)) + padding
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)  # noqa: E731
    keys, values = (random(layers, ((rows + room) * blocks + 1) * BLOCK_SIZE, heads, d) for d in (dk, dv))
    query, key, value = random(count, heads * group, dk), random(count, heads, dk), random(count, heads, dv)
    if kv_dtype is not None:
        keys, values = to_format(keys, kv_dtype), to_format(values, kv_dtype)
        if DEVICE == "cpu":  # the interpreter rounds up to a power of two wrongly; these are rounded down
            key, value = (round_trip(x, kv_dtype) * 1.01 for x in (key, value))
    tokens = torch.zeros(rows, nodes, dtype=torch.long)
    if causal:
        tree = chain(tokens)
    else:
        parents = torch.zeros(rows, nodes, dtype=torch.long)
        depth = torch.zeros(rows, nodes, dtype=torch.long)
        for node in range(1, nodes):
            parents[:, node] = torch.randint(0, node, (rows,), generator=generator)
            depth[:, node] = depth.gather(1, parents[:, node, None])[:, 0] + 1
        tree = tree_of(tokens, parents, depth, max_depth=nodes)
    flat = lambda x: torch.cat([x.flatten(), x.new_zeros(1)]).to(DEVICE)  # noqa: E731
    return [
        query,
        key,
        value,
        keys,
        1,
        values,
        0,
        flat(torch.tensor(lengths)),
        starts.to(DEVICE),
        flat(tree.depth),
        flat(tree.last_level(new).ancestors),
        flat(tables[:rows]),
        torch.cat([chunk_starts, torch.tensor([count])]).to(DEVICE),
        pad(torch.tensor([cached for cached, _ in chunks], dtype=torch.long), (0, room - len(chunks) + 2)).to(DEVICE),
        flat(torch.cat([tables[rows:], torch.zeros_like(tables[:1])])),
    ]


def on_cpu(arguments):
    """Copy arguments to the CPU, where the operator runs its slow reference."""
    return [x.cpu().clone() if isinstance(x, torch.Tensor) else x for x in arguments]


def check_attention(kernel, arguments, *, scale=0.3, window=0, softcap=0.0, sinks=None, chunk_size=0, tolerance=2e-5):
    """Fail unless a kernel and the reference of tree attention write the same cache and return the same."""
    other = on_cpu(arguments)
    expected = tree_attention(*other, scale, window, softcap, None if sinks is None else sinks.cpu(), chunk_size)
    chunked = (chunk_size,) if chunk_size else ()
    found = kernel(*arguments, scale, window, softcap, sinks, *chunked).cpu()
    for pool in (3, 5):
        # Block 0 is left out: nobody reads it.
        found_pool, expected_pool = (as_bytes(x[pool])[:, BLOCK_SIZE:].cpu() for x in (arguments, other))
        assert torch.equal(found_pool, expected_pool)
    if len(arguments[12]) > 2:  # beside chunks, padding comes out as any finite numbers
        assert found.isfinite().all()
        end = int(arguments[12][-2])
        found, expected = found[:end], expected[:end]
    worst = (found - expected).abs().max()
    assert torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance), worst
