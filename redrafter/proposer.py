"""The recurrent drafter as a proposer of trees."""

from dataclasses import dataclass

from torch import Tensor

from redrafter.beam import beam_search
from redrafter.drafter import RecurrentDrafter
from redrafter.sampling import Sampler
from redrafter.step import State
from redrafter.target import Target
from redrafter.tree import Tree

__all__ = ["RecurrentProposer"]


@dataclass(frozen=True)
class RecurrentProposer:
    """Beam search with a drafter's `step`: `beams` = W wide, `depth` = K deep, cut to the `nodes` = N best nodes."""

    drafter: RecurrentDrafter
    target: Target
    beams: int
    depth: int
    nodes: int

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None) -> Tree:
        carried: Tensor | None = None  # [B, w, D], the recurrence of each beam
        hidden, ids = state.hidden[:, None], self.drafter.draft_ids

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            if carried is not None:
                carried = carried.gather(1, sources[:, :, None].expand(-1, -1, carried.shape[-1]))
            logits, carried = self.drafter.step(self.target.embed(tokens), carried, hidden)
            return sampler.draft_scores(logits, noise, k, ids)

        return beam_search(state.pending[:, 0], expand, beams=self.beams, depth=self.depth, nodes=self.nodes, ids=ids)
