"""The configurations of drafters: their architectures, and the defaults of the searches that draft with them."""

from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any, ClassVar

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from redrafter.drafting.recurrent_form import CONTEXT_HEAD_DIM, CONTEXT_HEADS, CONTEXT_KV_HEADS, RECURRENCES
from redrafter.errors import ArgumentError, MismatchError
from redrafter.files.drafter_kinds import drafter_kinds

MEASURED_NODES = 26  # nodes at which searches are compared: on a GPU such a tree costs hardly more than one node
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 1024  # of a width or a vocabulary; of residual layers
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the sequence length
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def are_layers(layers: Any) -> bool:
    """Return whether these are numbers of layers in order."""
    numbers = isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
    return numbers and layers == sorted(set(layers))


class AnyDrafterConfig(PretrainedConfig):
    """Base class of the configs of drafters; subclasses add fields, which are saved in `config.json`.

    Other arguments are passed to `PretrainedConfig`.

    Attributes:
        vocab_size: V, ids of the target.
        hidden_size: D, hidden size of the target.
        rms_norm_eps: Epsilon of all norms.
        draft_vocab_size: V', ids that the drafter can draft, with a map to the target's ids in the weights; None for
            all.
        draft_beams: Default number of beams (transformers reserves the name `num_beams` in a saved config).
        draft_len_per_beam: Default draft length.
        trained_draft_len: Number of steps that the drafter was trained for; None if unknown.
        base_model: Name of the target.
        base_embedding_norms: Norms of a few rows of the target's embedding table, which identify the base that a
            drafter was made for.
    """

    from_zero: ClassVar[tuple[str, ...]] = ()  # integer fields that may be 0; all others are at least 1
    own_tables: ClassVar[dict[str, str]] = {}  # flags for tables that may be the target's, by the tensors' names

    vocab_size: int = 0
    hidden_size: int = 0
    rms_norm_eps: float = 1e-6
    draft_vocab_size: int | None = None
    draft_beams: int = 5
    draft_len_per_beam: int = 5
    trained_draft_len: int | None = None
    base_model: str | None = None
    base_embedding_norms: list[float] | None = None

    def __post_init__(self, **kwargs: object) -> None:
        kwargs.pop("quantization_config", None)  # of the files; packed weights are widened when they are read
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                setattr(self, name, list(value))  # as a saved config has it
        super().__post_init__(**kwargs)

    @property
    def kind(self) -> str:
        """Name of drafters with such a config in messages."""
        return drafter_kinds()[self.model_type].name

    @property
    def algorithm(self) -> str:
        """Task that it serves, as repositories of the Hub are tagged."""
        return self.model_type.removeprefix("redrafter_")

    @property
    def num_draft_ids(self) -> int:
        """V', the number of ids that it can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def max_draft_len(self) -> int | None:
        """The most tokens that a search can draft after another; None for no limit."""
        return None

    @classmethod
    def names_of(cls, kind: object) -> list[str]:
        """Return the names of our fields of a type, such as `int | None`."""
        theirs = {item.name for item in fields(PretrainedConfig)}
        return [item.name for item in fields(cls) if item.type == kind and item.name not in theirs]

    def require(self, name: str, allowed: bool, what: str) -> None:
        """Raise `ArgumentError`, stating the requirement of a field, unless its value is allowed."""
        if not allowed:
            raise ArgumentError(f"{type(self).__name__}.{name} must {what}, got {getattr(self, name)!r}")

    def require_integer(self, name: str, least: int = 1, most: int = MAX_SIZE) -> None:
        """Raise `ArgumentError` unless a field is an integer from `least` to `most`."""
        value = getattr(self, name)
        # Not `isinstance`, which accepts `True`.
        allowed = type(value) is int and least <= value <= most
        self.require(name, allowed, f"be an integer from {least} to {most}")

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        optional = [name for name in self.names_of(int | None) if getattr(self, name) is not None]
        for name in (*self.names_of(int), *optional):
            self.require_integer(name, least=0 if name in self.from_zero else 1)
        for name in self.names_of(bool):
            self.require(name, isinstance(getattr(self, name), bool), "be true or false")
        part = self.draft_vocab_size is None or self.draft_vocab_size <= self.vocab_size
        self.require("draft_vocab_size", part, f"be from 1 to vocab_size={self.vocab_size}")
        between = isinstance(self.rms_norm_eps, float) and 0 < self.rms_norm_eps < 1
        self.require("rms_norm_eps", between, "be between 0 and 1")
        norms = self.base_embedding_norms
        numbers = isinstance(norms, list) and norms and all(isinstance(norm, int | float) for norm in norms)
        self.require("base_embedding_norms", norms is None or bool(numbers), "be numbers or None")

    def target_layers_of(self, count: int) -> list[int]:
        """Return the decoder layers of a target with `count` layers that the drafter reads."""
        return list(getattr(self, "target_layers", ()))


class DrafterConfig(AnyDrafterConfig):
    """The architecture of a recurrent drafter, with the fields of `AnyDrafterConfig`.

    Below, e is the embedding of the last token, s the recurrent state, and h the target's hidden state. RMS norms are
    applied to the outputs of `target_layers`.

    Attributes:
        exit_dim: E, width of the head; 2D when None.
        num_draft_layers: Residual layers before the head.
        rnn: Whether the recurrence is learned; without it, the state is the running sum of embeddings (the paper's
            first version).
        recurrence: "apple", `s' = SiLU(W e + U s + b)` from `s = 0`, as the public trainers train it; "trtllm",
            `s' = W e` at the first step and `W e + U s + b` after, as TensorRT-LLM's engine computed it; or "gated",
            `s' = (1 - g) s + g SiLU(c)` with `g = sigmoid(a)` and `[a, c] = G [e, s, h] + b`, whose drafts are
            accepted more often.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the drafter reads in addition to
            the last hidden state.
        context_window: Number of the nearest pairs of a committed token and the next that the recurrent state attends
            to at each step; None for a drafter that reads only h.
        context_heads: Query heads of that attention.
        context_kv_heads: Its key and value heads, which divide the query heads.
        context_head_dim: Width of a head.
        head_rank: Rank of the head's weight, which makes it smaller by E / head_rank; None for full rank.
        source_config: Other fields of Apple's config, kept for converting back.
    """

    model_type = "redrafter"
    from_zero = ("num_draft_layers",)

    exit_dim: int = None  # type: ignore[assignment]  # an integer once the config is made
    num_draft_layers: int = 2
    rnn: bool = True
    recurrence: str = "apple"
    target_layers: Sequence[int] = ()
    context_window: int | None = None
    context_heads: int = CONTEXT_HEADS
    context_kv_heads: int = CONTEXT_KV_HEADS
    context_head_dim: int = CONTEXT_HEAD_DIM
    head_rank: int | None = None
    source_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: object) -> None:
        self.exit_dim = 2 * self.hidden_size if self.exit_dim is None else self.exit_dim
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        super().check()
        whole = self.context_heads % self.context_kv_heads == 0
        self.require("context_heads", whole, f"be a multiple of context_kv_heads={self.context_kv_heads}")
        self.require("context_head_dim", self.context_head_dim % 2 == 0, "be even")
        self.require_integer("num_draft_layers", least=0, most=MAX_LAYERS)
        self.require("recurrence", self.recurrence in RECURRENCES, f"be one of {RECURRENCES}")
        self.require("target_layers", are_layers(self.target_layers), "be layer numbers that ascend")


AutoConfig.register(DrafterConfig.model_type, DrafterConfig, exist_ok=True)


class LayerConfig(AnyDrafterConfig):
    """The fields of drafters with decoder layers, in addition to `AnyDrafterConfig`'s.

    Attributes:
        intermediate_size: Width of the layers' MLPs.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, which divide the query heads.
        head_dim: Width of a head.
        hidden_act: Activation of the MLPs, as transformers names it.
        rope: Rotary positions as transformers' `rope_parameters` has them: `rope_type`, one of `ROPE_TYPES`,
            `rope_theta`, and further fields of the type.
        max_position_embeddings: Positions that the rope was made for.
        attention_bias: Whether the attention's products have biases.
        mlp_bias: Whether the MLPs' products have biases.
        own_embedding: Whether the drafter has an embedding table; else it uses the target's.
    """

    own_tables: ClassVar[dict[str, str]] = {"embed_tokens.weight": "own_embedding"}

    intermediate_size: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    hidden_act: str = "silu"
    rope: dict[str, Any] = field(default_factory=DEFAULT_ROPE.copy)
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    own_embedding: bool = False

    @property
    def width(self) -> int:
        """Width of the layers, which equals the target's hidden size except in some EAGLE-3 heads."""
        return self.hidden_size

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        super().check()
        kv_heads = self.num_key_value_heads
        multiple = self.num_attention_heads % kv_heads == 0
        self.require("num_attention_heads", multiple, f"be a multiple of num_key_value_heads={kv_heads}")
        self.require("hidden_act", self.hidden_act in ACT2FN, "be an activation of transformers")
        self.require("head_dim", self.head_dim % 2 == 0, "be even")
        self.require("rope", self.rope.get("rope_type") in ROPE_TYPES, f"have one of the types {ROPE_TYPES}")


