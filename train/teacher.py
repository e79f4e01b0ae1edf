"""The frozen base, asked once about whole texts."""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

__all__ = ["Teacher"]


class _NoCache(DynamicCache):
    """Keeps nothing. Given no cache at all, transformers asks the positions whether several texts are packed into a
    row, and the host waits for the device to answer."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Teacher:
    """A causal LM in eval mode, whose forward gives, beside its logits, what its head saw: the drafter's input.

    Both are the model's own, so whatever it does after its head (softcaps, scaling) is in the logits. Use it in `with`.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        self._seen: Tensor | None = None

    def __enter__(self) -> "Teacher":
        self._hook = self.model.get_output_embeddings().register_forward_pre_hook(self._tap)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _tap(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._seen = args[0]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: `[B, T]`; rows end in any ids as padding, which a causal model's earlier positions do not see.

        Returns hidden states `[B, T, D]` and logits `[B, T, V]`.
        """
        logits = self.model(input_ids=tokens, past_key_values=_NoCache(), use_cache=True).logits
        hidden, self._seen = self._seen, None
        assert hidden is not None, "the model's head was not called"
        return hidden, logits
