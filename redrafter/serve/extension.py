"""The interface of extensions: packages that add routes, flags and changes of the engine to the server.

An extension is a module with an `EXTENSION`, an instance of a subclass of `Extension`. The server finds those in the
package `redrafter.extensions`, and those that entry points `redrafter.extensions` of other packages name; it imports
none by name, except in the alias `redrafter.serve.replicas.application`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from redrafter.errors import ArgumentError, first_line

if TYPE_CHECKING:
    from fastapi.responses import Response
    from starlette.routing import BaseRoute

    from redrafter.engine.engine import Engine
    from redrafter.scheduler.engine_change import EngineChange
    from redrafter.serve.engine_process.start import LoadEngine
    from redrafter.serve.network.api_keys import ApiKeys
    from redrafter.serve.protocol.requests import ApiError
    from redrafter.serve.server import Server

GROUP = "redrafter.extensions"  # the package that is searched, and the entry points of others
Respond = Callable[..., "Awaitable[Response]"]  # `respond` of `redrafter.serve.routes.app`
MakeChange = Callable[["Engine", str | None], "EngineChange"]  # of the engine, and a path on its machine or None
Launch = Callable[["LoadEngine", "ApiKeys", "ApiKeys"], None]  # of what to load, clients' keys and operators'


@dataclass(frozen=True)
class NoOptions:
    """The options of an extension without flags."""


class Extension:
    """What an extension adds to the server. A subclass overrides what it needs; by default nothing is added.

    `redrafter serve --help` imports the module of each extension, so it imports neither torch nor FastAPI: the methods
    import what they need.

    Attributes:
        options: Dataclass whose fields are flags of `redrafter serve`, for `launcher`.
        options_title: Their heading in `--help`.
        protocol_path: Path at and below which `format_error` makes the bodies of errors; None where they are OpenAI's.
        error_event: Name of the event of an error within a stream at these paths; None where it has no name.
        writing_paths: Paths of requests that have a `seed` and are answered with generated text.
        ignored_marks: Prefixes of texts in requests that are not part of the prompt.
    """

    options: type = NoOptions
    options_title = ""
    protocol_path: str | None = None
    error_event: str | None = None
    writing_paths: tuple[str, ...] = ()
    ignored_marks: tuple[str, ...] = ()

    def launcher(self, options: Any) -> Launch | None:
        """Return what serves in place of this process's own server; None where that serves. options: of `options`."""
        return None

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the routes of a server: each a `JsonRoute`, for clients, or an `OperatorRoute`, for operators.

        `respond` makes a response of a dictionary or of a stream, and stops the work where the client leaves.
        """
        return ()

    def format_error(self, error: "ApiError") -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an error at `protocol_path`."""
        raise NotImplementedError

    def changes(self) -> Mapping[str, MakeChange]:
        """Return what makes the changes of the engine that `EngineClient.change_engine` requests, by their kinds.

        The engine's process calls it. A change is found to be possible where it is made, and applied between two steps.
        """
        return {}


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of this package, in the order of their names, then those of entry points.

    Raises `ArgumentError` for an entry point that names no module with an `EXTENSION`.
    """
    package = find_spec(GROUP)
    assert package is not None
    folders = package.submodule_search_locations or ()
    found: list[Extension] = [import_module(f"{GROUP}.{module.name}").EXTENSION for module in iter_modules(folders)]
    for entry_point in entry_points(group=GROUP):
        try:
            found.append(import_module(entry_point.module).EXTENSION)
        except (ImportError, AttributeError) as error:
            raise ArgumentError(
                f"the entry point {entry_point.name} = {entry_point.value} of {GROUP} names no module with an "
                f"EXTENSION ({first_line(error)}): correct or uninstall its package"
            ) from error
    return tuple(found)


def make_change(kind: str, engine: "Engine", path: str | None) -> "EngineChange":
    """Make a change of the engine, of a kind that an extension has."""
    makers = {name: make for extension in extensions() for name, make in extension.changes().items()}
    return makers[kind](engine, path)


def protocol_at(path: str) -> Extension | None:
    """Return the extension whose protocol is spoken at a path; None for OpenAI's."""
    protocols = (extension for extension in extensions() if extension.protocol_path is not None)
    return next((each for each in protocols if f"{path}/".startswith(f"{each.protocol_path}/")), None)
