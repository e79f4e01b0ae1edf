"""One step of speculative decoding, top to bottom.

A step drafts a tree of tokens, verifies the whole tree in one forward of the target, and keeps the drafts that the
target would have drawn itself. Before the first step, prompts are read and `draw_first_tokens` draws each row's first
token. Detokenization, stop strings, timing and scheduling are the caller's.

Shapes: `B` rows, `K` draft length, `N` tree nodes, `V` vocabulary, `F` width of the target's hidden states. Batch and
proposer fix all of them and nothing here reads a value on the host, so a step can be captured in a CUDA graph.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.attention.tree_plan import ChunkEnds, PromptChunks
from redrafter.cache.kv_cache import KVCache
from redrafter.cache.paged import PagedCache
from redrafter.drafting.draft_model import commit_drafts
from redrafter.drafting.proposer import Proposer, State
from redrafter.model.forward_batch import ForwardBatch, LogitsReader
from redrafter.model.target import Target
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.sampling.sampler import Sampler, check_draws
from redrafter.tree.accept import Path
from redrafter.tree.report import StepReport, accept_drafts
from redrafter.tree.token_tree import Tree, chain


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step produced, and the scores they were drawn from.

    Attributes:
        report: The tokens and counts that the host reads.
        path: The accepted nodes of the tree.
        levels: Levels of drafts in the tree, at most K.
        grafted: Nodes of each tree that were copied from the text, in addition to the proposer's.
        logits: The target's logits at every node, `[B, N, V]`; undefined at nodes that were not verified. Empty, as
            scores are, for a step that keeps none.
        scores: The logits after the sampler's processors, `[B, N, V]`; the logits themselves where the sampler is
            fused into one kernel, which keeps no processed scores.
        chunk_ends: The target's outputs at the end of each chunk of a prompt that the step read; None for no chunks.
    """

    report: StepReport
    path: Path
    levels: int
    grafted: int
    logits: Tensor
    scores: Tensor
    chunk_ends: ChunkEnds | None = None


