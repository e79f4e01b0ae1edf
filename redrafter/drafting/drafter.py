"""The recurrent drafter: a small head that writes a few tokens ahead from the target's last hidden state.

Zhang et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (arXiv 2403.09919). One
`step` is used by training and by drafting alike, so that what was trained is what runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import MODEL_TYPE, check_drafter, load_error
from redrafter.kernels.thin_linear import thin_linear

__all__ = ["DrafterConfig", "RecurrentDrafter"]

RECURRENCES = ("apple", "trtllm", "gated")
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 1024  # of a size; of residual layers


class DrafterConfig(PretrainedConfig):
    """What a drafter is; saved as `config.json` beside its weights.

    vocab_size: V, ids of the target. hidden_size: D of the target. exit_dim: E, width of the head, 2D when None.
    num_draft_layers: residual layers before the head. rnn: whether the recurrence is learned; without it the state is
    the running sum of embeddings (the paper's first version).
    recurrence: "apple", `s' = SiLU(W e + U s + b)` from `s = 0`, what the public trainers train; or "trtllm",
    `s' = W e` at the first step and `W e + U s + b` after, what TensorRT-LLM's engine computed; or "gated",
    `s' = (1 - g) s + g SiLU(c)` with `g = sigmoid(a)` and `[a, c] = G [e, s, h] + b`, which accepts more.
    target_layers: decoder layers of the target, ascending from 0, whose outputs are read beside its last hidden state.
    rms_norm_eps: added to the mean square of a layer's output where that is brought to a root mean square of 1.
    head_rank: the head goes through so many dimensions, which makes it smaller by E / head_rank; None for the whole.
    draft_vocab_size: V' when the head knows only a part of the vocabulary, with an id map in the weights; None for all.
    draft_beams, draft_len_per_beam: the beam search's defaults (transformers keeps the name `num_beams` for itself in a
    saved config). trained_draft_len: steps it was trained for.
    base_model: the target's name. base_embedding_norms: norms of a few rows of the target's embedding table, by which a
    drafter that was made for another base is told.
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
        self.head_rank = head_rank
        self.draft_vocab_size = draft_vocab_size
        self.draft_beams = draft_beams
        self.draft_len_per_beam = draft_len_per_beam
        self.trained_draft_len = trained_draft_len
        self.base_model = base_model
        self.base_embedding_norms = base_embedding_norms
        super().__init__(**kwargs)

    def check(self) -> None:
        """Raise `ArgumentError` for values that make no drafter."""
        for name in ("vocab_size", "hidden_size", "exit_dim", "draft_beams", "draft_len_per_beam"):
            self._check_size(name)
        for name in ("head_rank", "trained_draft_len", "draft_vocab_size"):
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

    def _check_size(self, name: str, least: int = 1, most: int = MAX_SIZE) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value <= most:
            raise ArgumentError(f"DrafterConfig.{name} must be an integer from {least} to {most}, got {value!r}")


