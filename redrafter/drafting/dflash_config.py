"""The configuration of drafters that fill a block of masks in one pass."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from redrafter.drafting.drafter_config import LayerConfig, are_layers

MARKOV_TYPES = ("vanilla", "gated", "rnn")
CAUSAL = ("none", "sliding", "all")


class DFlashConfig(LayerConfig):
    """The architecture of a DFlash, DFlash2 or DSpark drafter, saved as `config.json` with its weights.

    A block is the pending token followed by masks. The layers attend to the block, and to keys and values of the
    committed tokens that are computed from the outputs of some of the target's layers (arXiv 2602.06036). DSpark adds a
    Markov head, which makes a draft depend on the one before it; DFlash2 adds convolutions around each sublayer, and a
    selector, which does the same for the likeliest candidates. The fields of `LayerConfig` and `AnyDrafterConfig` come
    first: the default draft length is the number of drafts of a block, and ids may be fewer than the target's only with
    `own_head`.

    Attributes:
        num_layers: Decoder layers.
        block_size: Tokens of a block.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the drafter reads.
        sliding_layers: Layers of the drafter that see only the last `sliding_window` positions.
        sliding_window: Window of these layers, including their own position; None for all positions.
        causal: In which layers a position sees no later ones of its block: "none", the "sliding" ones, or "all".
        conv_kernel_size: Taps of convolutions around each sublayer; None without them.
        conv_group_size: Number of channels that share the weights computed for a token.
        mask_token_id: The placeholder id of a token to be drafted.
        sample_from_anchor: Whether each position drafts the next token, beginning with the pending token's; else the
            position of each mask drafts its own token, one fewer.
        embedding_scale: Multiplier of embeddings.
        logit_scale: Multiplier of logits.
        logit_softcap: Bound of the logits, by a tanh; None for none.
        own_head: Whether it has a head; else it uses the target's.
        markov_rank: Rank of the Markov head; None without one.
        markov_type: Form of the Markov head's term, one of `MARKOV_TYPES`.
        selector_rank: Rank of the selector; None without one.
        selector_top_k: Candidates of each position among which it chooses.
    """

    model_type = "redrafter_dflash"
    from_zero = ("mask_token_id",)
    own_tables = LayerConfig.own_tables | {"lm_head.weight": "own_head"}

    num_layers: int = 1
    block_size: int = 16
    target_layers: Sequence[int] = ()
    sliding_layers: Sequence[int] = ()
    sliding_window: int | None = None
    causal: str = "none"
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    draft_len_per_beam: int = 0
    mask_token_id: int = 0
    sample_from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    own_head: bool = False
    markov_rank: int | None = None
    markov_type: str = "vanilla"
    selector_rank: int | None = None
    selector_top_k: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.draft_len_per_beam = self.draft_len_per_beam or self.drafts
        super().__post_init__(**kwargs)

    @property
    def algorithm(self) -> str:
        """Task that it serves, as repositories of the Hub are tagged."""
        return "dspark" if self.markov_rank else "dflash2" if self.selector_rank else "dflash"

    @property
    def drafts(self) -> int:
        """The tokens that a block drafts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def max_draft_len(self) -> int:
        """The most tokens that it can draft on a beam, those of a block."""
        return self.drafts

    def sees_later(self, layer: int) -> bool:
        """Return whether positions see later ones of their block in a layer."""
        return self.causal == "none" or (self.causal == "sliding" and layer not in self.sliding_layers)

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        super().check()
        layers = bool(self.target_layers) and are_layers(self.target_layers)
        self.require("target_layers", layers, "be layers that ascend")
        sliding = are_layers(self.sliding_layers) and all(layer < self.num_layers for layer in self.sliding_layers)
        self.require("sliding_layers", sliding, f"be layers that ascend, below num_layers={self.num_layers}")
        self.require("causal", self.causal in CAUSAL, f"be one of {CAUSAL}")
        self.require("draft_len_per_beam", self.draft_len_per_beam <= self.drafts, f"be at most {self.drafts}")
        self.require_integer("block_size", least=1 if self.sample_from_anchor else 2)
        self.require_integer("mask_token_id", least=0, most=self.vocab_size - 1)
        self.require("markov_type", self.markov_type in MARKOV_TYPES, f"be one of {MARKOV_TYPES}")
        whole = self.conv_kernel_size is None or self.width % (self.conv_group_size or self.width + 1) == 0
        self.require("conv_group_size", whole, f"divide hidden_size={self.width}")
        for rank, top in (("selector_rank", "selector_top_k"), ("selector_top_k", "selector_rank")):
            self.require(rank, (getattr(self, rank) is None) == (getattr(self, top) is None), f"go with {top}")
        whole_head = self.draft_vocab_size is None or (self.own_head and self.selector_rank is None)
        self.require("draft_vocab_size", whole_head, "be None without a head of its own, and with a selector")
        for name in ("embedding_scale", "logit_scale", "logit_softcap"):
            value = getattr(self, name)
            positive = (isinstance(value, int | float) and value > 0) or (name == "logit_softcap" and value is None)
            self.require(name, positive, "be positive")


AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
