"""Run the frozen base as the teacher: one forward over whole texts returns logits and the drafter's inputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from redrafter.attention.mask import additive_mask
from redrafter.attention.prompt_attention import Piece
from redrafter.cache.dense import CACHE_NAME, cache_argument
from redrafter.errors import UnsupportedError
from redrafter.model.forward_batch import decoder_layers, join_hidden
from redrafter.model.patch import ModelPatch
from redrafter.model.quantized_layers import QuantizedLinear
from redrafter.model.recurrent_layers import PromptStates, replace_mixers
from redrafter.model.traits import learn_traits


@dataclass(frozen=True)
class TeacherOutput:
    """Outputs of the base for a batch of texts."""

    hidden: Tensor  # hidden states that a drafter reads, `[B, T, F]`: the last one, then the fused layers'
    embedding: Tensor  # embeddings of the tokens, `[B, T, D]`
    logits: Tensor  # the base's logits, `[B, T, V]`
    table: nn.Module | None = None  # the base's embedding table
    head: nn.Module | None = None  # the base's head

    def fill_head(self, factors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """Return the factors of a head of `TrainableDrafter.trained_heads`, with the base's weight in place of None.

        Raises `UnsupportedError` if the base's head is no product of floating-point numbers.
        """
        x, weight, *terms = factors
        assert x is not None
        if weight is None:
            head: Any = self.head
            quantized = isinstance(head, QuantizedLinear)
            weight = head.dequantize(x.dtype) if quantized else getattr(head, "weight", None)
            if not isinstance(weight, Tensor) or weight.shape != (self.logits.shape[-1], x.shape[-1]):
                weight = None
            if weight is None or weight.dtype.itemsize == 1:
                raise UnsupportedError(
                    f"a drafter without a head of its own is trained through the base's, and a {type(head).__name__} "
                    "in a quantised format has no gradient; train for the base that was quantised, or give a new "
                    "drafter a head with --draft-vocab-size"
                )
            weight, bias = weight.detach(), getattr(head, "bias", None)
            if bias is not None:
                terms += [torch.ones_like(x[..., :1]), bias.detach()[:, None]]
        return x, weight, *(term for term in terms if term is not None)


class _NoCache(DynamicCache):
    """A cache that stores nothing.

    Without a cache object, transformers checks on the device whether rows are packed, which makes the host wait.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Teacher:
    """A context manager that hooks a causal LM, to return the input of its head together with its logits.

    Both come from the model's own forward, so the logits include operations after the head (softcaps, scaling).

    `layers` are the decoder layers whose outputs are joined to the last hidden state.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        self.model: Any = model.eval()
        config = model.config.get_text_config(decoder=True)
        ids = torch.arange(8, device=model.device) % config.vocab_size
        with torch.no_grad():
            traits = learn_traits(model, config, ids, type(model).__name__)
        self._mixers, self._kinds = traits.mixers, traits.kinds.by_name
        self._cache_name = cache_argument(self.model.forward) or CACHE_NAME
        self._layers = decoder_layers(model, config.num_hidden_layers, layers)
        # Set during `read_batch` only; the model may run between reads.
        self._captured: dict[str, list[Tensor]] | None = None

    def __enter__(self) -> "Teacher":
        self._hooks = ModelPatch(every_thread=True)
        self._hooks.hook(self.model.get_output_embeddings(), lambda _, args: self._note("last", args[0]), before=True)
        self._hooks.watch([self.model.get_input_embeddings()], lambda output: self._note("embedding", output))
        self._hooks.watch(self._layers, lambda output: self._note("layers", output))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _note(self, what: str, tensor: Tensor) -> None:
        if self._captured is not None:
            self._captured[what].append(tensor)

    @torch.no_grad()
    def read_batch(self, tokens: Tensor, segment: Tensor | None = None) -> TeacherOutput:
        """Run the base over a batch of texts.

        `tokens` is `[B, T]` int64. Rows may be padded on the right with any ids, since a causal model does not attend
        to them from earlier positions. `segment` is the index of each token's text within its row, `[B, T]`; None for
        one text per row.
        """
        arguments = {} if segment is None else self._packed(segment)
        # Recurrent layers would store their states in a cache.
        arguments |= {"use_cache": False} if self._mixers else {self._cache_name: _NoCache(), "use_cache": True}
        captured: dict[str, list[Tensor]] = {"last": [], "embedding": [], "layers": []}
        self._captured = captured
        try:
            with nullcontext() if segment is None else self._apart(segment):
                logits = self.model(input_ids=tokens, **arguments).logits
        finally:
            self._captured = None
        assert captured["last"], "the model did not call its head"
        assert captured["embedding"], "the model did not call its embedding"
        hidden, embedding = join_hidden(captured["last"][-1], captured["layers"]), captured["embedding"][-1]
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return TeacherOutput(hidden, embedding, logits, table, head)

    def _packed(self, segment: Tensor) -> dict[str, Any]:
        """Create the model's arguments for packed rows: positions that restart at 0 and masks between texts."""
        index = torch.arange(segment.shape[1], device=segment.device)
        # Positions restart at each text, as the model sees it in generation.
        begins = torch.ones_like(segment, dtype=torch.bool)
        begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
        position = index - torch.where(begins, index, 0).cummax(dim=1).values  # [B, T]
        # A packed row holds several texts, which must not attend to each other.
        same = (segment[:, :, None] == segment[:, None, :]) & (index[:, None] >= index)  # [B, T, T]
        query, key = position[:, :, None], position[:, None, :]
        # One mask per kind of layer: sliding-window and chunked layers attend to fewer positions.
        limited = {name: kind.limit(same, query, key) for name, kind in self._kinds.items()}
        masks = {name: additive_mask(seen, self.model.dtype) for name, seen in limited.items()}
        if not masks:  # no layer attends
            return {}
        return {"position_ids": position, "attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}

    @contextmanager
    def _apart(self, segment: Tensor) -> Iterator[None]:
        """Make recurrent layers start each text of a packed row from an initial state."""
        lengths = [len(list(run)) for row in segment.tolist() for _, run in groupby(row)]
        pieces = [Piece(text, 0, length) for text, length in enumerate(lengths)]
        with ModelPatch() as patch:
            replace_mixers(patch, self._mixers, PromptStates(pieces, states=None))
            yield