class _Residual(nn.Module):
    """`x + SiLU(W x + b)`."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class RecurrentDrafter(PreTrainedModel):
    """The head and its recurrence. The target's embedding table is shared, not stored.

    draft_ids: `[V']` int64 buffer, the target's id of each drafter id; None when the head knows the whole vocabulary.
    Raises `ArgumentError` for a config that makes no drafter.
    """

    config_class = DrafterConfig
    config: DrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "embedding"

    def __init__(self, config: DrafterConfig):
        config.check()
        super().__init__(config)
        hidden, exit_dim = config.hidden_size, config.exit_dim
        self.input_proj = nn.Linear(2 * hidden, exit_dim) if exit_dim != 2 * hidden else None
        self.layers = nn.ModuleList(_Residual(exit_dim) for _ in range(config.num_draft_layers))
        rank = config.head_rank or exit_dim
        self.head_proj = nn.Linear(exit_dim, rank, bias=False) if config.head_rank else None
        self.lm_head = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        self.fuse = nn.Linear(self.feature_size, hidden) if config.target_layers else None
        if config.rnn and config.recurrence == "gated":
            self.rnn_gate = nn.Linear(3 * hidden, 2 * hidden)
        elif config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", ids)
        self.rnn_joined: Tensor | None
        self.register_buffer("rnn_joined", None, persistent=False)
        self.post_init()

    @property
    def feature_size(self) -> int:
        """F, of the hidden states that `take` is given."""
        return self.config.hidden_size * (1 + len(self.config.target_layers))

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """What all steps of a draft read of the target's hidden state: `[..., F]`, the last one after the final norm
        and then the outputs of `target_layers`, to `[..., D]`. Those are brought to a root mean square of 1."""
        if self.fuse is None:
            return hidden
        size = self.config.hidden_size
        last, outputs = hidden[..., :size], hidden[..., size:].unflatten(-1, (-1, size))  # [..., layers, D]
        precise = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        normed = rms_norm(precise, (size,), eps=self.config.rms_norm_eps).to(hidden)
        return last + self.fuse(torch.cat([last, normed.flatten(-2)], dim=-1))

    def step(self, embedding: Tensor, state: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the recurrence.

        embedding: `[..., D]`, the target's embedding of the last token. state: `[..., D]`, or None at the first step.
        hidden: `[..., D]`, what `take` made of the hidden state that produced the draft's first token.
        Returns logits `[..., V']` over the drafter's vocabulary and the new state `[..., D]`.
        """
        x, state = self.advance(embedding, state, hidden)
        return self.lm_head(x), state

    forward = step

    def advance(self, embedding: Tensor, state: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`step` up to its last product: what `lm_head` reads, `[..., R]`, and the new state."""
        state = self._recur(embedding, state, hidden)
        x = torch.cat([hidden.expand_as(state), state], dim=-1)  # [..., 2D]
        if self.input_proj is not None:
            x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head_proj is None else self.head_proj(x), state

    def join_recurrence(self) -> None:
        """From now on, until training, compute `W e + U s` as one product, from a copy of both weights: two small ones
        leave a GPU's memory bus idle half the time."""
        if self.config.rnn and self.config.recurrence != "gated":
            self.rnn_joined = torch.cat([self.rnn_w.weight, self.rnn_u.weight], dim=1).detach()

    def train(self, mode: bool = True) -> RecurrentDrafter:
        if mode:
            self.rnn_joined = None
        return super().train(mode)

    def _recur(self, embedding: Tensor, state: Tensor | None, hidden: Tensor) -> Tensor:
        if not self.config.rnn:
            return embedding if state is None else state + embedding
        if self.config.recurrence == "gated":
            before = torch.zeros_like(embedding) if state is None else state
            read = torch.cat([embedding, before, hidden.expand_as(embedding)], dim=-1)  # [..., 3D]
            gate, new = self.rnn_gate(read).chunk(2, dim=-1)
            return before + gate.sigmoid() * (silu(new) - before)
        if self.rnn_joined is not None and state is not None:
            joined = thin_linear(torch.cat([embedding, state], dim=-1), self.rnn_joined) + self.rnn_u.bias
            return silu(joined) if self.config.recurrence == "apple" else joined
        if self.config.recurrence == "trtllm":
            return self.rnn_w(embedding) if state is None else self.rnn_w(embedding) + self.rnn_u(state)
        carried = self.rnn_u.bias if state is None else self.rnn_u(state)
        return silu(self.rnn_w(embedding) + carried)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As `PreTrainedModel.from_pretrained`, but files that are missing, cut short, or that do not hold exactly
        this drafter's tensors raise `CheckpointError` instead of being filled with random weights."""
        place = Path(name) / kwargs.get("subfolder", "") if os.path.isdir(name) else name
        check_drafter(place)
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except Exception as error:
            if isinstance(error, ArgumentError):
                raise
            raise load_error("drafter", place, error) from error
        model, info = loaded
        wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        wrong["unexpected_keys"] = [key for key in wrong["unexpected_keys"] if key != "emb_norm.weight"]
        for key, names in wrong.items():
            if names:
                raise CheckpointError(f"{name} does not hold this drafter: {key.replace('_', ' ')} {', '.join(names)}")
        return (model, info) if wants_info else model
