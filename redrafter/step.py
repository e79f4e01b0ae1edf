"""One step of speculative decoding, top to bottom.

A step drafts a tree of tokens, verifies the whole tree in one forward of the target, and keeps the drafts that the
target would have drawn itself. Before the first step, `read_prompts` reads the prompts and `draw_first_tokens` draws
each row's first token. Text, stop strings, timing and scheduling live elsewhere.

Shapes: `B` rows, `K` draft length, `N` tree nodes, `V` vocabulary, `F` width of the target's hidden states. Batch and
proposer fix all of them and nothing here reads a value on the host, so a step can be captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.attention.tree_plan import ChunkEnds, PromptChunks
from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.accept import Path, accept
from redrafter.tree.token_tree import Tree, chain


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step produced, and what they were drawn from.

    Attributes:
        tokens: Accepted drafts and then the token that the target drew after them, `[B, K+1]` int64. Entries past
            `path.accepted` are undefined.
        path: The accepted nodes of the tree.
        levels: Levels of drafts in the tree, at most K.
        drafted: Number of drafts verified in each row, `[B]` int64.
        finite: How many of the tokens, from the first on, were drawn from logits that are finite numbers, `[B]` int64.
        logits: The target's logits at every node, `[B, N, V]`; undefined at nodes that were not verified.
        scores: The logits after the sampler's processors, `[B, N, V]`; the logits themselves where the sampler is
            fused into one kernel, which keeps no processed scores.
        chunk_ends: What the target gave at the end of each chunk of a prompt that the step read; None for no chunks.
    """

    tokens: Tensor
    path: Path
    levels: int
    drafted: Tensor
    finite: Tensor
    logits: Tensor
    scores: Tensor
    chunk_ends: ChunkEnds | None = None

    def pack_for_host(self) -> Tensor:
        """Return all that the host needs in one tensor, `[B, K+4]` int64.

        It holds the tokens, the accepted length, the number of drafts verified, and how many tokens are finite draws.
        """
        return torch.cat([self.tokens, torch.stack([self.path.accepted, self.drafted, self.finite], dim=1)], dim=1)


@dataclass(frozen=True)
class DraftPrompts:
    """Prompts as a draft model with another vocabulary reads them.

    Attributes:
        tokens: Each row's prompt in the draft model's ids, padded on the right with any, `[B, T]` int64.
        start: Tokens that its cache already holds, `[B]` int64.
        upto: Position to stop before, `[B]` int64.
        counts: How many tokens are read of each row.
    """

    tokens: Tensor
    start: Tensor
    upto: Tensor
    counts: Sequence[int]


def step(
    state: State,
    proposer: Proposer,
    target: Target,
    cache: KVCache,
    sampler: Sampler,
    draft_cache: KVCache | None = None,
    chunks: PromptChunks | None = None,
) -> tuple[State, StepOutput]:
    """Draft a tree of tokens, verify it with the target, and advance every row by the drafts that hold.

    Prompts of other sequences may be read in the same forward, a chunk of each.

    The output is exact whatever is drafted: each token is the target's own draw, made after the same prefix as in plain
    decoding (or, with rejection sampling, a sample of the same distribution).

    Args:
        state: The rows before the step: their texts, pending tokens, and the hidden states that produced those.
        proposer: Drafts the tree.
        target: The model that verifies it.
        cache: The target's keys and values of the committed tokens; written in place.
        sampler: How each row draws: temperature, processors, seed.
        draft_cache: The draft model's keys and values; None for a proposer that has no model of its own.
        chunks: What the target reads of prompts beside the tree; None for nothing.

    Returns:
        The state after the step, and the tokens it produced.
    """
    # 1. Draft. The root of the tree is the pending token. The drafter sees the noise that the target will draw with.
    noise = sampler.noise(state.length + 1, proposer.depth + 1)  # [B, K+1, V]
    tree = _of_first_rank(proposer.propose(state, sampler, noise, cache, draft_cache), target.ranks)  # [B, N]

    # 2. Verify. One forward computes the target's logits and hidden states at all nodes.
    chunk_ends: ChunkEnds | None = None
    shift = state.position_shift  # [B], behind images
    if chunks is None:
        logits, hidden = target.verify(tree, state.length, cache, position_shift=shift)  # [B, N, V], [B, N, F]
    else:
        logits, hidden, chunk_ends = target.verify_and_read(tree, state.length, cache, chunks, shift)

    # 3. Draw. The target draws its own next token at every node, after that node's own prefix.
    scores = sampler.scores(logits, _prefixes(state, tree, sampler, cache.window))  # [B, N, V]
    if tree.sampled_from is None:
        drawn = sampler.draw(scores, noise, tree.depth)  # [B, N]
    else:
        drawn = sampler.draw_residual(scores, noise, tree, state.length + 1)  # [B, N]
    drawn, finite = target.ranks.of_first(drawn, _finite(logits, drawn, sampled=tree.sampled_from is not None))

    # 4. Accept. A draft holds if it is the token that was drawn at its parent, and its parent holds.
    #    Never accepted: drafts past a length where the target's rope changes, and those of rows that decode plainly.
    path = accept(target.drop_past_rope_switch(tree, state.length), drawn, proposer.depth)  # [B, K+1]
    if sampler.plain is not None:
        path = path.without_drafts(sampler.plain)

    # 5. Commit. The accepted nodes' keys and values move next to those of the committed tokens; of recurrent states,
    #    those after the last accepted nodes stay.
    if tree.branches:
        cache.commit(state.length, path.nodes)
    cache.commit_states(state.length, path, state.active)
    if draft_cache is not None:
        _commit_drafts(state, tree, path, draft_cache)

    # 6. Advance. The token drawn at the end of the path is the next pending token.
    tokens = drawn.gather(1, path.nodes)  # [B, K+1]
    finite = finite.gather(1, path.nodes).cumprod(1).sum(1)  # [B]
    output = StepOutput(tokens, path, tree.levels, _drafted(tree), finite, logits, scores, chunk_ends)
    return _advance(state, tokens, path, hidden), output