class EagleConfig(LayerConfig):
    """The architecture of an EAGLE-3 head, with the fields of `LayerConfig` and `AnyDrafterConfig`.

    Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv
    2503.01840).

    Attributes:
        width: Width of the head's decoder layer; the target's hidden size where it is left out.
        qk_norm: Whether the heads of queries and keys are RMS-normalised, as in Qwen3.
        target_layers: Decoder layers of the target, ascending from 0, whose outputs the head reads; None for the
            published choice, which follows from the target's number of layers.
        norm_before_residual: Whether the residual of the attention is the normalised hidden state.
        norm_before_fc: Whether the joined outputs of the target's layers are RMS-normalised together.
        fc_norm: Whether each output of a target's layer is RMS-normalised by itself.
        norm_output: Whether a draft reads the hidden state of the draft before it after the final norm.
    """

    model_type = "redrafter_eagle3"

    width: int = 0
    qk_norm: bool = False
    target_layers: Sequence[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        self.width = self.width or self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def num_target_layers(self) -> int:
        """The number of the target's layers that the head reads."""
        return 3 if self.target_layers is None else len(self.target_layers)

    def target_layers_of(self, count: int) -> list[int]:
        """Return which decoder layers the head reads of a target with `count` of them.

        The published choice is the input of the layers 2, n // 2 and n - 3, which is the output of those before them.

        Raises:
            MismatchError: The published choice is not three different layers of so small a target.
        """
        if self.target_layers is not None:
            return list(self.target_layers)
        layers = [1, count // 2 - 1, count - 4]
        if layers != sorted(set(layers)):
            raise MismatchError(
                f"the drafter reads three layers that follow from the base's number of layers, and {count} are too "
                "few; set target_layers in its config.json"
            )
        return layers

    def check(self) -> None:
        """Raise `ArgumentError` for values that no head can have."""
        super().check()
        ascending = self.target_layers is None or (bool(self.target_layers) and are_layers(self.target_layers))
        self.require("target_layers", ascending, "be layer numbers that ascend, or None")
        if self.norm_before_fc and self.fc_norm:
            raise ArgumentError("EagleConfig has norm_before_fc or fc_norm, not both")
        if self.width != self.hidden_size and not self.own_embedding:
            raise ArgumentError(
                f"EagleConfig.width={self.width} differs from the target's {self.hidden_size}, whose embeddings then "
                "do not fit: such a head needs own_embedding"
            )


AutoConfig.register(EagleConfig.model_type, EagleConfig, exist_ok=True)
