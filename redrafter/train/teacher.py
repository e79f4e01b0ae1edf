"""The frozen base, asked once about whole texts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from redrafter.attention.mask import AttentionKind, additive_mask
from redrafter.target.attention_probe import probe_attention
from redrafter.target.aux_hidden import decoder_layers, join_hidden, watch_outputs

__all__ = ["Teacher", "TeacherOutput"]


@dataclass(frozen=True)
class TeacherOutput:
    """What a base made of texts. hidden: `[B, T, F]`, what a drafter reads (see `features`). embedding: `[B, T, D]`, of
    the texts' tokens. logits: `[B, T, V]`."""

    hidden: Tensor
    embedding: Tensor
    logits: Tensor


@dataclass
class _Seen:
    """What the hooks saw in one reading."""

    last: Tensor | None = None
    embedding: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)


class _NoCache(DynamicCache):
    """Keeps nothing. Given no cache at all, transformers asks the positions whether several texts are packed into a
    row, and the host waits for the device to answer."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Teacher:
    """A causal LM in eval mode, whose forward gives, beside its logits, what its head saw: the drafter's input.

    Both are the model's own, so whatever it does after its head (softcaps, scaling) is in the logits. layers: those
    whose outputs stand behind the last hidden state. Use it in `with`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        self.model: Any = model.eval()
        config = model.config.get_text_config(decoder=True)
        ids = torch.zeros(2, dtype=torch.long, device=model.device)
        with torch.no_grad():
            self._kinds = probe_attention(model, config, ids).layer_kinds(config).by_name
        self._layers = decoder_layers(model, config.num_hidden_layers, layers)
        self._seen: _Seen | None = None  # only while it reads; others run the model in between

    def __enter__(self) -> "Teacher":
        self._hooks = ExitStack()
        self._hooks.callback(self.model.get_output_embeddings().register_forward_pre_hook(self._tap).remove)
        self._hooks.enter_context(watch_outputs([self.model.get_input_embeddings()], self._see_embedding))
        self._hooks.enter_context(watch_outputs(self._layers, self._see_output))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _tap(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._seen is not None:
            self._seen.last = args[0]

    def _see_embedding(self, output: Tensor) -> None:
        if self._seen is not None:
            self._seen.embedding = output

    def _see_output(self, output: Tensor) -> None:
        if self._seen is not None:
            self._seen.outputs.append(output)

    @torch.no_grad()
    def read(self, tokens: Tensor, segment: Tensor | None = None) -> TeacherOutput:
        """tokens: `[B, T]`; rows end in any ids as padding, which a causal model's earlier positions do not see.
        segment: `[B, T]`, which text of its row each token is of; None where each row is one text."""
        packed = {} if segment is None else self._packed(segment)
        self._seen = seen = _Seen()
        try:
            logits = self.model(input_ids=tokens, past_key_values=_NoCache(), use_cache=True, **packed).logits
        finally:
            self._seen = None
        assert seen.last is not None, "the model did not call its head"
        assert seen.embedding is not None, "the model did not call its embedding"
        return TeacherOutput(join_hidden(seen.last, seen.outputs), seen.embedding, logits)

    def _packed(self, segment: Tensor) -> dict[str, Any]:
        """Positions that begin anew with each text, and masks that keep texts from each other."""
        place = torch.arange(segment.shape[1], device=segment.device)
        begins = torch.ones_like(segment, dtype=torch.bool)
        begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
        position = place - torch.where(begins, place, 0).cummax(dim=1).values  # [B, T]
        same = (segment[:, :, None] == segment[:, None, :]) & (place[:, None] >= place)  # [B, T, T]
        masks = {
            name: additive_mask(same & _near(position, kind), self.model.dtype) for name, kind in self._kinds.items()
        }
        return {
            "position_ids": position,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        }


def _near(position: Tensor, kind: AttentionKind) -> Tensor:
    """Which positions `[B, T]` a layer of this kind looks back to, `[B, T, T]` or broadcastable."""
    at, back = position[:, :, None], position[:, None, :]
    if kind.window is not None:
        return at - back < kind.window
    if kind.chunk is not None:
        return at // kind.chunk == back // kind.chunk
    return torch.ones((), dtype=torch.bool, device=position.device)
