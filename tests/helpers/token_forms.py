"""The forms in which a token can come to attention over a paged cache: alone, in a chain, a tree, a chunk, a batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK, AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.tree.token_tree import chain, tree_of

HEADS, GROUP, WIDTH, VALUE_WIDTH = 2, 3, 16, 24
SETTINGS = {
    "plain": {},
    "window": {"window": 70},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 2, HEADS * GROUP)},
}
FORMS = AS_CHAIN, AS_TREE, AS_CHUNK, AS_PROMPT, AS_LAST_NODE, AMONG_ROWS = (
    "chain",
    "tree",
    "chunk",
    "prompt",
    "last node",
    "among rows",
)


@dataclass(frozen=True)
class TokenForms:
    """Calls an operator of attention, or a kernel with its arguments, with tokens of one text in several forms."""

    operator: Callable[..., torch.Tensor]
    device: torch.device

    def random_text(self, length, dtype):
        """Return queries, keys and values of a text of `length` tokens."""
        generator = torch.Generator().manual_seed(5)
        shapes = (HEADS * GROUP, WIDTH), (HEADS, WIDTH), (HEADS, VALUE_WIDTH)
        return [torch.randn(length, *shape, generator=generator).to(self.device, dtype) for shape in shapes]

    def empty_cache(self, length, dtype, rows=1):
        """Return a cache whose blocks are in no order."""
        blocks = length // BLOCK_SIZE + 4
        shapes = [LayerShape(HEADS, WIDTH, VALUE_WIDTH, dtype, self.device)]
        table = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(6)).view(rows, blocks) + 1
        return PagedCache(KVCachePool(shapes, rows * blocks + 1), table.int().to(self.device))

    def attend(self, cache, tree, length, states, chunks=None, **settings):
        """Attend in the first layer of a cache with queries, keys and values of its new nodes."""
        plan = cache.plan(tree, torch.tensor(length, device=self.device), (0,), chunks, len(states[0]))
        return self.attend_by(plan, states, **settings)

    def attend_by(self, plan, states, **settings):
        """Attend in the first layer of the cache that was planned for."""
        settings = {"scale": 0.3} | settings
        if "sinks" in settings:
            settings["sinks"] = settings["sinks"].to(self.device)
        return self.operator(AttentionInputs.from_arguments(*states, *plan.pools[0], *plan.tensors, **settings))

    def chain_of(self, count, rows=1):
        """Return chains of `count` nodes."""
        return chain(torch.zeros(rows, count, dtype=torch.long, device=self.device))

    def hold(self, cache, states):
        """Write keys and values of the first tokens of a text into the last row of a cache."""
        offsets = torch.arange(len(states[1]), device=self.device)
        slots = cache.table[-1].long()[offsets // BLOCK_SIZE] * BLOCK_SIZE + offsets % BLOCK_SIZE
        keys, key_layer, values, value_layer = cache.pool.layer_pools[0]
        keys[key_layer, slots], values[value_layer, slots] = states[1], states[2]

    def come_as(self, form, states, n, **settings):
        """Return the output of the last five tokens of a text, which come behind n in some form."""
        dtype, last = states[0].dtype, [x[n:] for x in states]
        cache = self.empty_cache(n + 13, dtype, rows=2 if form in (AS_PROMPT, AMONG_ROWS) else 1)
        if form == AS_PROMPT:  # of which all but three tokens are new, behind the prompt of another row
            first = min(n, 3)
            self.hold(cache, [x[:first] for x in states])
            counts = torch.tensor([5, n + 5 - first], device=self.device)
            tree = replace(self.chain_of(int(counts[1]), rows=2), counts=counts, total=int(counts.sum()))
            both = [torch.cat([x[:5], x[first:]]) for x in states]
            plan = cache.plan_chains(tree, torch.tensor([0, first], device=self.device), (0,), len(both[0]))
            return self.attend_by(plan, both, **settings)[-5:]
        if form == AS_CHUNK:
            first = max(n - 37, 0)  # of the chunk, behind what was read before
            self.hold(cache, [x[:first] for x in states])
            count = n + 5 - first
            room = PromptChunks.room(-(-count // TOKENS_PER_CHUNK), cache.table.shape[1], self.device)
            room.starts[1:], room.lengths[0], room.table[0] = count, first, cache.table[0]
            idle = PagedCache(cache.pool, torch.zeros_like(cache.table))
            beside = [torch.cat([x[:1], x[first:]]) for x in states]
            return self.attend(idle, self.chain_of(1), [0], beside, room, **settings)[-5:]
        self.hold(cache, [x[:n] for x in states])
        if form == AMONG_ROWS:
            states = [torch.cat([x[:5], y]) for x, y in zip(states, last, strict=True)]
            return self.attend(cache, self.chain_of(5, rows=2), [0, n], states, **settings)[5:]
        if form == AS_CHAIN:
            return self.attend(cache, self.chain_of(5), [n], last, **settings)
        if form == AS_LAST_NODE:  # of a chain whose other nodes were computed before
            before = self.attend(cache, self.chain_of(4), [n], [x[:4] for x in last], **settings)
            then = self.attend(cache, self.chain_of(5).last_level(1), [n], [x[4:] for x in last], **settings)
            return torch.cat([before, then])
        parents, depth = torch.tensor([[0, 0, 0, 1, 2, 4, 5, 6]]), torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5]])
        path = [0, 2, 4, 5, 6]
        nodes = [torch.randn(8, *x.shape[1:], generator=torch.Generator().manual_seed(1)).to(x) for x in last]
        for x, y in zip(nodes, last, strict=True):
            x[path] = y
        tokens = torch.zeros(1, 8, dtype=torch.long, device=self.device)
        tree = tree_of(tokens, parents.to(self.device), depth.to(self.device), 5)
        return self.attend(cache, tree, [n], nodes, **settings)[path]

    def alone(self, n, dtype, setting):
        """Return the output of the last five tokens of a text, each the only new one of a forward."""
        states, cache = self.random_text(n + 5, dtype), self.empty_cache(n + 8, dtype)
        self.hold(cache, [x[:n] for x in states])
        one = [[x[s : s + 1] for x in states] for s in range(n, n + 5)]
        steps = [self.attend(cache, self.chain_of(1), [n + i], x, **SETTINGS[setting]) for i, x in enumerate(one)]
        return torch.cat(steps)
