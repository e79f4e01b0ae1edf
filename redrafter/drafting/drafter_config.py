"""The configuration of a recurrent drafter: its architecture, and the defaults of the search that drafts with it."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from redrafter.errors import ArgumentError
from redrafter.files.checkpoint_kind import MODEL_TYPE

__all__ = [
    "CONTEXT_HEADS",
    "CONTEXT_HEAD_DIM",
    "CONTEXT_KV_HEADS",
    "RECURRENCES",
    "DrafterConfig",
    "check_context_heads",
]

RECURRENCES = ("apple", "trtllm", "gated")
CONTEXT_HEADS, CONTEXT_KV_HEADS, CONTEXT_HEAD_DIM = 4, 1, 64  # of a drafter that attends to the text, by default
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 1024  # of a width or a vocabulary; of residual layers


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

    model_type = MODEL_TYPE

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

    def check(self) -> None:
        """Raise `ArgumentError` for values that no drafter can have."""
        context = ("context_heads", "context_kv_heads", "context_head_dim")
        for name in ("vocab_size", "hidden_size", "exit_dim", "draft_beams", "draft_len_per_beam", *context):
            self._check_size(name)
        heads = self.context_heads, self.context_kv_heads, self.context_head_dim
        check_context_heads(*heads, "DrafterConfig.{}".format)
        for name in ("context_window", "head_rank", "trained_draft_len", "draft_vocab_size"):
            if getattr(self, name) is not None:
                self._check_size(name)
        self._check_size("num_draft_layers", 0, MAX_LAYERS)
        if not isinstance(self.rnn, bool):
            raise ArgumentError(f"DrafterConfig.rnn must be true or false, got {self.rnn!r}")
        if self.recurrence not in RECURRENCES:
            raise ArgumentError(f"DrafterConfig.recurrence is one of {RECURRENCES}, got {self.recurrence!r}")
        layers, norms = self.target_layers, self.base_embedding_norms
        if not all(type(layer) is int and layer >= 0 for layer in layers) or layers != sorted(set(layers)):
            raise ArgumentError(f"DrafterConfig.target_layers must be layer numbers that ascend, got {layers!r}")
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise ArgumentError(f"DrafterConfig.rms_norm_eps must be between 0 and 1, got {self.rms_norm_eps!r}")
        if norms is not None and not (
            isinstance(norms, list) and norms and all(isinstance(norm, int | float) for norm in norms)
        ):
            raise ArgumentError(f"DrafterConfig.base_embedding_norms must be numbers or None, got {norms!r}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ArgumentError(
                f"DrafterConfig.draft_vocab_size must be from 1 to vocab_size={self.vocab_size}, "
                f"got {self.draft_vocab_size!r}"
            )

    def _check_size(self, name: str, minimum: int = 1, maximum: int = MAX_SIZE) -> None:
        value = getattr(self, name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise ArgumentError(f"DrafterConfig.{name} must be an integer from {minimum} to {maximum}, got {value!r}")


AutoConfig.register(MODEL_TYPE, DrafterConfig, exist_ok=True)


def check_context_heads(heads: int, kv_heads: int, head_dim: int, name: Callable[[str], str]) -> None:
    """Raise `ArgumentError` for heads of the attention to the text that no drafter can have.

    Args:
        heads: Query heads, positive.
        kv_heads: Key and value heads, positive.
        head_dim: Width of a head, positive.
        name: Returns what the user calls `context_heads`, `context_kv_heads` or `context_head_dim`.
    """
    if heads % kv_heads:
        raise ArgumentError(
            f"{name('context_heads')} must be a multiple of {name('context_kv_heads')}={kv_heads}, got {heads}"
        )
    if head_dim % 2:
        raise ArgumentError(f"{name('context_head_dim')} must be even, got {head_dim}")
