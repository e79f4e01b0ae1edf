"""The configuration of drafters that fill a block of masks in one pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from redrafter.drafting.drafter_config import DEFAULT_ROPE, ROPE_TYPES, are_layers, check_shared, check_sizes, require
from redrafter.files.checkpoint_kind import DFLASH_MODEL_TYPE

MARKOV_TYPES = ("vanilla", "gated", "rnn")
CAUSAL = ("none", "sliding", "all")
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "draft_beams", "draft_len_per_beam"),
)
_OPTIONAL_SIZES = (
    *("sliding_window", "markov_rank", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
)
_FLAGS = ("attention_bias", "mlp_bias", "sample_from_anchor", "own_embedding", "own_head")


class DFlashConfig(PretrainedConfig):
    """The architecture of a DFlash, DFlash2 or DSpark drafter, saved as `config.json` beside its weights.

    A block is the pending token and masks after it. The layers attend to the block, and to keys and values of the
    committed tokens that are computed from the outputs of some of the target's layers (arXiv 2602.06036). DSpark adds a
    Markov head, which lets a draft depend on the one before it; DFlash2 adds convolutions around each sublayer, and a
    selector, which does the same for the likeliest candidates.

    Args:
        vocab_size: V, ids of the target.
        hidden_size: D, hidden size of the target and of the drafter.
        intermediate_size: Width of the layers' MLPs.
        num_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, which divide the query heads.
        head_dim: Width of a head.
        hidden_act: Activation of the MLPs, as transformers names it.
        rms_norm_eps: Epsilon of all norms.
        rope: Rotary positions, as in `EagleConfig`.
        max_position_embeddings: Positions that the rope was made for.
        attention_bias: Whether the attention's products have biases.
        mlp_bias: Whether the MLPs' products have biases.
        block_size: Tokens of a block.
        mask_token_id: The id that stands for a token that is to be drafted.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the drafter reads.
        sample_from_anchor: Whether the position of the pending token drafts the token after it, and so on; else the
            position of each mask drafts the token in its own place, one fewer.
        sliding_layers: Layers of the drafter that see the last `sliding_window` positions alone.
        sliding_window: Positions that these see, their own included; None for all.
        causal: In which layers a position sees no later ones of its block: "none", the "sliding" ones, or "all".
        embedding_scale: What embeddings are multiplied by.
        logit_scale: What logits are multiplied by.
        logit_softcap: Bound that a tanh keeps logits in; None for none.
        own_embedding: Whether the drafter has an embedding table of its own; else it reads the target's.
        own_head: Whether it has a head of its own; else it computes the target's.
        draft_vocab_size: V', ids that a head of its own can draft, with a map to the target's ids in the weights; None
            for all.
        markov_rank: Rank of the Markov head; None without one.
        markov_type: How it computes what it adds to logits: one of `MARKOV_TYPES`.
        conv_kernel_size: Taps of the convolutions; None without them.
        conv_group_size: Channels of a convolution that share what is computed of a token.
        selector_rank: Rank of the selector; None without one.
        selector_top_k: Candidates of each position among which it chooses.
        draft_beams: Default number of beams.
        draft_len_per_beam: Default draft length; None for all that a block drafts.
        trained_draft_len: None: a block drafts what it holds.
        base_model: Name of the target.
        base_embedding_norms: Norms of a few rows of the target's embedding table, as in `DrafterConfig`.
        kwargs: Passed to `PretrainedConfig`.
    """

    model_type, kind = DFLASH_MODEL_TYPE, "DFlash drafter"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        num_layers: int = 1,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        head_dim: int = 0,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope: Mapping[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        block_size: int = 16,
        mask_token_id: int = 0,
        target_layers: Sequence[int] = (),
        sample_from_anchor: bool = False,
        sliding_layers: Sequence[int] = (),
        sliding_window: int | None = None,
        causal: str = "none",
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        own_embedding: bool = False,
        own_head: bool = False,
        draft_vocab_size: int | None = None,
        markov_rank: int | None = None,
        markov_type: str = "vanilla",
        conv_kernel_size: int | None = None,
        conv_group_size: int | None = None,
        selector_rank: int | None = None,
        selector_top_k: int | None = None,
        draft_beams: int = 5,
        draft_len_per_beam: int | None = None,
        trained_draft_len: int | None = None,
        base_model: str | None = None,
        base_embedding_norms: list[float] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_layers, self.num_attention_heads = num_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.hidden_act, self.rms_norm_eps = hidden_act, rms_norm_eps
        self.rope = dict(DEFAULT_ROPE if rope is None else rope)
        self.max_position_embeddings = max_position_embeddings
        self.attention_bias, self.mlp_bias = attention_bias, mlp_bias
        self.block_size, self.mask_token_id, self.target_layers = block_size, mask_token_id, list(target_layers)
        self.sample_from_anchor, self.sliding_layers = sample_from_anchor, list(sliding_layers)
        self.sliding_window, self.causal = sliding_window, causal
        self.embedding_scale, self.logit_scale, self.logit_softcap = embedding_scale, logit_scale, logit_softcap
        self.own_embedding, self.own_head, self.draft_vocab_size = own_embedding, own_head, draft_vocab_size
        self.markov_rank, self.markov_type = markov_rank, markov_type
        self.conv_kernel_size, self.conv_group_size = conv_kernel_size, conv_group_size
        self.selector_rank, self.selector_top_k = selector_rank, selector_top_k
        self.trained_draft_len = trained_draft_len
        self.draft_beams, self.draft_len_per_beam = draft_beams, draft_len_per_beam or self.drafts
        self.base_model, self.base_embedding_norms = base_model, base_embedding_norms
        super().__init__(**kwargs)

    @property
    def drafts(self) -> int:
        """The tokens that a block drafts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def width(self) -> int:
        """D, by the name that parts of decoder layers read."""
        return self.hidden_size

    def sees_later(self, layer: int) -> bool:
        """Return whether positions see later ones of their block in a layer."""
        return self.causal == "none" or (self.causal == "sliding" and layer not in self.sliding_layers)

    def describe(self) -> dict[str, Any]:
        """Return what this kind of drafter alone has to say of itself; see `DrafterConfig.describe`."""
        flags = ("sample_from_anchor", "own_embedding", "own_head")
        return {
            "layers": self.num_layers,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rope": self.rope["rope_type"],
            "block_size": self.block_size,
            "options": [name for name in flags if getattr(self, name)] or None,
            "target_layers": self.target_layers,
            "markov_rank": self.markov_rank,
            "conv_kernel_size": self.conv_kernel_size,
            "selector_top_k": self.selector_top_k,
        }

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        check_sizes(self, *_SIZES)
        check_sizes(self, *_OPTIONAL_SIZES, optional=True)
        check_sizes(self, "block_size", least=1 if self.sample_from_anchor else 2)
        check_sizes(self, "mask_token_id", least=0, most=self.vocab_size - 1)
        for name in _FLAGS:
            require(self, name, isinstance(getattr(self, name), bool), "be true or false")
        kv_heads, width = self.num_key_value_heads, self.hidden_size
        multiple = self.num_attention_heads % kv_heads == 0
        require(self, "num_attention_heads", multiple, f"be a multiple of num_key_value_heads={kv_heads}")
        require(self, "hidden_act", self.hidden_act in ACT2FN, "be an activation of transformers")
        require(self, "head_dim", self.head_dim % 2 == 0, "be even")
        require(self, "rope", self.rope.get("rope_type") in ROPE_TYPES, f"have one of the types {ROPE_TYPES}")
        require(
            self, "target_layers", bool(self.target_layers) and are_layers(self.target_layers), "be layers that ascend"
        )
        sliding = are_layers(self.sliding_layers) and all(layer < self.num_layers for layer in self.sliding_layers)
        require(self, "sliding_layers", sliding, f"be layers that ascend, below num_layers={self.num_layers}")
        require(self, "causal", self.causal in CAUSAL, f"be one of {CAUSAL}")
        require(self, "markov_type", self.markov_type in MARKOV_TYPES, f"be one of {MARKOV_TYPES}")
        whole = self.conv_kernel_size is None or width % (self.conv_group_size or width + 1) == 0
        require(self, "conv_group_size", whole, f"divide hidden_size={width}")
        for rank, top in (("selector_rank", "selector_top_k"), ("selector_top_k", "selector_rank")):
            require(self, rank, (getattr(self, rank) is None) == (getattr(self, top) is None), f"go with {top}")
        require(self, "draft_len_per_beam", self.draft_len_per_beam <= self.drafts, f"be at most {self.drafts}")
        whole_head = self.draft_vocab_size is None or (self.own_head and self.selector_rank is None)
        require(self, "draft_vocab_size", whole_head, "be None without a head of its own, and with a selector")
        for name in ("embedding_scale", "logit_scale", "logit_softcap"):
            value = getattr(self, name)
            positive = (isinstance(value, int | float) and value > 0) or (name == "logit_softcap" and value is None)
            require(self, name, positive, "be positive")
        check_shared(self)


AutoConfig.register(DFLASH_MODEL_TYPE, DFlashConfig, exist_ok=True)
