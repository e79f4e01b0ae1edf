"""Inputs of attention over a paged cache, and the comparison of what computes it with its reference."""

import itertools
from dataclasses import fields, replace

import torch
from einops import repeat
from torch import Tensor
from torch.nn.functional import pad

from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK, AttentionInputs, TokenRows
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes, read_slots, round_trip, to_format, write_slots
from redrafter.tree.token_tree import chain, tree_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter cannot multiply bfloat16
LAYERS = {"keys": 1, "values": 0}  # of two in each pool


def tree_attention_reference(inputs: AttentionInputs) -> Tensor:
    """Store the new keys and values in the cache, and attend to the committed ones and to each node's ancestors.

    This is the slow reference. The output of padding is 0, or arbitrary finite numbers if there are chunks.
    """
    (_, nodes, new, _), query, rows = inputs.rows.sizes, inputs.query, inputs.rows
    length, depth, ancestors, table = rows.by_row()
    out = inputs.new_output().zero_()
    read = [round_trip(x, store.dtype) for store, x in inputs.sides()]  # rounded as later forwards will read them

    def attend(tokens: slice, blocks: Tensor, n: int, depth: Tensor, seen: Tensor) -> None:
        """Attend with the new nodes of one row, of nodes at these depths. seen: ancestors of the new ones."""
        before = torch.arange(n + len(depth), device=query.device)  # slots counted along the row
        inside = before // BLOCK_SIZE < len(blocks)
        slots = blocks[(before // BLOCK_SIZE).clamp(max=len(blocks) - 1)].where(inside, 0).long() * BLOCK_SIZE
        slots = slots + before % BLOCK_SIZE
        count = len(seen)
        held = len(slots) - count
        for store, x in inputs.sides():
            write_slots(store, slots[held:], x[tokens])
        k, v = (
            repeat(
                torch.cat([read_slots(store, slots[:held], x.dtype), x[tokens]]),
                "s h d -> s (h g) d",
                g=query.shape[1] // x.shape[1],
            )
            for (store, _), x in zip(inputs.sides(), read, strict=True)
        )
        scores = torch.einsum("nhd,shd->hns", query[tokens].float(), k.float()) * inputs.scale
        if inputs.softcap:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        visible = torch.cat([(before[:n] >= inputs.first).expand(count, n), seen], dim=1)  # [M, n + N]
        position, at = torch.cat([before[:n], n + depth]), n + depth[len(depth) - count :, None]
        if inputs.window:
            visible = visible & (at - position < inputs.window)
        if inputs.chunk_size:
            visible = visible & (at // inputs.chunk_size == position // inputs.chunk_size)
        # A value that is not finite affects only those that see it, through their scores: 0 * NaN is NaN.
        lost = ~v.isfinite().all(-1)  # [S, Hq]
        scores = scores.masked_fill(lost.mT[:, None], torch.nan).masked_fill(~visible, -torch.inf)
        if inputs.sinks is not None:
            scores = torch.cat([scores, repeat(inputs.sinks.float(), "h -> h n 1", n=count)], dim=-1)
        weights = scores.softmax(-1)[..., : len(slots)]
        out[tokens] = torch.einsum("hns,shd->nhd", weights, v.float().masked_fill(lost[..., None], 0)).to(out.dtype)

    for row, (first, end) in enumerate(itertools.pairwise(rows.starts.tolist())):
        held = nodes - new + end - first  # of a ragged tree, the first nodes alone
        attend(slice(first, end), table[row], int(length[row]), depth[row, :held], ancestors[row, : end - first, :held])
    for chunk, (first, end) in enumerate(itertools.pairwise(rows.chunk_starts.tolist()[:-1])):
        if end > first:
            level = torch.arange(end - first, device=query.device)
            held = int(rows.chunk_lengths[chunk])
            attend(slice(first, end), rows.by_chunk()[chunk], held, level, level[:, None] >= level)
    return out


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
    held=None,
    chunks=(),
    room=0,
    kv_dtype=None,
    sinks=False,
    **settings,
):
    """Make inputs of attention, on shuffled blocks, with random trees.

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
        held: Nodes that each row of a ragged tree has; None for all.
        chunks: Of each chunk of a prompt, the tokens that the cache holds already and those of the chunk.
        room: Chunks that there is room for; those past `chunks` are empty.
        kv_dtype: Dtype of the pools; None for that of the keys.
        sinks: Whether heads may spend scores on nothing.
        settings: Other fields of `AttentionInputs`.
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
    keys, values = (random(2, ((rows + room) * blocks + 1) * BLOCK_SIZE, heads, d) for d in (dk, dv))
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
    chunk_lengths = torch.tensor([cached for cached, _ in chunks], dtype=torch.long)
    token_rows = TokenRows(
        flat(torch.tensor(lengths)),
        starts.to(DEVICE),
        flat(tree.depth),
        flat(tree.last_level(new).ancestors),
        flat(tables[:rows]),
        torch.cat([chunk_starts, torch.tensor([count])]).to(DEVICE),
        pad(chunk_lengths, (0, room - len(chunks) + 2)).to(DEVICE),
        flat(torch.cat([tables[rows:], torch.zeros_like(tables[:1])])),
    )
    settings = {"scale": 0.3, "sinks": torch.linspace(-1, 2, heads * group).to(DEVICE) if sinks else None} | settings
    return AttentionInputs(query, key, value, keys[LAYERS["keys"]], values[LAYERS["values"]], token_rows, **settings)


def pool_of(layer):
    """Return the pool of which a tensor is one layer."""
    return layer._base  # noqa: SLF001


def stored(inputs):
    """Return the bytes of both pools, without block 0, which is not read."""
    return [as_bytes(pool_of(layer))[:, BLOCK_SIZE:].cpu() for layer in (inputs.keys, inputs.values)]


def on_cpu(inputs):
    """Copy inputs to the CPU, with their pools."""
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    copies = {name: x.cpu().clone() for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    copies |= {side: pool_of(tensors[side]).cpu().clone()[layer] for side, layer in LAYERS.items()}
    return replace(inputs, **copies, rows=TokenRows(*(x.cpu() for x in inputs.rows)))


def check_attention(attend, inputs, tolerance=2e-5):
    """Fail unless a function and the reference of tree attention write the same cache and return the same."""
    other = on_cpu(inputs)
    expected, found = tree_attention_reference(other), attend(inputs).cpu()
    assert all(torch.equal(*both) for both in zip(stored(inputs), stored(other), strict=True))
    if inputs.rows.sizes[3]:  # beside chunks, padding comes out as any finite numbers
        assert found.isfinite().all()
        end = int(inputs.rows.chunk_starts[-2])
        found, expected = found[:end], expected[:end]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)
