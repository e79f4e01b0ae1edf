"""The configurations of drafters: their architectures, and the defaults of the searches that draft with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from redrafter.errors import ArgumentError, MismatchError
from redrafter.files.checkpoint_kind import EAGLE_MODEL_TYPE, MODEL_TYPE, MTP_MODEL_TYPE

RECURRENCES = ("apple", "trtllm", "gated")
CONTEXT_HEADS, CONTEXT_KV_HEADS, CONTEXT_HEAD_DIM = 4, 1, 64  # of a drafter that attends to the text, by default
MEASURED_NODES = 26  # of a tree, that searches are compared at: on a GPU they cost a step hardly more than one
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 1024  # of a width or a vocabulary; of residual layers


def require(config: PretrainedConfig, name: str, allowed: bool, what: str) -> None:
    """Raise `ArgumentError`, which says what a field of a config must be, unless its value is allowed."""
    if not allowed:
        raise ArgumentError(f"{type(config).__name__}.{name} must {what}, got {getattr(config, name)!r}")


def check_sizes(
    config: PretrainedConfig, *names: str, least: int = 1, most: int = MAX_SIZE, optional: bool = False
) -> None:
    """Raise `ArgumentError` unless fields of a config are integers from `least` to `most`, or None if optional."""
    for name in names:
        value = getattr(config, name)
        allowed = (optional and value is None) or (type(value) is int and least <= value <= most)
        require(config, name, allowed, f"be an integer from {least} to {most}")


def check_shared(config: Any) -> None:
    """Check what drafters of all kinds have."""
    check_sizes(config, "trained_draft_len", "draft_vocab_size", optional=True)
    part = config.draft_vocab_size is None or config.draft_vocab_size <= config.vocab_size
    require(config, "draft_vocab_size", part, f"be from 1 to vocab_size={config.vocab_size}")
    between = isinstance(config.rms_norm_eps, float) and 0 < config.rms_norm_eps < 1
    require(config, "rms_norm_eps", between, "be between 0 and 1")


def are_layers(layers: Sequence[int]) -> bool:
    """Return whether these are numbers of layers in order."""
    return all(type(layer) is int and layer >= 0 for layer in layers) and list(layers) == sorted(set(layers))


class DrafterConfig(PretrainedConfig):
    """The architecture of a drafter, saved as `config.json` beside its weights.

    Below, e is the embedding of the last token, s the recurrent state, and h the target's hidden state.

    Args:
        vocab_size: V, ids of the target.
        hidden_size: D, hidden size of the target.
        exit_dim: E, width of the head; 2D when None.
        num_draft_layers: Residual layers before the head.
        rnn: Whether the recurrence is learned; without it, the state is the running sum of embeddings (the paper's
            first version).
        recurrence: "apple", `s' = SiLU(W e + U s + b)` from `s = 0`, as the public trainers train it; "trtllm",
            `s' = W e` at the first step and `W e + U s + b` after, as TensorRT-LLM's engine computed it; or "gated",
            `s' = (1 - g) s + g SiLU(c)` with `g = sigmoid(a)` and `[a, c] = G [e, s, h] + b`, whose drafts are
            accepted more often.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the drafter reads beside the last
            hidden state.
        rms_norm_eps: Epsilon of the RMS norm that is applied to the outputs of `target_layers`.
        context_window: Pairs of a committed token and the one after it that the recurrent state attends to at each
            step, the nearest ones; None for a drafter that reads nothing of the text but h.
        context_heads: Query heads of that attention.
        context_kv_heads: Its key and value heads, which divide the query heads.
        context_head_dim: Width of a head.
        head_rank: Rank of the head's weight, which makes it smaller by E / head_rank; None for full rank.
        draft_vocab_size: V', ids that the head can draft, with a map to the target's ids in the weights; None for all.
        draft_beams: Default number of beams (transformers reserves the name `num_beams` in a saved config).
        draft_len_per_beam: Default draft length.
        trained_draft_len: Steps that the drafter was trained for.
        base_model: Name of the target.
        base_embedding_norms: Norms of a few rows of the target's embedding table, which tell whether a drafter was made
            for another base.
        kwargs: Passed to `PretrainedConfig`.
    """

    model_type, kind = MODEL_TYPE, "recurrent drafter"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        exit_dim: int | None = None,
        num_draft_layers: int = 2,
        rnn: bool = True,
        recurrence: str = "apple",
        target_layers: Sequence[int] = (),
        rms_norm_eps: float = 1e-6,
        context_window: int | None = None,
        context_heads: int = CONTEXT_HEADS,
        context_kv_heads: int = CONTEXT_KV_HEADS,
        context_head_dim: int = CONTEXT_HEAD_DIM,
        head_rank: int | None = None,
        draft_vocab_size: int | None = None,
        draft_beams: int = 5,
        draft_len_per_beam: int = 5,
        trained_draft_len: int | None = None,
        base_model: str | None = None,
        base_embedding_norms: list[float] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.exit_dim = 2 * hidden_size if exit_dim is None else exit_dim
        self.num_draft_layers = num_draft_layers
        self.rnn = rnn
        self.recurrence = recurrence
        self.target_layers = list(target_layers) if isinstance(target_layers, Sequence) else [target_layers]
        self.rms_norm_eps = rms_norm_eps
        self.context_window = context_window
        self.context_heads = context_heads
        self.context_kv_heads = context_kv_heads
        self.context_head_dim = context_head_dim
        self.head_rank = head_rank
        self.draft_vocab_size = draft_vocab_size
        self.draft_beams = draft_beams
        self.draft_len_per_beam = draft_len_per_beam
        self.trained_draft_len = trained_draft_len
        self.base_model = base_model
        self.base_embedding_norms = base_embedding_norms
        super().__init__(**kwargs)

    def target_layers_of(self, count: int) -> list[int]:
        """Return which decoder layers the drafter reads of a target with `count` of them."""
        return self.target_layers

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        sizes = ("vocab_size", "hidden_size", "exit_dim", "draft_beams", "draft_len_per_beam")
        check_sizes(self, *sizes, "context_heads", "context_kv_heads", "context_head_dim")
        heads = self.context_heads, self.context_kv_heads, self.context_head_dim
        check_context_heads(*heads, "DrafterConfig.{}".format)
        check_sizes(self, "context_window", "head_rank", optional=True)
        check_sizes(self, "num_draft_layers", least=0, most=MAX_LAYERS)
        require(self, "rnn", isinstance(self.rnn, bool), "be true or false")
        require(self, "recurrence", self.recurrence in RECURRENCES, f"be one of {RECURRENCES}")
        require(self, "target_layers", are_layers(self.target_layers), "be layer numbers that ascend")
        norms = self.base_embedding_norms
        numbers = isinstance(norms, list) and norms and all(isinstance(norm, int | float) for norm in norms)
        require(self, "base_embedding_norms", norms is None or bool(numbers), "be numbers or None")
        check_shared(self)

    def describe(self) -> dict[str, Any]:
        """Return what this kind of drafter alone has to say of itself, as `redrafter convert --info` shows it."""
        return {
            "exit_dim": self.exit_dim,
            "layers": self.num_draft_layers,
            "recurrence": self.recurrence if self.rnn else "none: a running sum of embeddings",
            "target_layers": self.target_layers or None,
            "context_window": self.context_window,
            "head_rank": self.head_rank,
        }


AutoConfig.register(MODEL_TYPE, DrafterConfig, exist_ok=True)


def check_context_heads(heads: int, kv_heads: int, head_dim: int, name: Callable[[str], str]) -> None:
    """Raise `ArgumentError` for heads of the attention to the text that no drafter can have.

    `name` returns what the user calls `context_heads`, `context_kv_heads` or `context_head_dim`.
    """
    if heads % kv_heads:
        raise ArgumentError(
            f"{name('context_heads')} must be a multiple of {name('context_kv_heads')}={kv_heads}, got {heads}"
        )
    if head_dim % 2:
        raise ArgumentError(f"{name('context_head_dim')} must be even, got {head_dim}")


ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies are the same in texts of any length
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "width",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "draft_beams",
    "draft_len_per_beam",
)
_FLAGS = (
    "attention_bias",
    "mlp_bias",
    "qk_norm",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "own_embedding",
)


class EagleConfig(PretrainedConfig):
    """The architecture of an EAGLE-3 head, saved as `config.json` beside its weights.

    Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv
    2503.01840).

    Below, D is the width of the head's decoder layer.

    Args:
        vocab_size: V, ids of the target.
        hidden_size: Hidden size of the target.
        width: D; the target's hidden size when None.
        intermediate_size: Width of the layer's MLP.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, which divide the query heads.
        head_dim: Width of a head.
        hidden_act: Activation of the MLP, as transformers names it.
        rms_norm_eps: Epsilon of all norms.
        rope: Rotary positions as transformers' `rope_parameters` has them: `rope_type`, one of `ROPE_TYPES`,
            `rope_theta`, and what the type needs.
        max_position_embeddings: Positions that the rope was made for.
        attention_bias: Whether the attention's products have biases.
        mlp_bias: Whether the MLP's products have biases.
        qk_norm: Whether the heads of queries and keys are RMS-normalised, as in Qwen3.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the head reads; None for the
            published choice, which follows from the target's number of layers.
        norm_before_residual: Whether the residual of the attention is the normalised hidden state.
        norm_before_fc: Whether the joined outputs of the target's layers are RMS-normalised together.
        fc_norm: Whether each output of a target's layer is RMS-normalised by itself.
        norm_output: Whether a draft reads the hidden state of the draft before it after the final norm.
        own_embedding: Whether the head has an embedding table of its own; else it reads the target's.
        draft_vocab_size: V', ids that the head can draft, with a map to the target's ids in the weights; None for all.
        draft_beams: Default number of beams.
        draft_len_per_beam: Default draft length.
        trained_draft_len: Steps that the head was trained for, where that is known.
        base_model: Name of the target.
        base_embedding_norms: Norms of a few rows of the target's embedding table, as in `DrafterConfig`.
        kwargs: Passed to `PretrainedConfig`.
    """

    model_type, kind = EAGLE_MODEL_TYPE, "EAGLE-3 head"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        width: int | None = None,
        intermediate_size: int = 0,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        head_dim: int = 0,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope: Mapping[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        target_layers: Sequence[int] | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        own_embedding: bool = False,
        draft_vocab_size: int | None = None,
        draft_beams: int = 5,
        draft_len_per_beam: int = 5,
        trained_draft_len: int | None = None,
        base_model: str | None = None,
        base_embedding_norms: list[float] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.width = vocab_size, hidden_size, width or hidden_size
        self.intermediate_size, self.hidden_act, self.rms_norm_eps = intermediate_size, hidden_act, rms_norm_eps
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.max_position_embeddings = head_dim, max_position_embeddings
        self.rope = dict(DEFAULT_ROPE if rope is None else rope)
        self.attention_bias, self.mlp_bias, self.qk_norm = attention_bias, mlp_bias, qk_norm
        self.target_layers = None if target_layers is None else list(target_layers)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.norm_before_fc, self.fc_norm = norm_before_fc, fc_norm
        self.own_embedding, self.draft_vocab_size = own_embedding, draft_vocab_size
        self.draft_beams, self.draft_len_per_beam = draft_beams, draft_len_per_beam
        self.trained_draft_len = trained_draft_len
        self.base_model, self.base_embedding_norms = base_model, base_embedding_norms
        super().__init__(**kwargs)

    @property
    def num_target_layers(self) -> int:
        """The number of the target's layers that the head reads."""
        return 3 if self.target_layers is None else len(self.target_layers)

    def target_layers_of(self, count: int) -> list[int]:
        """Return which decoder layers the head reads of a target with `count` of them.

        The published choice is the input of the layers 2, n // 2 and n - 3, which is the output of those before them.

        Raises:
            MismatchError: The published choice are not three layers of so small a target.
        """
        if self.target_layers is not None:
            return self.target_layers
        layers = [1, count // 2 - 1, count - 4]
        if layers != sorted(set(layers)):
            raise MismatchError(
                f"the drafter reads three layers that follow from the base's number of layers, and {count} are too "
                "few; set target_layers in its config.json"
            )
        return layers

    def describe(self) -> dict[str, Any]:
        """Return what this kind of drafter alone has to say of itself; see `DrafterConfig.describe`."""
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "own_embedding")
        layers = self.target_layers
        return {
            "width": self.width,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rope": self.rope["rope_type"],
            "options": [name for name in flags if getattr(self, name)] or None,
            "target_layers": "three that follow from the model's number of layers" if layers is None else layers,
        }

    def check(self) -> None:
        """Raise `ArgumentError` for values that no head can have."""
        check_sizes(self, *_SIZES)
        for name in _FLAGS:
            require(self, name, isinstance(getattr(self, name), bool), "be true or false")
        kv_heads, layers = self.num_key_value_heads, self.target_layers
        multiple = self.num_attention_heads % kv_heads == 0
        require(self, "num_attention_heads", multiple, f"be a multiple of num_key_value_heads={kv_heads}")
        require(self, "hidden_act", self.hidden_act in ACT2FN, "be an activation of transformers")
        require(self, "head_dim", self.head_dim % 2 == 0, "be even")
        require(self, "rope", self.rope.get("rope_type") in ROPE_TYPES, f"have one of the types {ROPE_TYPES}")
        ascending = layers is None or (bool(layers) and are_layers(layers))
        require(self, "target_layers", ascending, "be layer numbers that ascend, or None")
        if self.norm_before_fc and self.fc_norm:
            raise ArgumentError("EagleConfig has norm_before_fc or fc_norm, not both")
        if self.width != self.hidden_size and not self.own_embedding:
            raise ArgumentError(
                f"EagleConfig.width={self.width} differs from the target's {self.hidden_size}, whose embeddings then "
                "do not fit: such a head needs own_embedding"
            )
        check_shared(self)


