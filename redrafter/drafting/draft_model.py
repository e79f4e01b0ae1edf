"""The proposer that drafts with a second, smaller LM."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.proposer import State
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.target import Target
from redrafter.sampling.noise import DRAFT
from redrafter.sampling.sampler import Sampler
from redrafter.tree.accept import Path
from redrafter.tree.beam_search import beam_search
from redrafter.tree.token_tree import Tree, chain, tree_of

MIN_SCORE = -1e9  # in place of -inf, so that sums of such scores stay finite and comparable


@dataclass(frozen=True)
class DraftModelProposer:
    """Drafts by beam search with a draft model, and keeps the best nodes.

    The draft model draws as the target will: its logits go through the same processors and are drawn with the same
    noise, so a draft model equal to the target guesses every token. Its cache follows the accepted path as the target's
    does. Each step reads the last committed token again, the only one that the draft model may not have read; if drafts
    are also copied from the text, it reads again as many as one step may copy.

    A draft model with another vocabulary drafts the tokens that both have, and reads each token of the target as its
    own tokens of the same bytes. Drafts and processors use the target's ids throughout; only the draft model's forwards
    use its own.

    Attributes:
        model: The draft model.
        vocab_size: V, ids of the target. Further ids of the draft model are padding; ids that it lacks are never
            drafted.
        beams: W, beams of the search; 1 where drafts are sampled.
        depth: K, steps of the search.
        nodes: N, nodes of the tree, the pending token included.
        sampled: Whether to draw drafts with separate noise and keep their distributions, for rejection sampling.
        vocabulary: The draft model's tokens for each of the target's; None if the ids are the same.
        reread: Number of last committed tokens that each step reads again, as the draft model may not have read them.
    """

    model: Target
    vocab_size: int
    beams: int
    depth: int
    nodes: int
    sampled: bool = False
    vocabulary: VocabularyMap | None = None
    reread: int = 1

    shared_nodes = without_text = None

    @property
    def sizes(self) -> dict[str, int]:
        """Beams, depth and nodes."""
        return {"num_beams": self.beams, "draft_len": self.depth, "nodes": self.nodes}

    @property
    def scratch_slots(self) -> int:
        """Number of slots after a row's committed tokens that a step writes to, including nodes that are pruned."""
        nodes = 1 + max(self.beams * self.depth, self.reread)
        return nodes if self.vocabulary is None else max(nodes, 1 + self.vocabulary.max_pieces)

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        assert draft_cache is not None, "a draft model has a cache"
        if self.sampled and noise is not None:
            # Separate noise: a draft and its acceptance must be independent, or the result is biased.
            noise = sampler.stream(DRAFT).noise(state.length, self.depth)  # [B, K, V]
        tree, sampled_from = self._search(state, sampler, noise, draft_cache)
        if self.sampled and noise is not None and sampled_from:
            return replace(tree, sampled_from=torch.cat(sampled_from, dim=1))
        return tree

    def _search(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache
    ) -> tuple[Tree, list[Tensor]]:
        """Return the tree, and per level the scores `[B, W, V]` that its tokens were chosen from, before noise."""
        lattice = _Lattice(state.pending)
        level_scores: list[Tensor] = []
        length = state.length
        # all pieces of the pending token but the last are stored with the committed ones
        if self.vocabulary is not None:
            length = self.vocabulary.draft_length(state.tokens, state.length + 1) - 1

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            if k:
                lattice.add(tokens, sources)
            tree = lattice.tree
            # [B, w, V]
            logits = self._new_logits(tree, length, cache) if k else self._first_logits(state, length, cache)
            scores = sampler.process_nodes(logits, state.tokens, state.length, tree, cache.window)
            if self.vocabulary is not None:
                scores = self.vocabulary.never_draft_others(scores, MIN_SCORE)
            level_scores.append(scores)
            if noise is not None:
                scores = scores + noise[:, k, None]
            if scores is logits or self.vocabulary is not None:
                return scores
            return scores.clamp(min=MIN_SCORE)  # a grammar may allow no token at all

        tree = beam_search(state.pending[:, 0], expand, beams=self.beams, depth=self.depth, nodes=self.nodes)
        return tree if self.vocabulary is None else replace(tree, draft_length=length), level_scores

    def _first_logits(self, state: State, length: Tensor, cache: KVCache) -> Tensor:
        """Return the draft model's logits at the pending token, `[B, 1, V]`.

        The last committed token is read before it: if a step accepts all its drafts, the draft model has drafted the
        last of them but not read it. If some were copied from the text, it has read none of these.

        Args:
            state: The rows.
            length: Draft-model tokens before the pending token, or before the last of its pieces, `[B]`.
            cache: The draft model's keys and values.
        """
        before = (state.length - self.reread).clamp(min=0)  # rows without tokens are inactive and write to block 0
        index = before[:, None] + torch.arange(1 + self.reread, device=before.device)
        # Entries after the pending token of a short row are not used.
        pair = state.tokens.gather(1, index)  # [B, 1 + reread]
        if self.vocabulary is None:
            last = torch.ones_like(before) if self.reread == 1 else state.length - before
            return self._new_logits(chain(pair), before, cache, logits_index=last)
        # An accepted draft that was not read is one piece. For a pending token with fewer than m pieces, slots are
        # filled that the first nodes of the search overwrite.
        counts = self.vocabulary.counts[pair[:, 1]]  # [B]
        most = int(counts.max()) if counts.device.type == "cpu" else self.vocabulary.max_pieces
        pieces = self.vocabulary.pieces[pair[:, 1], :most]
        read = torch.cat([self.vocabulary.last_piece(pair[:, :1]), pieces], dim=1)  # [B, 1 + m]
        batch = ForwardBatch(chain(read), (length - counts).clamp(min=0), cache, logits_index=counts)
        return self.vocabulary.restrict(self.model.verify(batch).logits)

    def _new_logits(self, tree: Tree, length: Tensor, cache: KVCache, logits_index: Tensor | None = None) -> Tensor:
        """Return the logits at the tree's new nodes over the target's ids, `[B, M, V]`."""
        if self.vocabulary is not None:
            # Drafts are tokens of both vocabularies; the root is in the cache already.
            tree = replace(tree, tokens=self.vocabulary.draft_ids[tree.tokens])
            batch = ForwardBatch(tree, length, cache, logits_index)
            return self.vocabulary.restrict(self.model.verify(batch).logits)
        tree = replace(tree, tokens=clamp_to_vocab(tree.tokens, self.model))
        logits = self.model.verify(ForwardBatch(tree, length, cache, logits_index)).logits
        if logits.shape[-1] < self.vocab_size:
            return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=torch.finfo(logits.dtype).min)
        # Ids beyond the target's are padding of the draft model's head.
        return logits[..., : self.vocab_size]


