"""Temporary changes of a model during a forward, and detection of the owner's changes between forwards.

A model is used unchanged, and all threads share its modules. So all changes that a forward makes to them (hooks,
stand-ins for modules, other forwards, entries of configs) go through a `ModelPatch`, which reverts them in reverse
order, and which does not affect the forwards of other threads.

Fused layers, compiled forwards, captured steps and stored keys and values depend on the model's weights, hooks,
forwards and adapters. So a `ModelWatch` checks these before each call, and a `ModelState` identifies the changes.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# Errors that a model's code may raise where it cannot run one of our forwards.
MODEL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)

CompiledPart: TypeAlias = tuple[nn.Module, str, Any]
"""A module, its attribute that `torch.compile` has set, and its uncompiled value."""

# This library manages its own hooks, and transformers' hooks record outputs only for its own calls.
_KNOWN_HOOKS = ("redrafter.", "transformers.")


def in_other_thread(thread: int) -> bool:
    """Return whether another thread than the one of a patched forward runs this.

    A compiler cannot ask, and traces only the patched forward.
    """
    return not torch.compiler.is_compiling() and threading.get_ident() != thread


class Running:
    """Inputs of the running forward, shared by stand-ins; reused, or a compiler would see a new object each time.

    Attributes:
        value: Inputs of the forward, as passed to `ModelPatch.set_running`; None between forwards.
        thread: The thread of the forward; None before the first one.
    """

    value: Any = None
    thread: int | None = None

    def elsewhere(self) -> bool:
        """Return whether a stand-in was called by another thread's forward, which must get the model's own output."""
        return self.thread is not None and in_other_thread(self.thread)


class ModelPatch:
    """A context that restores a model at its end; changes declared inside apply at once.

    The order of declarations is the order of nesting: a later stand-in for a module replaces an earlier one, and a
    later hook is set on the replacement.
    """

    def __init__(self, *, every_thread: bool = False):
        """Begin without changes; with `every_thread`, they affect the forwards of all threads."""
        self._thread = None if every_thread else threading.get_ident()
        self._undo: list[tuple[Any, ...]] = []  # functions with their arguments

    def __enter__(self) -> "ModelPatch":
        return self

    def __exit__(self, *_: object) -> None:
        # In reverse order, as a later change may have replaced an earlier one.
        while self._undo:
            undo, *args = self._undo.pop()
            undo(*args)

    def put(self, entries: dict[str, Any], name: str, value: object) -> None:
        """Replace an entry of a module's own tables, such as `vars(module)` or those of its children and buffers."""
        undo = (entries.__setitem__, name, entries[name]) if name in entries else (entries.__delitem__, name)
        self._undo.append(undo)
        entries[name] = value

    def set(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of a config, or of any object that is no module."""
        self._undo.append((setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def set_running(self, running: Running, value: object) -> None:
        """Pass stand-ins the inputs of this forward."""
        # Not restored at the end: another thread may still be inside a stand-in when the forward has ended.
        running.thread = self._thread
        self.set(running, "value", value)

    def enter(self, context: AbstractContextManager[object]) -> None:
        """Enter another context, which is left in its place in the order of declarations."""
        context.__enter__()
        self._undo.append((context.__exit__, None, None, None))

    def hook(
        self,
        module: nn.Module,
        hook: Callable[..., object],
        *,
        before: bool = False,
        with_kwargs: bool = False,
        guarded: bool = True,
    ) -> None:
        """Set a torch forward hook on a module, after its forward or `before` it.

        A hook that is not `guarded` is also called in the forwards of other threads.
        """
        register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
        own = self._own(hook) if guarded else hook
        self._undo.append((register(own, with_kwargs=with_kwargs).remove,))

    def watch(self, modules: Iterable[nn.Module], record: Callable[[Tensor], None]) -> None:
        """Call `record` with every output of these modules, in the order of their calls."""
        for module in modules:
            self.hook(module, lambda _, __, output: record(output[0] if isinstance(output, tuple) else output))

    def replace_forward(self, module: nn.Module, run: Callable[..., object]) -> None:
        """Call `run(forward, args, kwargs)` in place of a module's forward."""
        forward = module.forward
        self.put(vars(module), "forward", self._own(lambda *args, **kwargs: run(forward, args, kwargs), forward))

    def run_uncompiled(self, parts: Sequence[CompiledPart]) -> None:
        """Run these parts of a model uncompiled."""
        for module, attribute, original in parts:
            self.put(vars(module), attribute, original)

    def _own(
        self, function: Callable[..., object], otherwise: Callable[..., object] | None = None
    ) -> Callable[..., object]:
        """Return a function that does something else, or nothing, in the forwards of other threads."""
        thread = self._thread
        if thread is None:
            return function

        @wraps(function)
        def guarded(*args: object, **kwargs: object) -> Any:
            if not in_other_thread(thread):
                return function(*args, **kwargs)
            return None if otherwise is None else otherwise(*args, **kwargs)

        return guarded


@dataclass(frozen=True)
class ModelState:
    """The state of a model at one time, to be compared with a later state.

    Attributes:
        memory: Each parameter and saved buffer, and its address.
        writes: In-place write count of each of them. Writes through `.data` are not counted by torch.
        code: Each module, the function that runs when it is called, and the state of its adapters.
        hooked: Whether any forward hook is called in a forward, except this library's and transformers' own.
        compiled: The parts that their owner has compiled.
    """

    memory: list[tuple[int, int]]
    writes: list[int]
    code: list[tuple[object, ...]]
    hooked: bool
    compiled: list[CompiledPart]

    @classmethod
    def from_model(cls, model: nn.Module) -> "ModelState":
        """Return the state of a model now. The caller holds the lock of its forwards, which set hooks on it."""
        memory = list[tuple[int, int]]()
        writes = list[int]()
        compiled = list[CompiledPart]()
        code: list[tuple[object, ...]] = [_hook_ids(torch_module)]
        waiting, seen = [model], set[int]()
        while waiting:  # several times faster than `modules()`
            module: Any = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            state, kind = vars(module), type(module)
            waiting.extend(child for child in state["_modules"].values() if child is not None)
            hooks = _hook_ids(module) if state["_forward_hooks"] or state["_forward_pre_hooks"] else ()
            forward = state.get("forward")
            adapters = _adapters_of(module) if _has_adapters(kind) else None
            code.append((id(module), kind.forward, forward, hooks, adapters))
            if state.get("_compiled_call_impl") is not None:
                compiled.append((module, "_compiled_call_impl", None))
            if (original := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
                compiled.append((module, "forward", original))
            for tensor in (*state["_parameters"].values(), *_saved_buffers(state)):
                if tensor is not None:
                    memory.append((id(tensor), _address(tensor)))
                    writes.append(count_writes(tensor))
        return cls(
            memory=memory,
            writes=writes,
            code=code,
            hooked=bool(code[0]) or any(entry[3] for entry in code[1:]),
            compiled=compiled,
        )


_TABLES = itemgetter("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks", "training")
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_VALUES = methodcaller("values")  # of any mapping, as accelerate keeps offloaded tensors in one that is no dict


class ModelWatch:
    """Checks, in a fraction of the time of a `ModelState`, whether a new one is needed.

    It checks all inputs of a `ModelState`, in the modules that the model had when the watch was made; the children of
    these modules show whether they are still the model's. It may report a change that is none, such as a hook of
    transformers, but never misses one.

    Attributes:
        training: Whether any module was in training mode at the last check.
    """

    def __init__(self, model: nn.Module):
        """Record a model's state. The caller holds the lock of its forwards, which set hooks on it."""
        self._modules = list(model.modules())
        self._seen = self._look()

    def is_unchanged(self) -> bool:
        """Check again, and return whether nothing has changed since the watch was made."""
        return self._look() == self._seen

    def _look(self) -> tuple[object, ...]:
        # Of 32 layers, there are 400 modules: each loop is one of Python's own functions where there is one, several
        # times faster than statements.
        states = [module.__dict__ for module in self._modules]
        kinds: list[Any] = list(map(type, self._modules))
        children, parameters, buffers, before, after, training = zip(*map(_TABLES, states), strict=True)
        self.training = any(training)
        tensors = [x for x in chain.from_iterable(map(_VALUES, filter(None, parameters))) if x is not None]
        if any(buffers):
            tensors += [x for state in states if state["_buffers"] for x in _saved_buffers(state)]
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
            writes = list(map(_VERSION, tensors))
        except (RuntimeError, NotImplementedError):  # of a tensor without an address, or without a version
            addresses = list(map(_address, tensors))
            writes = list(map(count_writes, tensors))
        kinds_once, adapters = dict.fromkeys(kinds), list[object]()
        if any(map(_has_adapters, kinds_once)):
            adapters = [_adapters_of(module) for module in self._modules if _has_adapters(type(module))]
        return (
            kinds,
            [kind.forward for kind in kinds_once],
            list(map(id, chain.from_iterable(map(_VALUES, filter(None, children))))),
            list(map(len, children)),
            list(map(id, tensors)),
            addresses,
            writes,
            list(map(tuple, (*filter(None, before), *filter(None, after)))),
            _hook_ids(torch_module),
            [state.get("forward") for state in states],
            [state.get("_compiled_call_impl") for state in states],
            adapters,
        )


def _saved_buffers(state: dict[str, Any]) -> list[Tensor]:
    """Return the saved buffers of a module; others change in forwards, such as the frequencies of rope."""
    passing = state["_non_persistent_buffers_set"]
    return [x for name, x in state["_buffers"].items() if name not in passing and x is not None]


def _has_adapters(kind: type) -> bool:
    """Return whether modules of a class are layers of PEFT's."""
    return isinstance(getattr(kind, "disable_adapters", None), property)


def _adapters_of(module: Any) -> tuple[object, ...]:
    """Return the state of the adapters of one of PEFT's layers."""
    return tuple(module.active_adapters), module.disable_adapters, tuple(getattr(module, "merged_adapters", ()))


def count_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, as counted by torch."""
    try:
        return _VERSION(tensor)
    except RuntimeError:  # tensors made in inference mode have no count
        return 0


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module calls a forward hook that is neither this library's nor transformers'."""
    return bool(_hook_ids(module) or _hook_ids(torch_module))


def hooked_module(model: nn.Module) -> str:
    """Name the first module with a forward hook, of a hooked model."""
    names = (
        f"its {name}" if name else type(model).__name__ for name, module in model.named_modules() if _hook_ids(module)
    )
    return next(names, "every module")


def _hook_ids(owner: object) -> tuple[int, ...]:
    """Return the ids of the forward hooks of a module, or of all modules where `owner` is torch's own file of them."""
    prefix = "_global" if owner is torch_module else ""
    hooks = {**vars(owner)[f"{prefix}_forward_pre_hooks"], **vars(owner)[f"{prefix}_forward_hooks"]}
    return tuple(
        key for key, hook in hooks.items() if not (getattr(hook, "__module__", "") or "").startswith(_KNOWN_HOOKS)
    )


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor class without storage, as of some quantisers
        return 0
