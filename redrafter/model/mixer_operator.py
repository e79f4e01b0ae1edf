"""The mixers of a model as one operator, which a compiler does not look into, so that all around them is compiled.

What a mixer returns is computed by the plan of the running forward (`recurrent_layers`), which calls the mixer once for
each level of the trees and stores its states. A compiler can follow neither, so it sees an operator that takes a vector
of each token and returns another, as it sees attention.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from redrafter.model.patch import ModelPatch, Running
from redrafter.model.recurrent_layers import Mixer, PromptStates, TreeStates

# An operator takes numbers and tensors, so it finds a mixer by its number.
_STAND_INS: "WeakValueDictionary[int, _StandIn]" = WeakValueDictionary()

# The states are written though nothing is declared as mutated, as the pools of attention are: their only readers are
# these operators, which run in order because each layer needs the one before.
_MIX = torch.library.custom_op(
    "redrafter::mix",
    lambda x, number: _STAND_INS[number].mix(x),
    mutates_args=(),
    schema="(Tensor x, SymInt number) -> Tensor",
)
_MIX.register_fake(lambda x, number: x.new_empty(x.shape))


class _StandIn(nn.Module):
    """A stand-in for one mixer, which hands the operator nothing but the tokens."""

    def __init__(self, mixer: Mixer, running: Running):
        super().__init__()
        self.name = mixer.tokens_argument
        self.at = mixer.parameters.index(mixer.tokens_argument)
        # Above those of all living stand-ins, since a compiled forward keeps the number of its own.
        self.number = 1 + max(_STAND_INS.keys(), default=0)
        self._mixer, self._forward, self._running = mixer, mixer.module.forward, running
        _STAND_INS[self.number] = self

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the vectors `[B, T, D]` after mixing those that the mixer is given."""
        mixed: Tensor = _MIX(kwargs[self.name] if self.name in kwargs else args[self.at], self.number)
        return mixed

    def mix(self, x: Tensor) -> Tensor:
        """Compute what the mixer returns for tokens `[B, T, D]`."""
        given = dict.fromkeys(self._mixer.arguments) | {self.name: x}
        mixed: Tensor = self._running.value.run_mixer(self._mixer, self._forward, given)
        return mixed.contiguous()


class MixerOperators:
    """Stand-ins for the mixers of a model. They outlive a forward, or a compiler would see other modules each time."""

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer]):
        """Make stand-ins for mixers that need nothing but the tokens; see `Mixer.tokens_alone`."""
        self._running = Running()
        by_id = {id(mixer.module): _StandIn(mixer, self._running) for mixer in mixers}
        self._stand_ins = [
            (parent, name, by_id[id(module)])
            for parent in model.modules()
            for name, module in parent.named_children()
            if id(module) in by_id
        ]

    def add_to(self, patch: ModelPatch, plan: TreeStates | PromptStates) -> None:
        """Let a plan compute what the mixers return. Call `finish` of the plan after the forward."""
        patch.set_running(self._running, plan)
        for parent, name, stand_in in self._stand_ins:
            patch.put(parent._modules, name, stand_in)
