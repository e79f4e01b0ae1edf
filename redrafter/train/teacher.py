"""The frozen base as the teacher: one forward over whole texts gives its logits and the drafter's input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from redrafter.attention.mask import AttentionKind, additive_mask
from redrafter.attention.prompt_attention import Piece
from redrafter.model.forward_batch import decoder_layers, join_hidden
from redrafter.model.patch import ModelPatch
from redrafter.model.recurrent_layers import PromptStates, replace_mixers
from redrafter.model.traits import learn_traits


@dataclass(frozen=True)
class TeacherOutput:
    """Output of the base for a batch of texts."""

    hidden: Tensor  # hidden states that a drafter reads, `[B, T, F]`: the last one, then those of the fused layers
    embedding: Tensor  # embeddings of the tokens, `[B, T, D]`
    logits: Tensor  # the base's logits, `[B, T, V]`


@dataclass
class _Captured:
    """Tensors that the hooks captured in one forward."""

    last: Tensor | None = None
    embedding: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)


class _NoCache(DynamicCache):
    """A cache that keeps nothing.

    Without a cache, transformers checks on the device whether several texts are packed into a row, and the host waits.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Teacher:
    """A causal LM in eval mode whose forward also gives the input of its head. Use it in `with`, which sets the hooks.

    Both come from the model's own forward, so whatever it does after its head (softcaps, scaling) is in the logits.

    `layers` are the decoder layers whose outputs are joined to the last hidden state.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        self.model: Any = model.eval()
        config = model.config.get_text_config(decoder=True)
        ids = torch.arange(8, device=model.device) % config.vocab_size
        with torch.no_grad():
            traits = learn_traits(model, config, ids, type(model).__name__)
        self._mixers, self._kinds = traits.mixers, traits.kinds.by_name
        self._layers = decoder_layers(model, config.num_hidden_layers, layers)
        self._captured: _Captured | None = None  # set during `read` only; the model may run between reads

    def __enter__(self) -> "Teacher":
        self._hooks = ModelPatch(threads_apart=False)
        self._hooks.hook(self.model.get_output_embeddings(), self._capture_head_input, before=True)
        self._hooks.watch([self.model.get_input_embeddings()], self._capture_embedding)
        self._hooks.watch(self._layers, self._capture_layer)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _capture_head_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._captured is not None:
            self._captured.last = args[0]

    def _capture_embedding(self, output: Tensor) -> None:
        if self._captured is not None:
            self._captured.embedding = output

    def _capture_layer(self, output: Tensor) -> None:
        if self._captured is not None:
            self._captured.outputs.append(output)

    @torch.no_grad()
    def read(self, tokens: Tensor, segment: Tensor | None = None) -> TeacherOutput:
        """Run the base over a batch of texts.

        `tokens` is `[B, T]` int64. Rows are padded at the end with any ids, since earlier positions of a causal model
        do not see them. `segment` is the number of each token's text within its row, `[B, T]`; None where each row is
        one text.
        """
        arguments = {} if segment is None else self._packed(segment)
        # Recurrent layers would keep their states in a cache.
        arguments |= {"use_cache": False} if self._mixers else {"past_key_values": _NoCache(), "use_cache": True}
        self._captured = captured = _Captured()
        try:
            with nullcontext() if segment is None else self._apart(segment):
                logits = self.model(input_ids=tokens, **arguments).logits
        finally:
            self._captured = None
        assert captured.last is not None, "the model did not call its head"
        assert captured.embedding is not None, "the model did not call its embedding"
        return TeacherOutput(join_hidden(captured.last, captured.outputs), captured.embedding, logits)

    def _packed(self, segment: Tensor) -> dict[str, Any]:
        """Make the model's arguments for rows of several texts: positions from 0 in each, and masks between them."""
        index = torch.arange(segment.shape[1], device=segment.device)
        begins = torch.ones_like(segment, dtype=torch.bool)
        begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
        position = index - torch.where(begins, index, 0).cummax(dim=1).values  # [B, T]
        same = (segment[:, :, None] == segment[:, None, :]) & (index[:, None] >= index)  # [B, T, T]
        masks = {
            name: additive_mask(same & _in_reach(position, kind), self.model.dtype)
            for name, kind in self._kinds.items()
        }
        if not masks:  # no layer attends
            return {}
        return {
            "position_ids": position,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        }

    @contextmanager
    def _apart(self, segment: Tensor) -> Iterator[None]:
        """Have recurrent layers read each text of a row of several from no state."""
        starts, lengths = list[int](), list[int]()
        for row in segment.tolist():
            for _, run in groupby(row):
                starts.append(sum(lengths))
                lengths.append(len(list(run)))
        pieces = [Piece(text, 0, length) for text, length in enumerate(lengths)]
        with ModelPatch() as patch:
            replace_mixers(patch, self._mixers, PromptStates(pieces, starts, states=None))
            yield


def _in_reach(position: Tensor, kind: AttentionKind) -> Tensor:
    """Return which keys each query of a layer of this kind attends to, `[B, T, T]` bool or broadcastable.

    `position` is that of each token in its text, `[B, T]`; `kind` is full attention, or within a window or a chunk.
    """
    query, key = position[:, :, None], position[:, None, :]
    if kind.window is not None:
        return query - key < kind.window
    if kind.chunk is not None:
        return query // kind.chunk == key // kind.chunk
    return torch.ones((), dtype=torch.bool, device=position.device)
