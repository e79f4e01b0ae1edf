"""Hooks for one forward on modules that all threads share."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


def only_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it does nothing in forwards of other threads.

    A hook is set on a module, which all threads share; what it does is for one forward alone.
    """
    thread = threading.get_ident()

    @wraps(hook)
    def guarded(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return guarded