AutoConfig.register(EAGLE_MODEL_TYPE, EagleConfig, exist_ok=True)


class MTPConfig(PretrainedConfig):
    """What is known of an MTP layer beside its weights; both are in the checkpoint of its base.

    Args:
        vocab_size: V, ids of the target.
        hidden_size: D, hidden size of the target.
        family: The names that its tensors have, one of those in `redrafter.checkpoints.mtp`.
        hidden_first: Whether the layer's product reads `[hidden; embedding]`, in place of `[embedding; hidden]`.
        first_embedding_is_zero: Whether the entry at position 0 reads zeros in place of an embedding.
        layers: MTP layers in the checkpoint of the base, of which the first one drafts.
        draft_beams: Default number of beams.
        draft_len_per_beam: Default draft length.
        base_model: Name of the target.
        kwargs: Passed to `PretrainedConfig`.
    """

    model_type, kind = MTP_MODEL_TYPE, "MTP layer"
    draft_vocab_size = trained_draft_len = base_embedding_norms = None

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        family: str = "",
        hidden_first: bool = False,
        first_embedding_is_zero: bool = False,
        layers: int = 1,
        draft_beams: int = 3,
        draft_len_per_beam: int = 4,
        base_model: str | None = None,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.family = vocab_size, hidden_size, family
        self.hidden_first, self.first_embedding_is_zero = hidden_first, first_embedding_is_zero
        self.layers = layers
        self.draft_beams, self.draft_len_per_beam, self.base_model = draft_beams, draft_len_per_beam, base_model
        super().__init__(**kwargs)

    def describe(self) -> dict[str, Any]:
        """Return what this kind of drafter alone has to say of itself; see `DrafterConfig.describe`."""
        return {"named_as_in": self.family, "mtp_layers": self.layers}
