"""A drafter of another package, in one module: the last token alone says which one follows."""

from dataclasses import dataclass

from torch import Tensor, nn

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand


class BigramConfig(AnyDrafterConfig):
    model_type = "bigram"

    width: int = 8


@dataclass(frozen=True)
class BigramProposer(SearchProposer):
    drafter: "BigramDrafter"

    def read_context(self, state: State, cache: KVCache) -> None:
        return None

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: None) -> Expand:
        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            return sampler.draft_scores(self.drafter(self.target.embedding(tokens)), noise, k, None)

        return expand


@register_drafter()
class BigramDrafter(DrafterModel):
    config_class = BigramConfig
    proposer_class = BigramProposer

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        self.proj = nn.Linear(config.hidden_size, config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, embedding: Tensor) -> Tensor:
        return self.score(self.proj(embedding))