def read_prompts(
    tokens: Tensor,
    upto: Tensor,
    target: Target,
    cache: KVCache,
    *,
    start: Tensor | None = None,
    counts: Sequence[int] | None = None,
    rope_lengths: Tensor | None = None,
    draft_model: Target | None = None,
    draft_cache: KVCache | None = None,
    draft_prompts: DraftPrompts | None = None,
    show: Callable[[int, int, Tensor], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Read prompts, or the beginnings of prompts, into the cache without drawing a token.

    Args:
        tokens: Each row's prompt, padded on the right with any ids, `[B, T]` int64.
        upto: Position to stop before, `[B]` int64.
        target: The model that reads the prompts.
        cache: The target's keys and values; written in place.
        start: Tokens that the cache already holds, `[B]` int64; None for none.
        counts: How many tokens are read of each row; None where all of `tokens` are, whatever `upto` says.
        rope_lengths: What `Target.rope_length` returns for each row, `[B]` int64; None for `upto`.
        draft_model: The LM that drafts and must read the prompts as well; None where no model does.
        draft_cache: The draft model's keys and values; written in place.
        draft_prompts: What the draft model reads; None where that is what the target reads.
        show: Called with the logits of the tokens read, as `Target.prefill` describes; None where nobody needs them.

    Returns:
        The target's logits `[B, V]` and hidden states `[B, F]` at the last token read of each row.
    """
    if draft_model is not None:
        assert draft_cache is not None, "a draft model has a cache"
        read_draft_prompts(tokens, upto, draft_model, draft_cache, draft_prompts, start=start, counts=counts)
    return target.prefill(tokens, upto, cache, start=start, counts=counts, rope_lengths=rope_lengths, show=show)


def read_draft_prompts(
    tokens: Tensor,
    upto: Tensor,
    draft_model: Target,
    draft_cache: KVCache,
    draft_prompts: DraftPrompts | None = None,
    *,
    start: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> None:
    """Read prompts into the cache of a draft model; see `read_prompts`. Of images it sees the ids in their places.

    Recurrent states stay a token behind, since each step reads the last committed token again.
    """
    if draft_prompts is not None:
        read = draft_prompts
        draft_model.prefill(read.tokens, read.upto, draft_cache, start=read.start, counts=read.counts)
        return
    device = draft_model.device
    tokens, upto = draft_model.clamp_to_vocab(tokens.to(device)), upto.to(device)
    start = None if start is None else start.to(device)
    if draft_cache.states is None:
        draft_model.prefill(tokens, upto, draft_cache, start=start, counts=counts)
        return
    start = None if start is None else (start - 1).clamp(min=0)
    draft_model.prefill(tokens, (upto - 1).clamp(min=1), draft_cache, start=start, counts=counts)
    draft_cache.states.forget(upto == 1)


def draw_first_tokens(
    tokens: Tensor, prompt: Tensor, logits: Tensor, hidden: Tensor, window: int, sampler: Sampler, ranks: Ranks = ALONE
) -> tuple[State, StepOutput]:
    """Draw the first token of each row whose prompt has been read.

    Args:
        tokens: Each row's prompt, followed by space for the tokens to come, `[B, T]` int64; written in place.
        prompt: Prompt lengths, `[B]` int64.
        logits: The target's logits at the last prompt token, `[B, V]`.
        hidden: The target's hidden state at the last prompt token, `[B, F]`.
        window: Slots per row that attention reads (`KVCache.window`).
        sampler: How each row draws.
        ranks: The processes that draw the same.

    Returns:
        The state before the first step, and the first tokens.
    """
    before = State(tokens, prompt - 1, hidden, torch.ones_like(prompt, dtype=torch.bool))
    tree = chain(before.pending)  # [B, 1], the last prompt token
    scores = sampler.scores(logits[:, None], _prefixes(before, tree, sampler, window))  # [B, 1, V]
    drawn = sampler.draw(scores, sampler.noise(prompt, 1), tree.depth)  # [B, 1]
    drawn, finite = ranks.of_first(drawn, _finite(logits[:, None], drawn))
    path = accept(tree, drawn, max_depth=0)
    return _advance(before, drawn, path, hidden[:, None]), StepOutput(
        drawn, path, 0, _drafted(tree), finite[:, 0], logits[:, None], scores
    )


def _of_first_rank(tree: Tree, ranks: Ranks) -> Tree:
    """Return the tree that rank 0 drafted. Every rank drafts, and where two drafts are alike may choose another one."""
    if ranks.size == 1 or not tree.levels:
        return tree
    names = ("tokens", "parents", "depth", "slots", "draft_length", "counts", "ancestors")
    own = {name: x for name in names if (x := getattr(tree, name)) is not None}
    drafted: dict[str, Any] = dict(zip(own, ranks.of_first(*own.values()), strict=True))
    return replace(tree, **drafted)


def _commit_drafts(state: State, tree: Tree, path: Path, cache: KVCache) -> None:
    """Commit the accepted nodes in a draft model's cache, as `step` does in the target's.

    Its recurrent states stay a token behind, since each of its steps reads the last committed token again.
    """
    if tree.slots is not None:
        path = replace(path, nodes=tree.slots.gather(1, path.nodes))
    if tree.branches:
        cache.commit(state.length if tree.draft_length is None else tree.draft_length, path.nodes)
    if cache.states is not None:
        cache.commit_states(state.length - 1, path.behind_reread(), state.active)


def _finite(logits: Tensor, drawn: Tensor, *, sampled: bool = False) -> Tensor:
    """Return 1 for each node whose draw was made from finite numbers, else 0, `[B, N]` int64.

    An argmax takes a NaN for the largest number. So the logit of the token that was drawn tells, without a pass over
    the vocabulary: it is no finite number where a model overflows, or writes NaN, and the draw means nothing.

    Args:
        logits: The target's logits before any processor, `[B, N, V]`.
        drawn: The tokens that were drawn, `[B, N]` int64.
        sampled: Whether they were drawn by rejection sampling, whose distribution a single NaN spoils.
    """
    highest = logits.amax(-1) if sampled else logits.gather(2, drawn[..., None]).squeeze(2)
    return highest.isfinite().long()


def _drafted(tree: Tree) -> Tensor:
    """Return the number of drafts verified in each row, `[B]` int64."""
    return torch.full_like(tree.tokens[:, 0], tree.new) - 1 if tree.counts is None else tree.counts - 1


def _prefixes(state: State, tree: Tree, sampler: Sampler, window: int) -> Prefixes:
    """Describe the text before each node, which processors such as a repetition penalty look at."""
    return Prefixes(state.tokens, state.length, sampler.prompt, sampler.limit, tree, min(window, state.tokens.shape[1]))


def _advance(state: State, tokens: Tensor, path: Path, hidden: Tensor) -> State:
    """Append the new tokens `[B, K+1]` to each row and move the active rows on by the tokens they gained.

    What is written past a row's new pending token is overwritten by its next step.
    """
    positions = state.length[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)  # [B, K+1]
    state.tokens.scatter_(1, positions, tokens)
    end = path.end[:, None, None].expand(-1, 1, hidden.shape[-1])  # [B, 1, F]
    return replace(
        state,
        length=torch.where(state.active, state.length + path.accepted + 1, state.length),
        hidden=torch.where(state.active[:, None], hidden.gather(1, end).squeeze(1), state.hidden),
    )
