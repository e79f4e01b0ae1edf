"""The mixers of a model as one opaque operator, so that the compiler compiles everything around them.

The plan of the running forward (`recurrent_layers`) computes a mixer's output: it calls the mixer once for each level
of the trees and stores its states. A compiler can trace neither, so it sees an operator from one vector per token to
another, as it does for attention.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from redrafter.model.patch import ModelPatch, Running, find_places
from redrafter.model.recurrent_layers import Mixer, PromptStates, TreeStates

# Operators take only numbers and tensors, so a mixer is passed as a number.
_STAND_INS: "WeakValueDictionary[int, _StandIn]" = WeakValueDictionary()

# The operator writes states although its schema declares no mutation, as attention does with its pools: only these
# operators read them, and they run in order because each layer needs the output of the one before.
_MIX = torch.library.custom_op(
    "redrafter::mix",
    lambda x, number: _STAND_INS[number].mix(x),
    mutates_args=(),
    schema="(Tensor x, SymInt number) -> Tensor",
)
_MIX.register_fake(lambda x, number: x.new_empty(x.shape))


class _StandIn(nn.Module):
    """A stand-in for one mixer, which passes only the tokens to the operator."""

    def __init__(self, mixer: Mixer, running: Running):
        super().__init__()
        self.name = mixer.tokens_argument
        self.at = mixer.parameters.index(mixer.tokens_argument)
        # Above those of all living stand-ins, since a compiled forward keeps the number of its own.
        self.number = 1 + max(_STAND_INS.keys(), default=0)
        self._mixer, self._forward, self._running = mixer, mixer.module.forward, running
        _STAND_INS[self.number] = self

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the vectors `[B, T, D]` after mixing those that the mixer is given; its own in other threads."""
        if self._running.elsewhere():
            own: Tensor = self._forward(*args, **kwargs)
            return own
        mixed: Tensor = _MIX(kwargs[self.name] if self.name in kwargs else args[self.at], self.number)
        return mixed

    def mix(self, x: Tensor) -> Tensor:
        """Compute the mixer's output for tokens `[B, T, D]`."""
        given = dict.fromkeys(self._mixer.arguments) | {self.name: x}
        mixed: Tensor = self._running.value.run_mixer(self._mixer, self._forward, given)
        return mixed.contiguous()


class MixerOperators:
    """Stand-ins for the mixers of a model. They outlive a forward, or a compiler would see other modules each time."""

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer]):
        """Make stand-ins for mixers that need only the tokens, as `Mixer.tokens_alone` defines."""
        self._running = Running()
        self._places = find_places(model, {mixer.module: _StandIn(mixer, self._running) for mixer in mixers})

    def add_to(self, patch: ModelPatch, plan: TreeStates | PromptStates) -> None:
        """Let a plan compute what the mixers return. Call `finish` of the plan after the forward."""
        patch.put_stand_ins(self._places, self._running, plan)
