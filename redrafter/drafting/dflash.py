"""The proposer that drafts with a DFlash, DFlash2 or DSpark drafter: a block of masks is filled in one pass.

All positions of the block are drafted at once, so a tree is searched in the scores of each position. A Markov head or a
selector makes the scores of a beam depend on its last token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.drafting.block_drafter import BlockContext, BlockDrafter, BlockProposer
from redrafter.drafting.decoder_parts import RMSNorm, of_beams
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.dflash_layers import BlockLayer, MarkovHead, Selector
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import State
from redrafter.drafting.text_drafters import GivenTexts
from redrafter.errors import UnsupportedError
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand


@register_drafter()
class DFlashDrafter(BlockDrafter):
    """A drafter of blocks; it uses the target's embedding table and head, unless it has its own."""

    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig):
        """Make a drafter with random weights; see `DrafterModel`."""
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.num_draft_ids, bias=False) if config.own_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = Selector(config) if config.selector_rank else None
        self.post_init()

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft reads parts of the drafter: a block all at once, the Markov head at each step."""
        tables = {"fc.": 0, "embed_tokens.": 0, "markov_head.markov_w1.": 0, "markov_head.markov_w2.": depth}
        return {**tables, "target.head": 1.0 if self.lm_head is None else 0.0, "": 1}

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse the outputs of the target's layers into the input of keys and values of committed tokens.

        Args:
            hidden: The target's last hidden state, which is ignored, followed by the outputs of the layers, `[..., F]`.

        Returns:
            `[..., D]`.
        """
        fused: Tensor = self.hidden_norm(self.fc(hidden[..., self.config.hidden_size :]))
        return fused

    def open_block(self, pending: Tensor, hidden: Tensor, table: nn.Module) -> Tensor:
        """Return the embeddings of the pending token and of masks; see `BlockDrafter.open_block`."""
        block = pad(pending, (0, self.config.block_size - 1), value=self.config.mask_token_id)  # [B, Q]
        # The target's table is frozen, and a training has float32 drafters for targets of any dtype.
        x = table(block).detach().to(self.norm.weight.dtype) if self.embed_tokens is None else self.embed_tokens(block)
        return x * self.config.embedding_scale

    def check_unroll(self, steps: int) -> None:
        """Raise an error for more steps than a block drafts, or a bound of the logits; see `TrainableDrafter`."""
        super().check_unroll(steps)
        if self.config.logit_softcap is not None:
            raise UnsupportedError(
                f"a block drafter with logit_softcap={self.config.logit_softcap} cannot be trained: the loss has no "
                "such bound; train a new one with --form dflash"
            )

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Fill a block at each anchor, as the search does; see `TrainableDrafter.unroll`.

        Returns:
            The hidden states of the positions that draft, `[A, K, D]`, followed by the inputs of the Markov head's and
            the selector's product.
        """
        hidden = self.fill_given(texts, self.fuse_hidden(texts.features))
        before, state = texts.tokens.flatten()[texts.position], None  # [A, K], the token before each draft
        first = 0 if self.config.sample_from_anchor else 1
        drafted = hidden[:, first:][:, : before.shape[1]]  # [A, K, D]
        parts = [drafted * self.config.logit_scale]
        markov = self.markov_head
        if markov is not None and markov.joint_proj is None:  # no state: all positions at once
            x, _ = markov.advance(before.flatten()[:, None], drafted.flatten(0, 1), None)
            parts.append(x.view(*before.shape, -1))
        elif markov is not None:
            if first:
                _, state = markov.advance(before[:, :1], hidden[:, 0], None)
            inputs = []
            for k in range(before.shape[1]):
                x, state = markov.advance(before[:, k, None], drafted[:, k], state)
                inputs.append(x)
            parts.append(torch.cat(inputs, dim=1))
        if self.candidate_selector is not None:
            parts.append(self.candidate_selector.join(before, drafted))
        return torch.cat(parts, dim=-1)

    def trained_heads(self, x: Tensor) -> list[tuple[Tensor | None, ...]]:
        """Return the head with the terms of the Markov head and of the selector; see `TrainableDrafter.trained_heads`.

        The candidates of a selector are chosen without its term, so the logits without it are a second head.
        """
        width, rank = self.config.hidden_size, self.config.markov_rank or 0
        head: tuple[Tensor | None, ...] = x[..., :width], None if self.lm_head is None else self.lm_head.weight
        if self.markov_head is not None:
            head += (x[..., width : width + rank], self.markov_head.markov_w2.weight)
        if self.candidate_selector is None:
            return [head]
        return [(*head, x[..., width + rank :], self.candidate_selector.successor_codebook), head]

    def logits(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """Return the logits of positions `[..., D]`, over the drafter's vocabulary; `head` is the target's."""
        config = self.config
        logits: Tensor = (head if self.lm_head is None else self.lm_head)(hidden) * config.logit_scale
        cap = config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


@dataclass(frozen=True)
class DFlashProposer(BlockProposer):
    """Drafts with a DFlash drafter; has the attributes of `SearchProposer`."""

    drafter: DFlashDrafter

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: BlockContext) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        drafter, markov, selector = self.drafter, self.drafter.markov_head, self.drafter.candidate_selector
        hidden = self.fill(state, state.hidden, context)
        carried: Tensor | None = None  # [B, w, r], the state of a recurrent Markov head on each beam
        # The pending token's own position drafts nothing here, but starts the recurrence of the Markov head.
        if not drafter.config.sample_from_anchor:
            if markov is not None:
                _, carried = markov(state.pending, hidden[:, 0], None)
            hidden = hidden[:, 1:]
        # By position first, so that those of one position are read where they are.
        logits = drafter.logits(hidden[:, : self.depth].transpose(0, 1), self.target.head)  # [K, B, V']

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            here = logits[k, :, None]
            if markov is not None:
                carried = None if carried is None else of_beams(carried, sources)
                added, carried = markov(tokens, hidden[:, k], carried)
                here = here + added
            scores = sampler.draft_scores(here, noise, k, drafter.draft_ids)
            if selector is not None:
                scores = sampler.draft_scores(selector(tokens, hidden[:, k], here, scores), noise, k, None)
            return scores.expand(-1, tokens.shape[1], -1)

        return expand


DFlashDrafter.proposer_class = DFlashProposer
