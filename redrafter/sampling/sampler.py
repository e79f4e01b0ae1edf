"""The sampler: from the target's logits to its own draw at every node."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.sampling.noise import ACCEPT, branch, gumbel
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.processors import ProcessorOfRows, RowTemperature
from redrafter.tree.token_tree import Tree


def draw_residual(tree: Tree, scores: Tensor, noise: Tensor, chance: Tensor) -> Tensor:
    """Draw the token that follows each node of a chain, `[B, N]`: the node's child if it is kept, else another.

    A draft x that was drawn from q is kept with probability min(1, p(x) / q(x)), where p is the target's distribution.
    In place of the first draft that is rejected, a token is drawn from max(p - q, 0), normalised (Leviathan et al.
    2023, Chen et al. 2023). The acceptance and the replacement use noise of two streams that are independent of each
    other and of the stream that x was drawn with.

    Args:
        tree: A chain with `sampled_from`.
        scores: The target's scores, `[B, N, V]`.
        noise: Standard Gumbel noise for the draws that replace drafts, `[B, N, V]`.
        chance: Standard exponential noise, `[B, N]`; a draft is kept if log q - log p is below it.
    """
    assert tree.sampled_from is not None
    # In float32 and as logarithms: in half precision p and q of unlikely tokens underflow, and their ratio with them.
    log_p = scores.log_softmax(dim=-1, dtype=torch.float32)
    log_q = tree.sampled_from.log_softmax(dim=-1, dtype=torch.float32)  # [B, N-1, V]
    drafts = tree.tokens[:, 1:, None]
    lead = (log_q.gather(2, drafts) - log_p[:, :-1].gather(2, drafts)).squeeze(2)  # [B, N-1]
    kept = lead < chance[:, :-1]
    residual = (log_p[:, :-1].exp() - log_q.exp()).clamp(min=0)
    # Where p and q are equal up to rounding, no residual is left, and p itself has the smallest rounding error.
    any_left = residual.sum(dim=-1, keepdim=True) > 0
    residual = torch.where(any_left, residual.log(), log_p[:, :-1])
    other = (torch.cat([residual, log_p[:, -1:]], dim=1) + noise).argmax(dim=-1)  # [B, N]
    return torch.cat([torch.where(kept, tree.tokens[:, 1:], other[:, :-1]), other[:, -1:]], dim=1)


def check_draws(logits: Tensor, drawn: Tensor, *, sampled: bool = False) -> Tensor:
    """Return drawn tokens, each with 1 after it if it was drawn from finite numbers, else 0, `[B, N, 2]` int64.

    An argmax takes a NaN for the largest number. So the logit of the drawn token reveals it, without a pass over the
    vocabulary: it is not finite where a model overflows or computes NaN, and the draw is meaningless.

    Args:
        logits: The target's logits before any processor, `[B, N, V]`.
        drawn: The drawn tokens, `[B, N]` int64.
        sampled: Whether they were drawn by rejection sampling, whose distribution a single NaN makes invalid.
    """
    highest = logits.amax(-1) if sampled else logits.gather(2, drawn[..., None]).squeeze(2)
    return torch.stack([drawn, highest.isfinite().long()], dim=2)


@dataclass(frozen=True)
class Sampler:
    """Draws the tokens of `B` rows. Greedy decoding and sampling share an argmax, of scores or of scores plus noise.

    The drafter applies no processors, but drafts better with the temperature that `processors` divide by.
    """

    seeds: Tensor | None  # of each row, `[B]` int64; None for greedy
    processors: tuple[ProcessorOfRows, ...]  # applied in order to float32 scores
    temperature: Tensor  # `[B]` float32
    prompt: Tensor  # each row's own prompt length, `[B]` int64
    limit: Tensor  # maximum length of each row, `[B]` int64
    ids: Tensor  # `arange(V)`, `[V]` int64
    keep_scores: bool = False  # whether the processed scores are needed too
    greedy: Tensor | None = None  # rows that draw without noise while others sample, `[B]` bool; None for none
    draft_limits: Tensor | None = None  # levels of drafts that each row may keep, `[B]` int64; None for all

    @cached_property
    def fused(self) -> bool:
        """Return whether a GPU kernel draws, which stores no scores and applies a temperature at most."""
        simple = len(self.processors) <= 1 and all(isinstance(each, RowTemperature) for each in self.processors)
        return kernels.TRITON and self.temperature.is_cuda and simple and not self.keep_scores

    @property
    def draws_logits(self) -> bool:
        """Return whether logits are all that it draws from, whatever text they follow."""
        return self.fused or not self.processors

    @property
    def capturable(self) -> bool:
        """Return whether nothing here runs on the host, so that a step may be captured in a CUDA graph."""
        return not any(processor.on_host for processor in self.processors)

    def stream(self, which: int) -> "Sampler":
        """Return the sampler with noise of another stream."""
        return self if self.seeds is None else replace(self, seeds=branch(self.seeds, which))

    def noise(self, length: Tensor, count: int, known: Tensor | None = None) -> Tensor | None:
        """Return the noise of `count` tokens after the one at `length` `[B]`, `[B, count, V]` float32; None if greedy.

        `known` noise of the first tokens is not computed again, and is returned whole if it is longer.
        """
        if self.seeds is None:
            return None
        if known is not None:
            first = known.shape[1]
            more = self.noise(length + first, count - first) if count > first else None
            return known if more is None else torch.cat([known, more], dim=1)
        positions = length[:, None] + torch.arange(1, count + 1, device=length.device)
        make = kernels.sample.gumbel if kernels.TRITON and length.is_cuda else gumbel
        noise = make(self.seeds, positions, self.ids)
        # Greedy rows of a mixed batch share the kernel: without noise, their draw is the argmax.
        return noise if self.greedy is None else noise.masked_fill_(self.greedy[:, None, None], 0.0)

    def process(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Return processed logits `[B, N, V]` float32; the logits themselves for greedy decoding without processors."""
        if self.seeds is None and not self.processors:
            return logits
        scores = logits.float()
        for processor in self.processors:
            scores = processor(scores, prefixes)
        return scores

    def process_nodes(self, logits: Tensor, tokens: Tensor, length: Tensor, tree: Tree, window: int) -> Tensor:
        """Process logits `[B, N, V]` of a tree's nodes, which follow the first `length` `[B]` of `tokens` `[B, T]`."""
        window = min(window, tokens.shape[1])
        # The text before each node, which processors such as a repetition penalty look at.
        prefixes = Prefixes(tokens, length, prompt=self.prompt, limit=self.limit, tree=tree, window=window)
        return self.process(logits, prefixes)

    def draw(self, scores: Tensor, noise: Tensor | None, depth: Tensor, logits: Tensor) -> Tensor:
        """Draw the target's own next token at every node, and check it as `check_draws` does, with its result.

        The node's `depth` `[B, N]` selects its noise.
        """
        if self.fused:
            # The kernel scales and adds noise in registers, so no second tensor of the logits' size is written.
            return kernels.sample.draw_tokens(logits, self.temperature, noise, depth, None)
        if noise is not None:
            scores = scores + noise.gather(1, depth[:, :, None].expand_as(scores))
        elif not scores.is_cuda:
            # On a CPU an argmax of 16-bit numbers takes four times as long: 2.1 ms for 12 nodes of 49,152 ids.
            scores = scores.float()
        return check_draws(logits, scores.argmax(dim=-1))

    def draw_nodes(self, logits: Tensor, noise: Tensor | None, row: Tensor, depth: Tensor) -> Tensor:
        """Draw as `draw` does at T nodes of any rows, from logits `[T, V]`: `[T, 2]`; for `draws_logits` alone."""
        if self.fused:
            return kernels.sample.draw_tokens(logits[None], self.temperature, noise, depth[None], row)[0]
        nodes = logits[:, None]
        here = None if noise is None else noise[row, depth][:, None]
        return self.draw(nodes, here, torch.zeros_like(depth)[:, None], nodes).squeeze(1)

    def draw_residual(self, scores: Tensor, noise: Tensor | None, tree: Tree, position: Tensor) -> Tensor:
        """Draw the token after each node of a sampled chain by rejection sampling, `[B, N]` int64.

        `noise` is by position, `[B, K+1, V]`; `position` is that of each row's first draft, `[B]` int64.
        """
        assert noise is not None, "greedy drafts are chosen, not sampled"
        assert self.seeds is not None
        positions = position[:, None] + tree.depth
        # Only the noise of id 0; a Gumbel variable is minus the logarithm of an exponential one.
        chance = gumbel(branch(self.seeds, ACCEPT), positions, self.ids[:1]).squeeze(2).neg().exp()
        noise = noise[:, : positions.shape[1]]
        drawn = draw_residual(tree, scores, noise, chance)
        # Greedy rows, and nodes whose children no row keeps, draw as they would without drafts.
        greedy = None if self.greedy is None else self.greedy[:, None]
        last = None if self.draft_limits is None else tree.depth >= self.draft_limits[:, None]
        for nodes in (greedy, last):
            if nodes is not None:
                drawn = torch.where(nodes, (scores + noise).argmax(dim=-1), drawn)
        return drawn

    def draft_scores(self, logits: Tensor, noise: Tensor | None, step: int, ids: Tensor | None) -> Tensor:
        """Return a drafter's scores adjusted to the target's draw: at its temperature, with its noise.

        Choosing by shared noise only changes how often a draft is accepted (Daliri et al. 2024). The drafter's logits
        are `[B, w, V']` in search step `step`, the target's noise `[B, K+1, V]`, or None if greedy; `ids` are the
        target's ids of the drafter's vocabulary, `[V']`, or None if they are the same. For logits of candidates, `[B,
        w, C]`, they are the target's ids of each, `[B, w, C]`.
        """
        if noise is None:
            return logits
        if kernels.TRITON and logits.is_cuda:
            return kernels.sample.noisy_scores(logits, self.temperature, noise[:, step], ids)
        if ids is not None and ids.dim() > 1:
            here = noise[:, step].gather(1, ids.flatten(1)).view_as(ids)  # [B, w, C]
        else:
            here = (noise[:, step] if ids is None else noise[:, step].index_select(1, ids))[:, None]  # [B, 1, V']
        return (logits / self.temperature[:, None, None]).add_(here)  # in place, so that only one float32 copy is made
