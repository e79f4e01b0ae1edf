"""Temporary changes of a model during a forward, and detection of the owner's changes between forwards.

A model is used unchanged, and all threads share its modules. So all changes that a forward makes to them (hooks,
stand-ins for modules, other forwards, entries of configs) go through a `ModelPatch`, which reverts them in reverse
order, and which does not affect the forwards of other threads.

Fused layers, compiled forwards, captured steps and stored keys and values depend on the model's weights, hooks,
forwards and adapters. So the `ModelState` of the last call is compared with the current one before each call.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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

Place: TypeAlias = tuple[nn.Module, str, nn.Module]
"""A parent of a module, the module's name there, and its stand-in."""

# This library manages its own hooks, and transformers' hooks record outputs only for its own calls.
_KNOWN_HOOKS = ("redrafter.", "transformers.")

_ORIGINAL = "_torchdynamo_orig_callable"  # attribute of compiled functions


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


def find_places(model: nn.Module, stand_ins: Mapping[nn.Module, nn.Module]) -> list[Place]:
    """Return every place of some modules in a model, with the stand-in of each."""
    children = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    return [(parent, name, stand_ins[child]) for parent, name, child in children if child in stand_ins]


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

    def put(self, entries: MutableMapping[str, Any], name: str, value: object) -> None:
        """Replace an entry of a module's own tables, such as `vars(module)` or those of its children and buffers."""
        undo = (entries.__setitem__, name, entries[name]) if name in entries else (entries.__delitem__, name)
        self._undo.append(undo)
        entries[name] = value

    def set(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of a config, or of any object that is no module."""
        self._undo.append((setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def put_stand_ins(self, places: Iterable[Place], running: Running, value: object) -> None:
        """Replace modules by stand-ins, which share `running`, and pass these the inputs of this forward."""
        self.set_running(running, value)
        for parent, name, stand_in in places:
            self.put(parent._modules, name, stand_in)

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

    def _own(self, function: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
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


_TABLES = itemgetter("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks", "training")
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_VALUES = methodcaller("values")  # of any mapping, as accelerate keeps offloaded tensors in one that is no dict


@dataclass(frozen=True)
class ModelState:
    """The state of a model at one time, to be compared with a later state.

    Attributes:
        modules: Its modules. The children of these, in `code`, show whether they are still the model's.
        memory: The ids of all parameters and saved buffers, and their addresses.
        writes: In-place write count of each of them. Writes through `.data` are not counted by torch.
        code: Classes, children, functions that run when modules are called, hooks, and adapters.
        calls: What `torch.compile` has set on each module, if anything.
        hooked: Whether any forward hook is called in a forward, except this library's and transformers' own.
        training: Whether any module is in training mode; not compared.
    """

    modules: list[nn.Module] = field(compare=False, repr=False)
    memory: tuple[list[int], list[int]]
    writes: list[int]
    code: tuple[object, ...]
    calls: list[object]
    hooked: bool
    training: bool = field(compare=False)

    @classmethod
    def from_model(cls, model: nn.Module) -> "ModelState":
        """Return the state of a model now. The caller holds the lock of its forwards, which set hooks on it."""
        return cls._of_modules(list(model.modules()))

    def again(self) -> "ModelState":
        """Return the state of the same modules now, in a fraction of the time that finding them takes."""
        return self._of_modules(self.modules)

    @classmethod
    def _of_modules(cls, modules: list[nn.Module]) -> "ModelState":
        # Of 32 layers, there are 400 modules: each loop is one of Python's own functions where there is one, several
        # times faster than statements.
        states = [module.__dict__ for module in modules]
        kinds: list[Any] = list(map(type, modules))
        children, parameters, buffers, before, after, training = zip(*map(_TABLES, states), strict=True)
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
            adapters = [_adapters_of(module) for module in modules if _has_adapters(type(module))]
        hooks = [*map(_hook_ids, filter(None, before)), *map(_hook_ids, filter(None, after)), *_global_hooks()]
        code = (
            kinds,
            [kind.forward for kind in kinds_once],
            list(map(id, chain.from_iterable(map(_VALUES, filter(None, children))))),
            list(map(len, children)),
            [state.get("forward") for state in states],
            list(filter(None, hooks)),
            adapters,
        )
        calls = [state.get("_compiled_call_impl") for state in states]
        return cls(modules, (list(map(id, tensors)), addresses), writes, code, calls, any(hooks), any(training))

    @property
    def compiled(self) -> list[CompiledPart]:
        """The parts that their owner has compiled."""
        calls = zip(self.modules, self.calls, strict=True)
        parts: list[CompiledPart] = [(x, "_compiled_call_impl", None) for x, call in calls if call is not None]
        forwards = ((module, getattr(vars(module).get("forward"), _ORIGINAL, None)) for module in self.modules)
        return parts + [(module, "forward", original) for module, original in forwards if original is not None]


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
    own = _hook_ids(module._forward_pre_hooks), _hook_ids(module._forward_hooks)
    return any((*own, *_global_hooks()))


def hooked_module(model: nn.Module) -> str:
    """Name the first module with a forward hook, of a hooked model."""
    of_all = any(_global_hooks())
    names = (f"its {name}" if name else type(model).__name__ for name, x in model.named_modules() if has_hooks(x))
    return "every module" if of_all else next(names)


def _hook_ids(hooks: dict[int, Callable[..., object]]) -> list[int]:
    """Return the ids of the forward hooks in a module's table, without this library's and transformers' own."""
    return [key for key, x in hooks.items() if not (getattr(x, "__module__", "") or "").startswith(_KNOWN_HOOKS)]


def _global_hooks() -> tuple[list[int], list[int]]:
    """Return the ids of the hooks that all modules call, before and after their forwards."""
    before, after = itemgetter("_global_forward_pre_hooks", "_global_forward_hooks")(vars(torch_module))
    return _hook_ids(before), _hook_ids(after)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor class without storage, as of some quantisers
        return 0
