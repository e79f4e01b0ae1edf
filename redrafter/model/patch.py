"""What stands on a model during one forward: hooks, stand-ins for modules, other forwards and entries of configs.

A model is used as it is, and its modules are shared by all threads. So all that a forward changes on them goes through
a `ModelPatch`, which takes it off again in the reverse order, and lets the forwards of other threads pass it by.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import Tensor, nn


class Running:
    """What the stand-ins for some modules know of the running forward; they outlive it, or a compiler would see others.

    Attributes:
        value: What they need for it, as `ModelPatch.tell` was given it; None between forwards.
        thread: The thread of the forward, whose model others may run meanwhile; None where nobody can.
    """

    value: Any = None
    thread: int | None = None

    def elsewhere(self) -> bool:
        """Tell whether a stand-in is called by another thread's forward, which gets what the model alone gives."""
        return self.thread is not None and self.thread != threading.get_ident()


class ModelPatch:
    """A context after which a model is as it was before; what is declared inside stands on the model at once.

    The order of declarations is that of nesting: a later stand-in for a module replaces an earlier one, and a hook is
    set on what stands in the place of a module then.
    """

    def __init__(self, *, threads_apart: bool = True):
        """Begin without changes.

        Args:
            threads_apart: Let the forwards of other threads be; a compiled forward cannot tell.
        """
        self._thread = threading.get_ident() if threads_apart else None
        self._undo: list[tuple[Any, ...]] = []  # functions with their arguments

    def __enter__(self) -> "ModelPatch":
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            undo, *args = self._undo.pop()
            undo(*args)

    def put(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Replace an entry of a module's own tables, such as `vars(module)` or those of its children and buffers."""
        undo = (entries.__setitem__, name, entries[name]) if name in entries else (entries.__delitem__, name)
        self._undo.append(undo)
        entries[name] = value

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a config, or of any object that is no module."""
        self._undo.append((setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def tell(self, running: Running, value: Any) -> None:
        """Tell stand-ins what they need for this forward."""
        running.thread = (
            self._thread
        )  # and stays so: another thread may be in a stand-in still when the forward has ended
        self.set(running, "value", value)

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enter another context, which is left where it stands in the order of declarations."""
        context.__enter__()
        self._undo.append((context.__exit__, None, None, None))

    def hook(
        self, module: nn.Module, hook: Callable[..., Any], *, before: bool = False, with_kwargs: bool = False
    ) -> None:
        """Set a forward hook of torch's on a module, after its forward or `before` it."""
        register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
        self._undo.append((register(self._own(hook), with_kwargs=with_kwargs).remove,))

    def watch(self, modules: Iterable[nn.Module], record: Callable[[Tensor], None]) -> None:
        """Call `record` with every output of these modules, in the order of their calls."""
        for module in modules:
            self.hook(module, lambda _, __, output: record(output[0] if isinstance(output, tuple) else output))

    def replace_forward(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Call `run(forward, args, kwargs)` in place of a module's forward."""
        forward = module.forward
        self.put(vars(module), "forward", self._own(lambda *args, **kwargs: run(forward, args, kwargs), forward))

    def _own(self, function: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return a function that does something else, or nothing, in the forwards of other threads."""
        if self._thread is None:
            return function

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                return function(*args, **kwargs)
            return None if otherwise is None else otherwise(*args, **kwargs)

        return guarded