def step(
    state: State,
    proposer: Proposer,
    target: Target,
    cache: KVCache,
    sampler: Sampler,
    draft_cache: KVCache | None = None,
    chunks: PromptChunks | None = None,
    *,
    reader: LogitsReader | None = None,
    keeps_logits: bool = True,
) -> tuple[State, StepOutput]:
    """Draft a tree of tokens, verify it with the target, and advance every row by the drafts that hold.

    The output is exact whatever is drafted: each token is the target's own draw, made after the same prefix as in
    undrafted decoding (or, with rejection sampling, a sample of the same distribution).

    Args:
        state: The rows before the step: their tokens, pending tokens, and the hidden states that produced those.
        proposer: Drafts the tree.
        target: The model that verifies it.
        cache: The target's keys and values of the committed tokens; written in place.
        sampler: How each row draws: temperature, processors, seed.
        draft_cache: The draft model's keys and values; None for a proposer without a draft model.
        chunks: Chunks of other sequences' prompts, which the target reads in the same forward; None for no chunks.
        reader: Stores logits that later steps draft from; None for a proposer that reads none.
        keeps_logits: Whether the output has logits and scores.

    Returns:
        The state after the step, and the tokens it produced.
    """
    # 1. Noise. The proposer sees the noise that the target will draw with.
    noise = sampler.noise(state.length, (proposer.without_text or proposer).depth + 1)  # [B, K+1, V]

    # 2. Propose. The root of the tree is the pending token.
    tree = proposer.propose(state, sampler, noise, cache, draft_cache).of_first(target.ranks)  # [B, N]
    noise = sampler.noise(state.length, tree.levels + 1, known=noise)  # drafts that the text adds may be deeper

    # 3. Verify. One forward computes the target's logits and hidden states at all nodes.
    # Where rows share nodes, most nodes of a row have no logits, and nothing of the vocabulary's size is made for them.
    ragged = tree.counts is not None and isinstance(cache, PagedCache)  # a dense forward computes all nodes
    flat = ragged and sampler.draws_logits and not keeps_logits
    batch = ForwardBatch(tree, state.length, cache, inputs=state.inputs, chunks=chunks, flat_outputs=flat)
    verified = target.verify(batch)  # logits [B, N, V] and hidden states [B, N, F]; [1, T, ...] if flat
    logits = scores = verified.logits
    if reader is not None:
        reader.read_step(state, tree, logits)  # later steps draft from them

    # 4. Process. Processors change the scores at every node, after that node's own prefix.
    if not flat:
        scores = _process(logits, state, tree, sampler, cache.window)  # [B, N, V]

    # 5. Draw. The target draws its own next token at every node.
    if flat:
        draws = tree.by_row(sampler.draw_nodes(logits[0], noise, tree.token_rows, batch.flat(tree.depth, None)))
    elif tree.sampled_from is None:
        draws = sampler.draw(scores, noise, tree.depth, logits)
    else:
        drawn = sampler.draw_residual(scores, noise, tree, state.length + 1)  # [B, N]
        draws = check_draws(logits, drawn, sampled=True)
    if not keeps_logits:
        logits = scores = logits.new_empty(0)
    # All ranks must accept and commit the same tokens, so rank 0's draws are used.
    drawn, finite = target.ranks.of_first(draws)[0].unbind(2)  # [B, N] each

    # 6. Accept. A draft holds if it is the token that was drawn at its parent, and its parent holds. Each row's text
    #    gets the accepted tokens and the one drawn after them, the next pending token.
    tree = verified.tree  # in which tokens past a switch of the target's rope are masked
    path, report, length = accept_drafts(
        tree, drawn, finite, state.tokens, state.length, state.active, proposer.depth, sampler.draft_limits
    )  # path [B, K+1]

    # 7. Commit. The accepted nodes' keys and values move next to the committed tokens'; of recurrent states,
    #    those after the last accepted nodes stay.
    # The accepted nodes of a chain are in their final slots already, one after the other.
    if tree.branches:
        cache.commit(state.length, path.nodes)
    if cache.states is not None:
        cache.states.commit(state.length, path, state.active)
    if draft_cache is not None:
        commit_drafts(state, tree, path, draft_cache)

    output = StepOutput(
        report=report,
        path=path,
        levels=tree.levels,
        grafted=tree.grafted,
        logits=logits,
        scores=scores,
        chunk_ends=verified.chunk_ends,
    )

    # 8. Advance. The next step drafts after the hidden state that produced the pending token.
    if flat:
        hidden = verified.hidden[0, tree.row_starts[:-1] + path.end]  # [B, F]
    else:
        hidden = verified.hidden.take_along_dim(path.end[:, None, None], dim=1).squeeze(1)
    # Inactive rows are masked, not left out: a captured step has fixed shapes.
    hidden = torch.where(state.active[:, None], hidden, state.hidden)
    return replace(state, length=length, hidden=hidden), output


def draw_first_tokens(
    tokens: Tensor,
    prompt: Tensor,
    logits: Tensor,
    hidden: Tensor,
    *,
    window: int,
    sampler: Sampler,
    ranks: Ranks = ALONE,
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
    # The last prompt token takes the part of the pending token, as if a step had ended before it.
    before = State(tokens, prompt - 1, hidden, torch.ones_like(prompt, dtype=torch.bool))
    tree = chain(before.pending)  # [B, 1], the last prompt token
    scores = _process(logits[:, None], before, tree, sampler, window)  # [B, 1, V]
    draws = sampler.draw(scores, sampler.noise(before.length, 1), tree.depth, logits[:, None])  # [B, 1, 2]
    drawn, finite = ranks.of_first(draws)[0].unbind(2)  # [B, 1] each
    path, report, length = accept_drafts(tree, drawn, finite, tokens, before.length, before.active, max_depth=0)
    output = StepOutput(report=report, path=path, levels=0, grafted=0, logits=logits[:, None], scores=scores)
    return replace(before, length=length, hidden=hidden), output


def _process(logits: Tensor, state: State, tree: Tree, sampler: Sampler, window: int) -> Tensor:
    """Return processed logits `[B, N, V]` float32, or the logits if the sampler processes them in its own kernel."""
    return logits if sampler.fused else sampler.process_nodes(logits, state.tokens, state.length, tree, window)
