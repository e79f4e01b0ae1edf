"""One step, top to bottom."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.sampling.hf_processors import Prefixes
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.accept import Path, accept
from redrafter.tree.token_tree import Tree, chain

__all__ = ["StepOutput", "draw_first_tokens", "prefill", "read_prompts", "step"]


@dataclass(frozen=True)
class StepOutput:
    """What a step produced.

    tokens: `[B, K+1]` int64, the accepted drafts and then the target's own next token; undefined past `path.accepted`.
    levels: how deep the tree was drafted below its root. logits, scores: `[B, N, V]`, what the draws at all nodes were
        made from, before and after processing (a fused sampler keeps no processed ones).
    """

    tokens: Tensor
    path: Path
    levels: int
    logits: Tensor
    scores: Tensor

    @property
    def drafted(self) -> int:
        """Drafts verified per row."""
        return self.logits.shape[1] - 1

    def pack_for_host(self) -> Tensor:
        """`[B, K+2]` int64: what the host must know, the tokens and the accepted length."""
        return torch.cat([self.tokens, self.path.accepted[:, None]], dim=1)


def step(
    state: State,
    proposer: Proposer,
    target: Target,
    cache: KVCache,
    sampler: Sampler,
    draft_cache: KVCache | None = None,
) -> tuple[State, StepOutput]:
    """Propose a tree, verify it in one forward, let the target draw at every node, keep what it drew itself, commit.

    cache, draft_cache: keys and values of the target, and of the model that proposes if one does.
    """
    noise = sampler.noise(state.length + 1, proposer.depth + 1)  # [B, K+1, V], of the tokens to be drawn
    tree = proposer.propose(state, sampler, noise, draft_cache)  # [B, N]
    logits, hidden = target.verify(tree, state.length, cache)  # [B, N, V], [B, N, F]
    scores = sampler.scores(logits, _prefixes(state, tree, sampler, cache.window))  # [B, N, V]
    if tree.sampled_from is None:
        drawn = sampler.draw(scores, noise, tree.depth)  # [B, N]
    else:
        drawn = sampler.draw_residual(scores, noise, tree, state.length + 1)  # [B, N]
    path = accept(target.kept(tree, state.length), drawn, proposer.depth)  # [B, K+1]
    if sampler.plain is not None:
        path = path.without_drafts(sampler.plain)
    if tree.branches:
        cache.commit(state.length, path.nodes)
        if draft_cache is not None:
            draft_cache.commit(state.length, path.nodes if tree.slots is None else tree.slots.gather(1, path.nodes))
    tokens = drawn.gather(1, path.nodes)  # [B, K+1]
    return _advance(state, tokens, path, hidden), StepOutput(tokens, path, tree.levels, logits, scores)


def prefill(
    tokens: Tensor,
    prompt: Tensor,
    target: Target,
    cache: KVCache,
    sampler: Sampler,
    *,
    start: Tensor | None = None,
    new: int,
    draft_model: Target | None = None,
    draft_cache: KVCache | None = None,
) -> tuple[State, StepOutput]:
    """Read the prompts and draw each row's first pending token. Not counted as a step.

    tokens: `[B, T]` int64, each row's prompt and then room to write. prompt: `[B]`, prompt lengths. start: `[B]`, how
    much of them the cache holds already; new: the most that a row has beyond that. draft_model: what reads them too,
    into draft_cache.
    """
    logits, hidden = read_prompts(
        tokens, prompt, target, cache, start=start, new=new, draft_model=draft_model, draft_cache=draft_cache
    )
    return draw_first_tokens(tokens, prompt, logits, hidden, cache.window, sampler)


def read_prompts(
    tokens: Tensor,
    upto: Tensor,
    target: Target,
    cache: KVCache,
    *,
    start: Tensor | None = None,
    new: int,
    draft_model: Target | None = None,
    draft_cache: KVCache | None = None,
    show: Callable[[int, int, Tensor], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Read texts up to position `upto` `[B]`; the rest as `prefill`, `show` as `Target.prefill` has it. Returns what
    the target gave at each row's last token, logits `[B, V]` and hidden `[B, F]`."""
    if draft_model is not None:
        assert draft_cache is not None, "a draft model has a cache"
        to = draft_model.device
        draft_model.prefill(
            draft_model.clamp_to_vocab(tokens.to(to)),
            upto.to(to),
            draft_cache,
            start=None if start is None else start.to(to),
            new=new,
        )
    return target.prefill(tokens, upto, cache, start=start, new=new, show=show)


def draw_first_tokens(
    tokens: Tensor, prompt: Tensor, logits: Tensor, hidden: Tensor, window: int, sampler: Sampler
) -> tuple[State, StepOutput]:
    """Draw each row's first pending token, from what a forward gave at its prompt's last token: logits `[B, V]`, hidden
    `[B, F]`. window: of the cache."""
    last = State(tokens, prompt - 1, hidden, torch.ones_like(prompt, dtype=torch.bool))
    tree = chain(last.pending)  # [B, 1]
    scores = sampler.scores(logits[:, None], _prefixes(last, tree, sampler, window))  # [B, 1, V]
    drawn = sampler.draw(scores, sampler.noise(prompt, 1), tree.depth)  # [B, 1]
    path = accept(tree, drawn, max_depth=0)
    return _advance(last, drawn, path, hidden[:, None]), StepOutput(drawn, path, 0, logits[:, None], scores)


def _prefixes(state: State, tree: Tree, sampler: Sampler, window: int) -> Prefixes:
    return Prefixes(state.tokens, state.length, sampler.prompt, sampler.limit, tree, min(window, state.tokens.shape[1]))


def _advance(state: State, tokens: Tensor, path: Path, hidden: Tensor) -> State:
    """Each row moves on by its own number of tokens; what stands past its new pending token is scratch."""
    slots = state.length[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)  # [B, K+1]
    state.tokens.scatter_(1, slots, tokens)
    end = path.end[:, None, None].expand(-1, 1, hidden.shape[-1])
    return State(
        state.tokens,
        torch.where(state.active, state.length + path.accepted + 1, state.length),
        torch.where(state.active[:, None], hidden.gather(1, end).squeeze(1), state.hidden),
        state.active,
    )
