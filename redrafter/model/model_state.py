"""What a model's owner may change after it was bound: weights, hooks, forwards, adapters; and `torch.compile` on it.

Fused layers, compiled forwards and captured steps are made from these, and keys and values that are kept were computed
with them. So they are looked at before each call, in one walk over the modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from redrafter.model.patch import ModelPatch

CompiledPart: TypeAlias = tuple[nn.Module, str, Any]
"""A module, its attribute that `torch.compile` has set, and what is there uncompiled."""

# Hooks of this library are set and removed by it, and those of transformers record outputs where its own calls ask.
_KNOWN_HOOKS = ("redrafter.", "transformers.")


@dataclass(frozen=True)
class ModelState:
    """The state of a model at some time, to compare with that of a later time.

    Attributes:
        memory: Each parameter and saved buffer, and where its numbers are.
        writes: How often each of them was written in place. Writes through `.data` are not counted by torch.
        code: Each module, what runs when it is called, and the state of its adapters.
        hooked: Whether any forward hook is called in a forward, this library's and transformers' own apart.
        compiled: The parts that are compiled by their owner.
    """

    memory: list[tuple[int, int]]
    writes: list[int]
    code: list[tuple[Any, ...]]
    hooked: bool
    compiled: list[CompiledPart]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """Return the state of a model now. The caller holds the lock of its forwards, which set hooks on it."""
        memory, writes, compiled = list[tuple[int, int]](), list[int](), list[CompiledPart]()
        code: list[tuple[Any, ...]] = [_hook_ids(torch_module)]
        waiting, seen = [model], set[int]()
        while waiting:  # several times faster than `modules()`
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            state, kind = vars(module), type(module)
            waiting.extend(child for child in state["_modules"].values() if child is not None)
            hooks = _hook_ids(module) if state["_forward_hooks"] or state["_forward_pre_hooks"] else ()
            forward = state.get("forward")
            code.append((id(module), kind.forward, forward, hooks, _adapter_state(module)))
            if state.get("_compiled_call_impl") is not None:
                compiled.append((module, "_compiled_call_impl", None))
            if (original := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
                compiled.append((module, "forward", original))
            tensors = list(state["_parameters"].values())
            if state["_buffers"]:  # those that are not saved change in forwards, such as the frequencies of rope
                passing = state["_non_persistent_buffers_set"]
                tensors += [buffer for name, buffer in state["_buffers"].items() if name not in passing]
            for tensor in tensors:
                if tensor is not None:
                    memory.append((id(tensor), _address(tensor)))
                    writes.append(0 if tensor.is_inference() else tensor._version)  # noqa: SLF001 -- torch names it so
        return cls(memory, writes, code, bool(code[0]) or any(entry[3] for entry in code[1:]), compiled)


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a forward hook of others than this library and transformers is called with a module."""
    return bool(_hook_ids(module) or _hook_ids(torch_module))


def hooked_module(model: nn.Module) -> str:
    """Name the first module of a hooked model that has a forward hook."""
    names = (
        f"its {name}" if name else type(model).__name__ for name, module in model.named_modules() if _hook_ids(module)
    )
    return next(names, "every module")


def run_uncompiled(patch: ModelPatch, parts: Sequence[CompiledPart]) -> None:
    """Run these parts of a model as they are written; hold the lock of its forwards."""
    for module, attribute, original in parts:
        patch.put(vars(module), attribute, original)


def _hook_ids(owner: Any) -> tuple[int, ...]:
    """Return the ids of the forward hooks of a module, or of all modules where `owner` is torch's own file of them."""
    prefix = "_global" if owner is torch_module else ""
    hooks = {**vars(owner)[f"{prefix}_forward_pre_hooks"], **vars(owner)[f"{prefix}_forward_hooks"]}
    return tuple(
        key for key, hook in hooks.items() if not (getattr(hook, "__module__", "") or "").startswith(_KNOWN_HOOKS)
    )


def _adapter_state(module: Any) -> tuple[Any, ...] | None:
    """Return which adapters of a layer of PEFT's are active, disabled and merged; None for any other module."""
    if not isinstance(getattr(type(module), "disable_adapters", None), property):  # of a whole model it is a method
        return None
    return tuple(module.active_adapters), module.disable_adapters, tuple(getattr(module, "merged_adapters", ()))


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # of a class that keeps its numbers elsewhere, as some quantisers' do
        return 0
