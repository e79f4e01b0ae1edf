"""Temporary changes of a model during one forward, and detection of its owner's changes between two.

A model is used as it is, and its modules are shared by all threads. So all that a forward changes on them (hooks,
stand-ins for modules, other forwards, entries of configs) goes through a `ModelPatch`, which takes it off again in the
reverse order, and lets the forwards of other threads pass it by.

Fused layers, compiled forwards and captured steps are made from the model's weights, hooks, forwards and adapters, and
keys and values that are kept were computed with them. So a `ModelWatch` looks at these before each call, and a
`ModelState` says what has changed.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# What a model's code may raise where it cannot run something of ours.
MODEL_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)

CompiledPart: TypeAlias = tuple[nn.Module, str, Any]
"""A module, its attribute that `torch.compile` has set, and its uncompiled value."""

# Hooks of this library are set and removed by it, and those of transformers record outputs where its own calls ask.
_KNOWN_HOOKS = ("redrafter.", "transformers.")


class Running:
    """Inputs of the running forward that stand-ins share; the object outlives it, or a compiler would see another.

    Attributes:
        value: Inputs of the forward, as passed to `ModelPatch.set_running`; None between forwards.
        thread: The thread of the forward, whose model others may run meanwhile; None where nobody can.
    """

    value: Any = None
    thread: int | None = None

    def elsewhere(self) -> bool:
        """Return whether a stand-in is called by another thread's forward, which gets what the model alone gives."""
        return self.thread is not None and self.thread != threading.get_ident()


class ModelPatch:
    """A context that restores a model at its end; replacements that are declared inside apply at once.

    The order of declarations is that of nesting: a later stand-in for a module replaces an earlier one, and a hook is
    set on the replacement of a module then.
    """

    def __init__(self, *, threads_apart: bool = True):
        """Begin without changes.

        Args:
            threads_apart: Do not affect the forwards of other threads; a compiled forward cannot distinguish them.
        """
        self._thread = threading.get_ident() if threads_apart else None
        self._undo: list[tuple[Any, ...]] = []  # functions with their arguments

    def __enter__(self) -> "ModelPatch":
        return self

    def __exit__(self, *_: object) -> None:
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
        # The thread stays so: another one may be in a stand-in still when the forward has ended.
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
        """Set a forward hook of torch's on a module, after its forward or `before` it.

        One that is not `guarded` is called in the forwards of other threads too.
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
        """Run these parts of a model as they are written."""
        for module, attribute, original in parts:
            self.put(vars(module), attribute, original)

    def _own(
        self, function: Callable[..., object], otherwise: Callable[..., object] | None = None
    ) -> Callable[..., object]:
        """Return a function that does something else, or nothing, in the forwards of other threads."""
        if self._thread is None:
            return function

        @wraps(function)
        def guarded(*args: object, **kwargs: object) -> Any:
            if threading.get_ident() == self._thread:
                return function(*args, **kwargs)
            return None if otherwise is None else otherwise(*args, **kwargs)

        return guarded


@dataclass(frozen=True)
class ModelState:
    """The state of a model at some time, to compare with that of a later time.

    Attributes:
        memory: Each parameter and saved buffer, and where its numbers are.
        writes: How often each of them was written in place. Writes through `.data` are not counted by torch.
        code: Each module, the code that runs when it is called, and the state of its adapters.
        hooked: Whether any forward hook is called in a forward, this library's and transformers' own apart.
        compiled: The parts that are compiled by their owner.
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
                    writes.append(_count_writes(tensor))
        return cls(
            memory=memory,
            writes=writes,
            code=code,
            hooked=bool(code[0]) or any(entry[3] for entry in code[1:]),
            compiled=compiled,
        )


_TABLES = itemgetter("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks", "training")
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_VALUES = methodcaller("values")  # of any mapping: tensors that are kept elsewhere are in one that is no dictionary


class ModelWatch:
    """Checks, in a fraction of the time of a `ModelState`, whether a new one is needed.

    It looks at all that a `ModelState` is made of, in the modules that the model had when the watch was made; that
    these are its modules still follows from their children. It may take for a change what is none, such as a hook of
    transformers, and never the other way round.

    Attributes:
        training: Whether any module was in training mode at the last look.
    """

    def __init__(self, model: nn.Module):
        """Look at a model. The caller holds the lock of its forwards, which set hooks on it."""
        self._modules = list(model.modules())
        self._seen = self._look()

    def is_unchanged(self) -> bool:
        """Look again, and return whether all is as it was when the watch was made."""
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
            writes = list(map(_count_writes, tensors))
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


def _count_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, as far as torch counts."""
    try:
        return _VERSION(tensor)
    except RuntimeError:  # of one that was made in inference mode, which does not count
        return 0


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward hook of others than this library and transformers is called with a module."""
    return bool(_hook_ids(module) or _hook_ids(torch_module))


def hooked_module(model: nn.Module) -> str:
    """Name the first module of a hooked model that has a forward hook."""
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
    except (RuntimeError, NotImplementedError):  # of a class that keeps its numbers elsewhere, as some quantisers' do
        return 0