class _Lattice:
    """The tree of a running beam search, which grows by a level at each search step.

    The next forward computes the nodes of the last level.
    """

    def __init__(self, root: Tensor):
        self.tree = chain(root)
        self._levels, self._last_level_start = 0, 0  # levels below the root; index of the last level's first node

    def add(self, tokens: Tensor, sources: Tensor) -> None:
        """Add a level of nodes `tokens` `[B, W]`, which continue the nodes `sources` `[B, W]` of the last level."""
        tree, width = self.tree, tokens.shape[1]
        whole = torch.cat([tree.tokens, tokens], dim=1)
        # A chain's nodes need no masks between siblings, so a cheaper tree serves.
        if width == 1:
            self.tree = chain(whole).last_level(1)
            return
        self._levels += 1
        parents = torch.cat([tree.parents, sources + self._last_level_start], dim=1)
        depth = torch.cat([tree.depth, torch.full_like(tokens, self._levels)], dim=1)
        self._last_level_start = tree.tokens.shape[1]
        self.tree = tree_of(whole, parents, depth, max_depth=self._levels, width=width).last_level(width)


def commit_drafts(state: State, tree: Tree, path: Path, cache: KVCache) -> None:
    """Commit the accepted nodes in a draft model's cache, as a step does in the target's.

    Its recurrent states lag by one token, since each of its steps reads the last committed token again.
    """
    # Pruning renumbered the nodes, but their keys and values stay in the slots of the whole lattice.
    if tree.slots is not None:
        path = replace(path, nodes=tree.slots.gather(1, path.nodes))
    if tree.branches:
        cache.commit(state.length if tree.draft_length is None else tree.draft_length, path.nodes)
    if cache.states is not None:
        cache.states.commit(state.length - 1, path.below_reread_token(), state.active)


def clamp_to_vocab(tokens: Tensor, model: Target) -> Tensor:
    """Replace ids outside a draft model's vocabulary by 0, as they occur in none of its sequences."""
    return tokens.where(tokens < model.vocab_size, 0)
